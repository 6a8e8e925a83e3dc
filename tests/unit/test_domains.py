"""Public text domains: every format becomes prose, each content counts once, and a limit takes a fixed fair sample.

The samples are made up.
"""

import gzip
import hashlib
import io
import tarfile
import zlib
from dataclasses import replace
from typing import get_args

import pytest

from dpmixmin.data import domain_readers as readers
from dpmixmin.data import domains
from dpmixmin.data.domain_table import DOMAINS
from dpmixmin.data.packages import SPAM_ASSASSIN, PackageFiles
from dpmixmin.data.roff import roff_text
from dpmixmin.errors import UserError
from dpmixmin.table_sections import Domain


def man(source: str) -> str:
    return readers.tidy(roff_text(source))


# -- the table ------------------------------------------------------------------------------------------------


def test_the_table_has_exactly_the_domains_of_a_config_and_none_is_made_from_the_private_mail():
    assert set(DOMAINS) == set(get_args(Domain))
    for name, info in DOMAINS.items():
        assert info.packages, name
        assert SPAM_ASSASSIN.name not in {package.name for package in info.packages}
        assert info.licence
        assert "\n" not in info.licence
        for package in info.packages:
            assert len(package.sha256) == 64
            assert int(package.sha256, 16)


def test_packages_that_several_domains_share_are_one():
    shown = [package for info in DOMAINS.values() for package in info.packages]
    assert len({(package.client, package.name) for package in shown}) == len({id(package) for package in shown})


# -- reading --------------------------------------------------------------------------------------------------


@pytest.fixture
def domain(tmp_path, monkeypatch):
    """Put a domain of these files in place of `sotu`; return its name."""

    def make(files: dict[str, str], **changes) -> str:
        for name, text in files.items():
            (tmp_path / name).write_bytes(text.encode())
        held = PackageFiles(tmp_path, "made-up", "1.0", "0" * 64, tuple(sorted(files)))
        monkeypatch.setattr(domains, "open_package", lambda package: held)
        monkeypatch.setattr(domains, "fetch_package", lambda package: held)
        monkeypatch.setitem(DOMAINS, "sotu", replace(DOMAINS["sotu"], **changes))
        return "sotu"

    return make


def letters(word: str, count: int) -> str:
    return " ".join([word] * count)


def test_documents_come_in_the_order_of_their_paths_each_content_once_and_short_ones_are_dropped(domain):
    long = {name: letters(name, 100) for name in "dcba"}
    files = long | {
        "copy-of-a": long["a"] + "  \n",
        "empty": "",
        "short": letters("x", 99),
        "index": letters("i", 200),
    }
    assert domains.read_domain(domain(files, without=("ind*",), shortest=199)) == [long[name] for name in "abcd"]


def test_foreign_documents_are_dropped(domain):
    files = {"en": letters("plain naïve text", 50), "el": letters("λόγος", 50)}
    assert domains.read_domain(domain(files)) == [files["en"]]


def test_bytes_that_are_not_utf_8_are_latin_1():
    assert readers.decoded("naïve".encode()) == readers.decoded("naïve".encode("latin-1")) == "naïve"


def test_a_limit_takes_documents_in_the_order_of_their_hashes_and_cuts_between_words(domain):
    texts = {f"{number:03}": letters(f"w{number:03}", 100) for number in range(40)}  # 499 characters each
    name = domain(texts)
    found = domains.read_domain(name, 5_000)
    by_hash = sorted(texts, key=lambda key: hashlib.sha256(texts[key].encode()).digest())
    # Each gives at most max(5000 / 50, 2 * 200) characters, that is 80 words.
    assert sorted(map(len, found))[1:] == [399] * (len(found) - 1), "only the last that was taken is shorter"
    taken = [text.split()[0][1:] for text in found]
    assert taken == sorted(taken), "in the order of the domain"
    assert set(taken) == set(by_hash[: len(taken)])
    assert 4_800 <= sum(map(len, found)) <= 5_000
    assert domains.read_domain(name, 5_000) == found
    whole = domains.read_domain(name, 10**6)
    assert whole == list(texts.values())


