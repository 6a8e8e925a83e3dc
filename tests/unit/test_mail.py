"""Mail: what a sender wrote is kept, by rules about one message; a message that cannot be read says nothing."""

import email
import hashlib
import hmac
import json
import re
import time

import pytest

from dpmixmin.data import mail
from dpmixmin.data.loaders import identify, owned
from dpmixmin.errors import UserError
from dpmixmin.table_sections import Maildir, SpamAssassin

OWN = "I read the draft on the train and have three small remarks."


def test_a_message_that_quotes_nothing_is_kept_as_it_is():
    body = "Hi all,\n\n  indented\nSee http://site.example/page?a=1\n* a list\nThen she said: go on.\nSigned\nAnn"
    assert mail.clean(body) == body
    assert mail.clean("a\r\n\r\n\r\n\r\nb \t\r\n\n") == "a\n\nb"
    assert mail.clean("nul\x00 and bell\x07") == "nul and bell"
    assert mail.clean("") == mail.clean("\n \n") == ""


GONE = {
    "quoted with >": "> what he said\n>> and she\n  > indented",
    "quoted with initials": "JD> what he said",
    "quoted with a bar": "| what he said",
    "attribution": "On Mon, 5 Aug 2002, J. Doe wrote:\n\n> what he said",
    "attribution in two lines": "On Mon, 5 Aug 2002 at 10:11, J. Doe\n<doe@mail.example> wrote:\n> what he said",
    "attribution without a date": "J. Doe writes:\n> what he said",
    "attribution of a quotation without marks": "On 5 Aug 2002, J. Doe wrote:",
    "signature": "-- \nAnn\nhttp://ann.example",
    "signature without its blank": "--\nAnn",
    "Outlook": "-----Original Message-----\nFrom: J. Doe\nSent: Monday\nTo: Ann\nSubject: Draft\n\nwhat he said",
    "Outlook Express": "----- Original Message -----\nFrom: <doe@mail.example>\nTo: Ann\n\nwhat he said",
    "Enron, forwarded": "---------------------- Forwarded by J Doe/HOU/ECT on 05/14/2001 03:25 PM --\n\nhe said",
    "Enron, Notes in two lines": "J Doe\n05/14/2001 03:25 PM\n\t\n\tTo: Ann\n\tcc: \n\tSubject: Draft\n\nwhat he said",
    "Enron, Notes in one line": '"J" <doe@mail.example> on 05/14/2001 03:25:12 PM\nTo: Ann\ncc: \nSubject: Draft\nhe',
    "Enron, headers alone": "From: J Doe@ENRON on 10/19/2000 01:14 PM\nTo: Ann\ncc:\nSubject: Draft\nwhat he said",
    "forwarded": "Begin forwarded message:\n\nwhat he said",
    "list footer": "_" * 47 + "\nSome-talk mailing list\nSome-talk@mail.example\nhttp://lists.example/some-talk",
    "sponsor": "-" * 55 + "\nThis sf.net email is sponsored by:ThinkGeek\nWelcome",
    "provider": "_" * 50 + "\nDo You Yahoo!?\nEverything you'll ever need",
    "disclaimer": "*" * 70 + "\nThis e-mail is the property of a company",
    "key": "-----BEGIN PGP PUBLIC KEY BLOCK-----\nVersion: 1\n\nmQGiBDzz\n-----END PGP PUBLIC KEY BLOCK-----",
}


@pytest.mark.parametrize("what", GONE)
def test_what_others_wrote_and_what_is_the_same_in_every_mail_goes(what):
    assert mail.clean(f"{OWN}\n\n{GONE[what]}\n") == OWN
    assert mail.clean(GONE[what]) == ""


QUOTATIONS = ["quoted with >", "quoted with a bar", "attribution", "attribution in two lines", "key"]


@pytest.mark.parametrize("what", QUOTATIONS)
def test_answers_after_a_quotation_stay(what):
    found = mail.clean(f"{OWN}\n{GONE[what]}\nNo, never.\n{GONE[what]}\nYes.")
    assert re.sub(r"\n+", "\n", found) == f"{OWN}\nNo, never.\nYes."


