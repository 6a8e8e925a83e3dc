"""Readers of the formats that public text has inside packages: splitting files into documents, making these plain.

A splitter turns a package's files into raw documents, in the order of their paths and of their places in a file. A
cleaner turns one raw document into text that a reader takes for prose: markup, navigation and indexes removed,
paragraphs and code kept. Both see public data only.
"""

from __future__ import annotations

import gzip
import html
import io
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits

Splitter = Callable[[list[Path]], Iterator[str]]
Cleaner = Callable[[str], str]

_BASE64 = {character: value for value, character in enumerate(f"{ascii_uppercase}{ascii_lowercase}{digits}+/")}


def decoded(data: bytes) -> str:
    """Return bytes as text: UTF-8, or Latin-1 where they are none."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _read(path: Path) -> str:
    data = path.read_bytes()
    return decoded(gzip.decompress(data) if path.suffix in (".gz", ".dz") else data)


def tidy(text: str) -> str:
    """Return text without trailing spaces, form feeds, soft hyphens and runs of empty lines."""
    text = text.translate({0xA0: " ", 0xAD: None, 0x0C: "\n", 0x0D: None, 0x200B: None, 0x08: None})
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _flow(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


# -- splitters ------------------------------------------------------------------------------------------------


def whole_files(paths: list[Path]) -> Iterator[str]:
    """Yield each file as one document; compressed ones are opened."""
    return map(_read, paths)


def fortunes(paths: list[Path]) -> Iterator[str]:
    """Yield the entries of fortune files, which lie between lines that hold one ``%``."""
    for path in paths:
        yield from re.split(r"^%\s*$", _read(path), flags=re.MULTILINE)


def dictionary(paths: list[Path]) -> Iterator[str]:
    """Yield the entries of a dictd dictionary: an index (word, place, length in base 64) and a compressed text."""
    (index,) = (path for path in paths if path.suffix == ".index")
    (text,) = (path for path in paths if path.suffix == ".dz")
    data = gzip.decompress(text.read_bytes())
    places = set()
    for line in index.read_bytes().decode("utf-8", "replace").splitlines():
        word, start, length = line.rsplit("\t", 2)
        if not word.startswith("00-database") and not word.startswith("00database"):
            places.add((_number(start), _number(length)))
    for start, length in sorted(places):
        yield decoded(data[start : start + length])


def _number(written: str) -> int:
    value = 0
    for character in written:
        value = value * 64 + _BASE64[character]
    return value


def metamath_comments(paths: list[Path]) -> Iterator[str]:
    """Yield the comments, ``$( … $)``, of Metamath databases."""
    for path in paths:
        yield from re.findall(r"\$\(\s(.*?)\s\$\)", _read(path), flags=re.DOTALL)


def sword_chapters(paths: list[Path]) -> Iterator[str]:
    """Yield the chapters of a SWORD ``zText`` module: zlib blocks listed by 12-byte entries (place, size, size)."""
    for listing in (path for path in paths if path.suffix == ".bzs"):
        entries, data = listing.read_bytes(), listing.with_suffix(".bzz").read_bytes()
        for place in range(0, len(entries), 12):
            start, size = (int.from_bytes(entries[place + at : place + at + 4], "little") for at in (0, 4))
            book = decoded(zlib.decompress(data[start : start + size]))
            yield from re.split(r"(?=<chapter [^>]*\bsID=)", book)[1:]


def tar_members(paths: list[Path]) -> Iterator[str]:
    """Yield the XML files inside tar archives, by their names."""
    for path in paths:
        with tarfile.open(path) as archive:
            members = {member.name: member for member in archive if member.name.endswith(".xml")}
            for name in sorted(members):
                with io.BufferedReader(archive.extractfile(members[name])) as file:
                    yield decoded(file.read())


def brown_samples(category: str) -> Splitter:
    """Return a splitter that yields the samples of one category of the Brown corpus (listed in ``cats.txt``)."""

    def split(paths: list[Path]) -> Iterator[str]:
        by_name = {path.name: path for path in paths}
        listed = (line.split() for line in _read(by_name["cats.txt"]).splitlines())
        names = sorted(name for name, *categories in filter(None, listed) if category in categories)
        return (_read(by_name[name]) for name in names)

    return split


# -- cleaners -------------------------------------------------------------------------------------------------

_BLOCK = r"</?(?:p|div|h[1-6]|dl|ul|ol|table|blockquote|section|article|hr|pre|body)\b[^>]*>"
_LINE = r"<(?:br|li|dt|dd|tr|caption)\b[^>]*>"


def html_text(*removed: str, only: str | None = None) -> Cleaner:
    """Return a cleaner of HTML pages.

    Args:
        removed: patterns of what goes first, in this order: navigation, tables of contents.
        only: pattern whose first group is the part to keep; pages without it give nothing.
    """
    gone = [re.compile(pattern, re.DOTALL) for pattern in (r"<!--.*?-->|<(head|script|style)\b.*?</\1>", *removed)]
    kept = re.compile(only, re.DOTALL) if only else None

    def clean(page: str) -> str:
        if kept is not None:
            match = kept.search(page)
            page = match[1] if match else ""
        for pattern in gone:
            page = pattern.sub(" ", page)
        page = re.sub(r'<img class="math"[^>]*? alt="([^"]*)"[^>]*>', r"\1", page, flags=re.DOTALL)  # formulas as TeX
        parts = re.split(r"(<pre\b.*?</pre>)", page, flags=re.DOTALL)
        for at in range(0, len(parts), 2):
            part = re.sub(r"\s+", " ", parts[at])
            part = re.sub(_BLOCK, "\n\n", part)
            parts[at] = re.sub(_LINE, "\n", part)
        text = re.sub(_BLOCK, "\n\n", "".join(parts))
        text = html.unescape(re.sub(r"<[^>]*>", "", text))
        return tidy(re.sub(r"\n (?! )", "\n", text))

    return clean


def pod_text(source: str) -> str:
    """Return the text of a file of Perl's plain old documentation, POD (perlpod)."""
    source = re.sub(r"^=begin\b.*?^=end\b[^\n]*$", "", source, flags=re.DOTALL | re.MULTILINE)
    source = re.sub(r"^=(?:for|encoding|over|back|cut|pod)\b[^\n]*$", "", source, flags=re.MULTILINE)
    source = re.sub(r"^=(?:head\d|item)[ \t]*", "", source, flags=re.MULTILINE)
    codes = re.compile(r"([A-Z])(?:<<<+ (.*?) >>>+|<< (.*?) >>|<([^<>]*)>)", re.DOTALL)
    for _ in range(4):  # codes inside codes
        source = codes.sub(_pod_code, source)
    source = re.sub(r"^([*o])\n\n(?=\S)", r"\1 ", source, flags=re.MULTILINE)  # items without a term
    return tidy(source.replace("\x01", "<").replace("\x02", ">"))