def test_a_sample_does_not_change_when_others_are_renamed(domain, tmp_path):
    texts = {f"{number:03}": letters(f"w{number:03}", 100) for number in range(40)}
    first = domains.read_domain(domain(texts), 3_000)
    again = domains.read_domain(domain({f"z{int(key) * 7 % 40:03}": text for key, text in texts.items()}), 3_000)
    assert sorted(first) == sorted(again)


def test_a_domain_without_text_is_one_line(domain):
    with pytest.raises(UserError, match=r"^domain sotu: no text in made-up 1\.0; .*layout"):
        domains.read_domain(domain({"a": "short"}))


def test_what_cannot_be_fetched_is_one_line_that_names_the_domain(monkeypatch, tmp_path):
    monkeypatch.setenv("DPMIXMIN_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"^domain perl: perl-doc: apt-get is not installed[^\n]*$"):
        domains.fetch_domain("perl")
    with pytest.raises(UserError, match=r"^domain perl: perl-doc: not fetched yet[^\n]*$"):
        domains.read_domain("perl")


def test_the_record_says_which_packages_a_domain_is_from(domain):
    record = domains.fetch_domain(domain({"a": "x"}))
    assert record == domains.domain_record("sotu")
    assert (record.package, record.version) == ("made-up", "1.0")
    assert record.describe() == {
        "domain": "sotu",
        "licence": DOMAINS["sotu"].licence,
        "packages": {"made-up": "1.0"},
        "sha256": {"made-up": "0" * 64},
    }


# -- splitters ------------------------------------------------------------------------------------------------


def test_fortunes_are_split_at_percent_signs_and_compressed_files_are_opened(tmp_path):
    (tmp_path / "a").write_text("50% off\n%\nsecond\n%\n")
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"third"))
    assert [text.strip() for text in readers.fortunes([tmp_path / "a", tmp_path / "b.gz"])] == [
        "50% off", "second", "", "third",
    ]  # fmt: skip


def test_a_dictionary_is_cut_by_its_index_each_entry_once(tmp_path):
    text = b"about this file\n" + b"x" * 70 + b"second"
    (tmp_path / "d.dict.dz").write_bytes(gzip.compress(text))
    # Base 64 digits: Q is 16, BG is 64 + 6 = 70, BW is 64 + 22 = 86.
    (tmp_path / "d.index").write_text("00-database-info\tA\tQ\nother name\tQ\tBG\nword\tQ\tBG\nzweite\tBW\tG\n")
    assert list(readers.dictionary([tmp_path / "d.dict.dz", tmp_path / "d.index"])) == ["x" * 70, "second"]


def test_sword_blocks_are_split_into_chapters(tmp_path):
    books = [b"<milestone/>", b'<title>T</title><chapter n="1" sID="a"/>one<chapter eID="a"/><chapter sID="b"/>two']
    packed = [zlib.compress(book) for book in books]
    places = [(0, len(packed[0])), (len(packed[0]), len(packed[1]))]
    (tmp_path / "ot.bzz").write_bytes(b"".join(packed))
    (tmp_path / "ot.bzs").write_bytes(
        b"".join(n.to_bytes(4, "little") for place in places for n in (*place, 99))  # the last is the unpacked size
    )
    found = readers.sword_chapters([tmp_path / "ot.bzs", tmp_path / "ot.bzz"])
    assert [readers.osis_text(chapter) for chapter in found] == ["one", "two"]