def test_an_answer_below_a_marked_quotation_with_headers_stays():
    quoted = "----- Original Message -----\nFrom: J. Doe\n To: Ann\nSubject: Draft\n\n> what he said\n"
    assert mail.clean(f"{quoted}\n{OWN}") == OWN


def test_rules_inside_a_text_end_nothing():
    body = f"{OWN}\n{'-' * 60}\nPart two\n{'=' * 60}\nThe end of the text."
    assert mail.clean(body) == body


def test_a_signed_text_loses_its_armour_only():
    body = (
        "-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA1\n\nFirst line.\n- -- not a signature\n"
        "-----BEGIN PGP SIGNATURE-----\nVersion: 1\n\niD8DBQE9\n-----END PGP SIGNATURE-----"
    )
    assert mail.clean(body) == "First line.\n-- not a signature"


# -- headers, parts, characters -------------------------------------------------------------------------------


def message(body: bytes | str = OWN, **headers) -> bytes:
    lines = {"From": "Ann <ann@mail.example>", "Subject": "Draft", **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\n" for name, value in lines.items())
    return head.encode() + b"\n" + (body.encode() if isinstance(body, str) else body)


@pytest.mark.parametrize(
    ("header", "sender"),
    [
        ("Ann <Ann.B@Mail.Example>", "ann.b@mail.example"),
        ("ANN@mail.example (Ann B)", "ann@mail.example"),
        ('"B, Ann" <ann@mail.example>', "ann@mail.example"),
        ("=?iso-8859-1?Q?=C4nn?= <ann@mail.example>", "ann@mail.example"),
        ("Ann\n\t<ann@mail.example>", "ann@mail.example"),
        ("nobody", None),
        ("", None),
    ],
)
def test_the_sender_is_the_from_address_in_lower_case(header, sender):
    assert mail.parse(message(From=header)).sender == sender


def test_headers_are_no_text_and_an_mbox_line_is_none_either():
    assert mail.parse(b"From ann@mail.example Mon Aug  5 10:11:12 2002\n" + message()).text == OWN


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ("Grüße aus Köln".encode(), "text/plain; charset=utf-8", "Grüße aus Köln"),
        ("Grüße aus Köln".encode("latin-1"), "text/plain; charset=iso-8859-1", "Grüße aus Köln"),
        ("Grüße aus Köln".encode("latin-1"), "text/plain", "Grüße aus Köln"),
        ("Grüße aus Köln".encode(), "text/plain; charset=us-ascii", "Grüße aus Köln"),
        ("“quoted”".encode("cp1252"), "text/plain; charset=iso-8859-1", "“quoted”"),
        ("Привет".encode("koi8-r"), "text/plain; charset=KOI8-R", "Привет"),
        ("こんにちは".encode("iso-2022-jp"), "text/plain; charset=iso-2022-jp", "こんにちは"),
        (b"\xe9t\xe9", "text/plain; charset=no-such-thing", "été"),
        (b"\xe9t\xe9", "text/plain; charset=unicode_escape", "été"),
        (b"\xe9t\xe9", "text/plain; charset=gb99999", "été"),
    ],
)
def test_characters_are_decoded_whatever_the_message_declares(body, kind, text):
    assert mail.parse(message(body, Content_Type=kind)).text == text


def test_transfer_encodings_are_undone():
    encoded = message(
        "caf=C3=A9=\n s", Content_Type="text/plain; charset=utf-8", Content_Transfer_Encoding="quoted-printable"
    )
    assert mail.parse(encoded).text == "café s"
    assert mail.parse(message("Y2Fmw6k=", Content_Transfer_Encoding="base64")).text == "café"


def parts(*found: tuple[str, str], kind="mixed") -> bytes:
    body = "".join(f"--edge\n{head}\n\n{text}\n" for head, text in found) + "--edge--\n"
    return message(body, Content_Type=f'multipart/{kind}; boundary="edge"')


PLAIN, HTML = "Content-Type: text/plain", "Content-Type: text/html"