_POD_ESCAPES = {"lt": "\x01", "gt": "\x02", "sol": "/", "verbar": "|"}
"""Angle brackets are kept from being read as codes until the end."""


def _pod_code(match: re.Match) -> str:
    code, content = match[1], match[2] or match[3] or match[4] or ""
    content = content.replace("<", "\x01").replace(">", "\x02") if code != "E" else content
    if code in "XZ":
        return ""
    if code == "E":
        return _POD_ESCAPES.get(content) or html.unescape(f"&{content};" if not content.isdigit() else f"&#{content};")
    if code == "L":
        return content.split("|", 1)[0].strip("/").replace('"', "")
    return content


def vim_help(source: str) -> str:
    """Return the text of a file of Vim's help: without its first line, tags, link bars and mode line."""
    text = source.partition("\n")[2].expandtabs(8)
    text = re.sub(r"^(?:\s*vim:.*|[=-]{20,}[ ]*)$", "", text, flags=re.MULTILINE)
    text = re.sub(r" ?>$|~$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^<(?=\s|$)", " ", text, flags=re.MULTILINE)
    text = re.sub(r"(?<!\S)\*[^*\s|]+\*(?=\s|$)", "", text)
    return tidy(re.sub(r"(?<![^\s(\[,])\|([^|\s]+)\|", r"\1", text))


def asciidoc(source: str) -> str:
    """Return the text of an AsciiDoc file as Git's manual uses it."""
    lines = re.compile(r"^//.*$|^\[[\w\[\], =\"'.#%-]*\]{1,2}$|^(?:include|ifn?def|endif)::.*$", re.MULTILINE)
    text = lines.sub("", source)
    text = re.sub(r"^(?:[-=.~^*_+|]{4,}|\+|--|[~^=+-]{3,})$", "", text, flags=re.MULTILINE)  # rules and continuations
    text = re.sub(r"^=+ (.*?)(?: =+)?$", r"\1", text, flags=re.MULTILINE)
    text = re.sub(r"\blinkgit:([\w.-]+)\[(\w*)\]", r"\1(\2)", text)
    text = re.sub(r"\b(?:link|xref):\S*?\[([^\]]*)\]", r"\1", text)
    text = re.sub(r"<<[^<>,\n]*,([^<>]*)>>", r"\1", text)
    text = re.sub(r"\{(?:asterisk|plus|caret|tilde|startsb|endsb|litdd|apostrophe)\}", _asciidoc_name, text)
    text = re.sub(r"(?<![\w`])`([^`\n]+)`(?![\w`])", r"\1", text)
    return tidy(re.sub(r":::?$", ":", text, flags=re.MULTILINE))