def test_reports_are_the_xml_files_of_an_archive_by_name(tmp_path):
    with tarfile.open(tmp_path / "r.tgz", "w:gz") as archive:
        for name, data in {"r/2.xml": b"two", "r/1.xml": b"one", "r/notes": b"no"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    assert list(readers.tar_members([tmp_path / "r.tgz"])) == ["one", "two"]


def test_brown_samples_are_chosen_by_category(tmp_path):
    for name, text in {
        "cats.txt": "ca02 news\nca01 news\n\ncb01 lore\n",
        "ca01": "1",
        "ca02": "2",
        "cb01": "3",
    }.items():
        (tmp_path / name).write_text(text)
    paths = sorted(tmp_path.iterdir())
    assert list(readers.brown_samples("news")(paths)) == ["1", "2"]
    assert list(readers.brown_samples("lore")(paths)) == ["3"]


def test_comments_are_cut_out_of_a_metamath_database(tmp_path):
    (tmp_path / "x.mm").write_text("$( First $)\n  ax $a |- ph $.\n  $( Two\n lines. $) th $p |- ps $= ax $.\n")
    assert list(readers.metamath_comments([tmp_path / "x.mm"])) == ["First", "Two\n lines."]


# -- cleaners -------------------------------------------------------------------------------------------------


def test_html_keeps_paragraphs_and_code_and_drops_tags_and_navigation():
    page = """<html><head><title>T</title></head><body><div class="nav"><a>Prev</a></div><!-- no
    --><h1>The  title</h1><p>One
    <b>bold</b>&nbsp;word &amp; more.</p><ul><li>first</li><li>second</li></ul><pre>
if x:
    y = 1 &lt; 2
</pre><script>bad()</script><p>E is <img class="math" src="x.png" alt="m c^2"/>.</p><img alt="no"></body></html>"""
    clean = readers.html_text(r'<div class="nav">.*?</div>')
    assert clean(page) == (
        "The title\n\nOne bold word & more.\n\nfirst\nsecond\n\nif x:\n    y = 1 < 2\n\nE is m c^2."
    )
    assert readers.html_text(only=r"<ul>(.*?)</ul>")(page) == "first\nsecond"
    assert readers.html_text(only=r"<article>(.*?)</article>")(page) == ""


def test_a_man_page():
    source = r""".\" Copyright: nobody
.TH tool 1 2020-01-01
.SH NAME
tool \- does \fIall\fP of it
.de XX
.B never
..
.SH DESCRIPTION
The
.BR tool (1)
command
.RI ( "see below" ),
costs \(Eu nothing \[em] \(dqreally\(dq.
.PP
Next\ one.\" a remark
.TP
.B \-v
Be loud.
.IP \(bu
point
.nf
int  main(void);
  return \e0;
.fi
.TS
l l.
a	b
.TE
.so man1/other.1
"""
    assert man(source) == (
        "NAME\ntool - does all of it\n\nDESCRIPTION\n"
        'The tool(1) command (see below), costs  nothing — "really".\n\nNext one.\n\n-v\nBe loud.\n\n* point\n'
        "int  main(void);\n  return \\0;\n\na\tb"
    )
    assert man(".so man3/other.3\n") == ""


def test_an_mdoc_page():
    source = """.Dd May 1, 2020
.Dt AHC 4
.Os
.Sh NAME
.Nm ahc
.Nd made-up driver
.Sh SYNOPSIS
.In sys/x.h
.Fn open "int a" "char *b"
.Sh DESCRIPTION
The
.Nm
driver
.Pq see Xr pci 4 , Xr ata 4
has
.Va hw.ahc Ns Ar X Ns Va .mode .
.Bl -tag
.It Fl v Op Ar level
Be
.Dq loud ) .
.El
.Bd -literal
x = 1;
  y = 2;
.Ed
.Fx
and
.Oo Ar a Oc Ns .
"""
    assert man(source) == (
        "NAME\nahc - made-up driver\n\nSYNOPSIS\n#include <sys/x.h>\nopen(int a, char *b)\n\nDESCRIPTION\n"
        "The ahc driver (see pci(4), ata(4)) has hw.ahcX.mode.\n\n"
        '-v [level]\nBe "loud").\n\nx = 1;\n  y = 2;\n\nFreeBSD and [a].'
    )


def test_pod():
    source = """=encoding utf8

=head1 NAME
X<index>

B<I<fast>> C<< $a->{x} < 1 >> L<text|perlfunc/x> L<perlre> E<lt>E<gt>E<eacute>E<65>.

=over 4

=item *

Point

=back

=begin html

<b>gone</b>

=end html

    code <STDIN>;

=cut
"""
    assert readers.pod_text(source) == ("NAME\n\nfast $a->{x} < 1 text perlre <>éA.\n\n* Point\n\n    code <STDIN>;")


def test_vim_help():
    source = (
        "*x.txt*  For Vim\n\n1. Title\t\t*tag* *other*\n=====================\n"
        "See |:cmd| and a|b|c. Example: >\n    :set x\n<Then go on.\nHeading ~\n vim:tw=78:\n"
    )
    assert readers.vim_help(source) == ("1. Title\n\nSee :cmd and a|b|c. Example:\n    :set x\n<Then go on.\nHeading")


def test_asciidoc():
    source = """git-x(1)
========

[verse]
'git x' [--all]

See linkgit:git-y[1] and link:a.html[the page] or `--all`.
include::z.txt[]

-a::
	All.
+
----
$ git x
----
"""
    assert readers.asciidoc(source) == (
        "git-x(1)\n\n'git x' [--all]\n\nSee git-y(1) and the page or --all.\n\n-a:\n\tAll.\n\n$ git x"
    )


def test_osis_chapters_lose_word_tags_notes_and_signs():
    chapter = (
        '<chapter sID="a"/> In the <w lemma="x">beginning</w>,<note>n</note> all. <div sID="p"/>'
        '¶ And <transChange type="added">then</transChange>\n  more.'
    )
    assert readers.osis_text(chapter) == "In the beginning, all.\nAnd then more."


def test_dictionary_entries():
    foldoc = "cat%%%concatenate\n\n   <tool> A {Unix} command.\n\n   (1995-01-01)\n"
    assert readers.foldoc_entry(foldoc) == "cat, concatenate\n\n<tool> A Unix command."
    wordnet = "run\n    n 1: a score\n       made [syn: {run}, {tally}]\n      2: a trip\n    v 1: move;\n       go\n"
    assert readers.wordnet_entry(wordnet) == ("run\nn 1: a score made [syn: run, tally]\n2: a trip\nv 1: move; go")


def test_metamath_comments_lose_markup_and_credits():
    comment = """If ` ph ` then _always_ ~ ax-1 by [Who] p. 2.  (Contributed by AB,
     1-Jan-2000.)  (New usage is discouraged.)

     ``quoted`` snake_case_name"""
    assert readers.metamath_text(comment) == "If ph then always ax-1 by [Who] p. 2.\n\n``quoted`` snake_case_name"
    assert readers.metamath_text("#*#*#*#*#*#*#*#\n  Part one\n#*#*#*#*#*#*#*#\n") == "Part one"


def test_reports_keep_labelled_sections():
    source = """<x><Abstract><AbstractText Label="FINDINGS">Clear &amp;
    normal..</AbstractText><AbstractText Label="NONE"> </AbstractText></Abstract><Author>Name</Author></x>"""
    assert readers.report_text(source) == "FINDINGS: Clear & normal."


def test_brown_tokens_become_ordinary_text():
    sample = """

	Big/jj-hl news/nn-hl
	The/at end/nn ,/, he/pps said/vbd :/: ``/`` Either/or/cc this/dt ''/'' ./.
Is/bez it/pps (/( true/jj )/) ?/. ?/.


	Next/ap one/cd ;/. ;/.
"""
    assert readers.brown_text(sample) == 'Big news\n\nThe end, he said: "Either/or this". Is it (true)?\n\nNext one;'


def test_plain_text_loses_overstrikes_and_runs_of_empty_lines():
    assert readers.plain("_\x08u  \n\n\n\nb\r\n") == "u\n\nb"