def test_plain_text_wins_over_html_and_attachments_and_enclosed_messages_are_left_out():
    assert mail.parse(parts((PLAIN, "plain"), (HTML, "<p>marked</p>"), kind="alternative")).text == "plain"
    attached = f"{PLAIN}\nContent-Disposition: attachment; filename=a.txt"
    enclosed = "Content-Type: message/rfc822"
    found = parts((PLAIN, "one"), (attached, "two"), (enclosed, "From: a\n\nthree"), ("Content-Type: image/png", "4"))
    assert mail.parse(found).text == "one"
    inner = "--in\nContent-Type: text/plain\n\nnested\n--in--"
    assert mail.parse(parts(('Content-Type: multipart/alternative; boundary="in"', inner))).text == "nested"


def test_html_becomes_text():
    body = (
        "<html><head><title>no</title></head><body><style>p {color: red}</style><!-- no > -->"
        "<p>First &amp; <b>second</b>\nline</p><P class='x'>Third<br/>fourth <script>no()</script></p></body></html>"
    )
    text = mail.parse(message(body, Content_Type="text/html")).text
    assert [line.strip() for line in text.split("\n") if line.strip()] == ["First & second line", "Third", "fourth"]


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        (message(), True),
        (message(Auto_Submitted="no"), True),
        (message(Auto_Submitted="auto-generated"), False),
        (message(f"URL: http://news.example/1\nDate: 2002-10-08T00:22:08-05:00\n\n{OWN}"), False),
        (message(f"\n\nURL: http://news.example/1\nDate: Not supplied\n\n{OWN}"), False),
        (message(f"See\nURL: http://news.example/1\nDate: today\n\n{OWN}"), True),
        (message(f"URL: http://news.example/1\n\n{OWN}"), True),
    ],
)
def test_what_a_machine_sent_is_left_out_by_a_mark_of_that_message(raw, kept):
    assert (mail.parse(raw).text != "") == kept


BROKEN = [
    b"",
    b"\0",
    b"\n\n",
    b"From: \xff\xfe\n\n",
    b"Content-Type: multipart/mixed\n\nno boundary",
    b"Content-Type: text/plain; charset*=x'y'%ff%ff\n\n",
    b"Content-Transfer-Encoding: base64\n\n!!!=",
    b"".join(b"Content-Type: multipart/mixed; boundary=b%d\n\n--b%d\n" % (i, i) for i in range(3000)),
]