def _asciidoc_name(match: re.Match) -> str:
    names = {"asterisk": "*", "plus": "+", "caret": "^", "tilde": "~", "startsb": "[", "endsb": "]", "litdd": "--"}
    return names.get(match[0][1:-1], "'")


def osis_text(chapter: str) -> str:
    """Return the text of a chapter in OSIS XML, without notes."""
    chapter = re.sub(r"<note\b.*?</note>", "", chapter, flags=re.DOTALL)
    chapter = re.sub(r"<(?:div|lg?|chapter|title)\b[^>]*>|</title>", "\n", _flow(chapter))
    text = html.unescape(re.sub(r"<[^>]*>", "", chapter)).replace("¶", "")
    return tidy("\n".join(filter(None, map(_flow, text.split("\n")))))


def foldoc_entry(entry: str) -> str:
    """Return an entry of FOLDOC: headwords, then text without indentation and link braces."""
    lines = [line.removeprefix("   ") for line in entry.replace("%%%", ", ").splitlines()]
    text = re.sub(r"\{([^{}]*)\}", r"\1", "\n".join(lines))
    return tidy(re.sub(r"\n\(\d{4}-\d\d-\d\d\)\s*$", "", text.rstrip()))  # the date of the last change


def wordnet_entry(entry: str) -> str:
    """Return an entry of WordNet: the word, then one line per sense."""
    entry = re.sub(r"\{([^{}]*)\}", r"\1", entry)
    word, _, senses = entry.strip().partition("\n")
    senses = re.sub(r"\n\s++(?!(?:(?:n|v|adj|adv)\s+)?\d+:\s|(?:n|v|adj|adv)\s*:)", " ", f"\n{senses}")
    return tidy(f"{word}\n" + "\n".join(filter(None, map(_flow, senses.split("\n")))))


def metamath_text(comment: str) -> str:
    """Return the prose of a comment in a Metamath database: without credits, remarks for tools and rulers."""
    comment = re.sub(r"^[#*=.\-_~\s]{8,}$", "", comment, flags=re.MULTILINE)
    comment = re.sub(r"\((?:Contributed|Proof\s+shortened|Revised|Proposed|Revisions)\s+by\s[^()]*\)", "", comment)
    comment = re.sub(r"\((?:New\s+usage|Proof\s+modification)\s+is\s+discouraged\.\)", "", comment)
    comment = re.sub(r"(?<!`)`(?!`)\s?([^`]*?)\s?`", r"\1", comment)
    comment = re.sub(r"(?:^|(?<=\s))~\s+(?=\S)", "", comment)  # `~ label` is a link
    comment = re.sub(r"(?<!\w)_([^_\s](?:[^_]*[^_\s])?)_(?!\w)", r"\1", comment)
    paragraphs = re.split(r"\n\s*\n", comment)
    return tidy("\n\n".join(filter(None, map(_flow, paragraphs))))


def report_text(source: str) -> str:
    """Return a radiology report in the NLM's XML: one line per labelled section."""
    found = re.findall(r'<AbstractText Label="([^"]*)">(.*?)</AbstractText>', source, flags=re.DOTALL)
    text = "\n".join(f"{label}: {html.unescape(_flow(text))}" for label, text in found if text.strip())
    return tidy(re.sub(r"\.\.+$", ".", text, flags=re.MULTILINE))


def brown_text(sample: str) -> str:
    """Return a sample of the Brown corpus: ``word/tag`` tokens become text with ordinary spacing.

    A line is a sentence, empty lines lie between paragraphs; lines tagged as headlines (``-hl``) become paragraphs.
    """
    sample = re.sub(r"^(?:\s*\S+-hl)+\s*$", r"\n\g<0>\n", sample, flags=re.MULTILINE)
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", sample):
        text = " ".join(token.rpartition("/")[0] or token for token in paragraph.split())
        text = re.sub(r"``\s*", '"', text)
        text = re.sub(r"\s*''", '"', text)
        text = re.sub(r"([?!;:,.])(?: \1)+(?= |$)", r"\1", text)  # the corpus doubles some marks
        text = re.sub(r" ([.,;:?!)\]}])(?=[\s\"'.,;:?!)]|$)", r"\1", text)
        paragraphs.append(re.sub(r"([(\[{]) ", r"\1", text))
    return tidy("\n\n".join(filter(None, paragraphs)))


def plain(text: str) -> str:
    """Return text that needs no more than tidying, without overstrikes."""
    return tidy(re.sub(".\x08", "", text))