@pytest.mark.parametrize("raw", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.filterwarnings("error")
def test_rule_6_a_broken_message_is_no_error(raw):
    assert mail.parse(raw).text in ("", "no boundary")


def test_the_time_of_a_message_grows_with_its_size_alone():
    """Worst cases of the patterns at 300 kB: together 0.5 s; minutes if time grew with the square of the size."""
    start = time.process_time()
    for worst in (
        "<!--",
        "<script",
        "<",
        "a",
        "On 1 ",
        "> ",
        "\n",
        "From: \n",
        "wrote: ",
        "05/14/2001 03:25 \n",
        "- ",
        "- -",
        "1/1/11 ",
        "said ",
        "= ",
        "</script ",
        "&#9",
        "</p ",
        "URL: x\n",
        "--\t",
    ):
        body = worst * (300_000 // len(worst))
        for kind in ("text/plain", "text/html"):
            mail.parse(message(body, Content_Type=kind))
    assert time.process_time() - start < 20


WORST_HEADERS = ["a" * 100_000, "<" + "@" * 100_000, "<a@b" + " " * 100_000, '"' + ";" * 100_000, "\xe9@" * 50_000]


@pytest.mark.parametrize("value", WORST_HEADERS, ids=range(len(WORST_HEADERS)))
def test_headers_are_cut_to_a_public_length_before_anything_is_searched_in_them(value):
    """The patterns, and those of the parser, take the square of a length: minutes of these messages."""
    for name in ("Content-Type", "Content-Disposition", "Auto-Submitted"):
        shown = f"multipart/mixed; {value}" if name == "Content-Type" else f"no; {value}"
        found = email.message_from_bytes(message(**{name.replace("-", "_"): shown}), policy=mail._CUT)
        assert len(str(found[name])) <= mail._MOST_OF_A_HEADER
        mail.parse(message(**{name.replace("-", "_"): shown}))
    assert mail.parse(message(From=f"{value} <ann@mail.example>")) == mail.Mail(None, ""), "never half an address"


def test_a_long_header_that_says_nothing_of_the_sender_changes_nothing():
    to = ",\n ".join(f"someone{i}@mail.example" for i in range(5000))
    assert mail.parse(message(To=to)) == mail.Mail("ann@mail.example", OWN)
    name = "A" * (mail._MOST_OF_A_HEADER - 30)
    assert mail.parse(message(From=f"{name} <ann@mail.example>")) == mail.Mail("ann@mail.example", OWN)


# -- folders --------------------------------------------------------------------------------------------------


def test_a_maildir_is_read_by_user_and_folder(tmp_path):
    for place, text in {
        "ann-a/sent/1.": "from ann's sent",
        "ann-a/_sent_mail/2.": "from ann's other sent",
        "ann-a/inbox/1.": "from ann's inbox",
        "bob-b/sent/1.": "short",
        "bob-b/sent/.hidden": "from a hidden file",
        "cem-c/inbox/1.": "from cem's inbox",
        "dai-d/sent/nested/1.": "from a folder below",
    }.items():
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(message(text))
    (tmp_path / "a file").write_bytes(message("no user's folder"))
    table = Maildir(kind="maildir", path=str(tmp_path), min_characters=6)
    found = mail.read_maildir(table)
    assert found.text == ["from ann's other sent", "from ann's sent"]
    assert found.unit == ["ann-a", "ann-a"]
    with pytest.raises(UserError, match="no such folder"):
        mail.read_maildir(Maildir(kind="maildir", path=str(tmp_path / "none")))


def test_the_corpus_is_read_by_sender_and_group(tmp_path):
    table = SpamAssassin(kind="spam_assassin", groups=("easy-ham-1", "hard-ham-1"), min_characters=6)
    with pytest.raises(UserError, match="easy-ham-1: no such folder"):
        mail.read_spam_assassin(table, tmp_path)
    for group in ("easy-ham-1", "easy-ham-2", "hard-ham-1"):
        (tmp_path / group).mkdir()
        text = message(f"written in {group}").decode() if group != "hard-ham-1" else "From: x@y.example\n\nlone \ud800"
        (tmp_path / group / "1.json").write_text(json.dumps({"id": "1", "text": text}))
        for name, content in {"2.json": "{", "3.json": "[]", "4.json": '{"text": 5}', "5.txt": text}.items():
            (tmp_path / group / name).write_bytes(content.encode("utf-8", "replace"))
    found = mail.read_spam_assassin(table, tmp_path)
    assert found.unit == ["ann@mail.example", "x@y.example"]
    assert found.text == ["written in easy-ham-1", "lone ?"]


def test_ids_of_mail_are_what_their_version_says(tmp_path):
    """`mail-v1` in split.id_rule: the SHA-256 of the raw message, the user's folder, an occurrence number."""
    raw = message(f"{OWN}\n> quoted, and part of the id")
    (tmp_path / "ann-a/sent").mkdir(parents=True)
    (tmp_path / "ann-a/sent/1.").write_bytes(raw)
    found = mail.read_maildir(Maildir(kind="maildir", path=str(tmp_path), min_characters=1))
    record, unit = identify(found.unit, None, map(owned, found.content, found.unit), b"key")

    def keyed(value: bytes) -> bytes:
        return hmac.new(b"key", value, hashlib.sha256).digest()

    content = (32).to_bytes(8, "big") + hashlib.sha256(raw).digest() + b"str:'ann-a'"
    assert record.tolist() == [keyed(b"occurrence\0" + keyed(content) + bytes(8)).hex()[:32]]
    assert unit.tolist() == [keyed(b"unit\0str:'ann-a'").hex()[:32]]
