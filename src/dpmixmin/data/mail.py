"""Mail as sensitive text: an Enron-style maildir, and the ham of the SpamAssassin corpus.

A message is read, cleaned, kept or left out by rules that look at that ONE message and at public constants (rule 25).
What is kept is what its sender wrote: no headers, no quoted or forwarded text, no signature, no PGP block. A message
that cannot be read is like one that says nothing: too short, so left out; never an error (rule 6).

Ids are made of the raw message and of who it belongs to, so better cleaning deals nobody anew. A change of what they
are made of needs another name in ``split.id_rule``. Addresses and names of user folders leave this module as values
that ``loaders.identify`` turns into keyed hashes, and never as text.
"""

from __future__ import annotations

import email
import hashlib
import html
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.message import Message
from email.policy import Compat32
from pathlib import Path

from dpmixmin.data.text_records import RawTexts
from dpmixmin.errors import UserError
from dpmixmin.table_sections import Maildir, SpamAssassin

UNITS = {"maildir": "user", "spam_assassin": "sender"}
"""Who a message belongs to, as ``private.unit`` calls it: whose folder it lies in; who is its From address."""

_MOST_BYTES = 1_000_000
"""What is read of a message: attachments beyond it do not cost time."""
_MOST_OF_A_HEADER = 2000
"""Characters that are read of a header: searching an address, or the parameters of a type, takes its square."""


@dataclass(frozen=True)
class Mail:
    """A message.

    Attributes:
        sender: its From address in lower case, or None.
        text: what its sender wrote.
    """

    sender: str | None
    text: str


def read_maildir(table: Maildir) -> RawTexts:
    """Read a folder of USER/FOLDER/MESSAGE files; the unit is the user's folder.

    Raises:
        UserError: there is no such folder.
    """
    root = Path(table.path).expanduser()
    if not root.is_dir():
        raise UserError(f"{table.path}: no such folder; correct the path in the config")
    files = (
        (user.name, _bytes(path))
        for user in _entries(root)
        for name in table.folders
        for path in _entries(user / name)
    )
    return _kept(((raw, user, parse(raw)) for user, raw in files), table.min_characters)


def read_spam_assassin(table: SpamAssassin, folder: Path) -> RawTexts:
    """Read the corpus's JSON files; the unit is the sender.

    Args:
        table: which groups.
        folder: holds a folder of ``*.json`` files for each group.

    Raises:
        UserError: a group is missing.
    """
    missing = [group for group in table.groups if not (folder / group).is_dir()]
    if missing:
        raise UserError(f"{folder / missing[0]}: no such folder; fetch the package again")
    files = (path for group in table.groups for path in _entries(folder / group) if path.suffix == ".json")
    found = ((raw, parse(raw)) for raw in map(_json_text, files))
    return _kept(((raw, message.sender, message) for raw, message in found), table.min_characters)


def parse(raw: bytes) -> Mail:
    """Read and clean one message; one that cannot be read, or that a machine sent, has no text."""
    try:
        message = email.message_from_bytes(raw[:_MOST_BYTES], policy=_CUT)
        body = _body(message)
        return Mail(_sender(message), "" if _automated(message, body) else clean(body))
    except Exception:  # the parser of private bytes: whatever it trips over, the message says nothing
        return Mail(None, "")


class _CutHeaders(Compat32):
    """The parser's usual policy, with headers that are cut as they are read: the parser looks into some itself.

    A From header is never cut but an error, so that the message says nothing: half of it may name somebody else.
    """

    def header_source_parse(self, sourcelines: list[str]) -> tuple[str, str]:
        name, value = super().header_source_parse(sourcelines)
        if len(value) > _MOST_OF_A_HEADER and name.lower() == "from":
            raise ValueError("a From header that is too long")
        return name, value[:_MOST_OF_A_HEADER]


_CUT = _CutHeaders()


def _kept(found: Iterable[tuple[bytes, str | None, Mail]], min_characters: int) -> RawTexts:
    """Leave out short messages, and return the others; raw messages are identified by their hash."""
    rows = [
        (hashlib.sha256(raw).digest(), unit, mail.text)
        for raw, unit, mail in found
        if len(mail.text) >= min_characters
    ]
    return RawTexts([text for _, _, text in rows], [unit for _, unit, _ in rows], content=[raw for raw, _, _ in rows])


def _entries(folder: Path) -> list[Path]:
    """Return what lies in a folder, hidden entries left out; nothing if it cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _json_text(path: Path) -> bytes:
    try:
        return json.loads(_bytes(path))["text"].encode("utf-8", "replace")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return b""


# -- one message: headers, parts, characters ------------------------------------------------------------------

_IN_BRACKETS = re.compile(r"<\s*([^<>\s]+@[^<>\s]+)\s*>")
_BARE = re.compile(r"[^\s<>()\",;:]+@[^\s<>()\",;:]+")
_FEED = re.compile(r"\s*URL: \S+\s*\nDate: ")
_CHARSET = re.compile(r"(iso-8859|windows|cp|koi8|big5|gb|euc|shift_jis|iso-2022|utf)[\w-]*", re.I)
_SEVEN_BIT = ("iso-2022", "utf-7", "utf-16")
"""Charsets whose text may look like ASCII, so that reading them as UTF-8 would succeed and be wrong."""


def _sender(message: Message) -> str | None:
    """Return the From address; by rules of our own, because ids must not change with a library's."""
    header = str(message.get("From", ""))
    found = _IN_BRACKETS.search(header)
    if found:
        return found[1].lower()
    found = _BARE.search(header)
    return found[0].lower() if found else None


def _automated(message: Message, body: str) -> bool:
    """Say whether a machine wrote a message: it says so (RFC 3834), or it is an item of a news feed turned into mail.

    The feed is SpamAssassin's: a sixth of the ham, all from one address. Its bodies start with an item's URL and date.
    """
    declared = str(message.get("Auto-Submitted", "no")).strip().lower()
    return not declared.startswith("no") or _FEED.match(body) is not None


def _body(message: Message) -> str:
    """Return the plain text of a message; the text of its HTML where it has no other."""
    plain, marked = [], []
    for part in _leaves(message):
        kind = part.get_content_type()
        if kind in ("text/plain", "text/html"):
            text = _decoded(part.get_payload(decode=True) or b"", str(part.get_content_charset() or ""))
            (plain if kind == "text/plain" else marked).append(text)
    text = "\n".join(plain)
    return text if text.strip() else "\n".join(_stripped(text) for text in marked)


def _leaves(part: Message) -> Iterator[Message]:
    """Go through the parts that the sender wrote: no attachments, no enclosed messages."""
    if part.get_content_maintype() == "message" or part.get_content_disposition() == "attachment":
        return
    if part.is_multipart():
        for child in part.get_payload():
            yield from _leaves(child)
    else:
        yield part


def _decoded(data: bytes, charset: str) -> str:
    """Decode as UTF-8 where that is possible, else as declared, else as Western European; never an error.

    UTF-8 comes first because other text is almost never valid UTF-8, and mail often declares what it is not.
    """
    charset = charset.lower()
    if not charset.startswith(_SEVEN_BIT):
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            pass
    name = charset if _CHARSET.fullmatch(charset) and charset != "iso-8859-1" else "cp1252"
    try:
        return data.decode(name, errors="replace")
    except LookupError:
        return data.decode("cp1252", errors="replace")


_UNSEEN = re.compile(r"<!--.*?(?:-->|\Z)|<(script|style|title)\b.*?(?:</\1\s*>|\Z)", re.I | re.S)
_BREAK = re.compile(r"<(?:br|p|div|tr|table|li|ul|ol|hr|h[1-6]|blockquote|pre)\b[^<>]*>|</(?:p|div|tr)\s*>", re.I)
_TAG = re.compile(r"<[^<>]*>")


def _stripped(markup: str) -> str:
    """Return the text of HTML."""
    text = _UNSEEN.sub("", markup)
    return html.unescape(_TAG.sub("", _BREAK.sub("\n", " ".join(text.split()))))


# -- one message: what its sender wrote -----------------------------------------------------------------------

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufeff]")
_PGP_TEXT = re.compile(r"-----BEGIN PGP SIGNED MESSAGE-----")
_PGP_BLOCK = re.compile(r"-----BEGIN PGP (?!SIGNED)")
_PGP_END = re.compile(r"-----END PGP ")
_QUOTED = re.compile(r"\s*(?:[A-Za-z]{0,4}>|\||--\])")
_WROTE = re.compile(r".{0,200}\b(?:wrote|writes|said|schrieb)\s*:")
_WHEN = re.compile(r"\s*(?:On|At|In|Am)\b.*\d")
_FORWARDED = re.compile(r"\s*-{2,}\s*(?:original message|(?:begin )?forwarded\b)|\s*begin forwarded message:", re.I)
_HEADER = re.compile(r"\s*(From|To|cc|Sent|Date|Subject):(?:\s|$)", re.I)
_NOTES_DATE = re.compile(r"(.*?)\d{1,2}/\d{1,2}/\d{2,4}\s+\d{1,2}:\d{2}")
_RULE = re.compile(r"\s*[_\-=*~]{20,}\s*")
_FOOTER = re.compile(
    r"mailing list|sponsored by|unsubscribe|you have received this|do you yahoo|hotmail|yahoo! groups|\bmsn\b"
    r"|disclaimer|confidential|property of|this e-?mail",
    re.I,
)
_FOOTER_LINES, _HEADER_LINES = 4, 5


def clean(body: str) -> str:
    """Return what the sender of a message wrote in its body, with at most one blank line between paragraphs.

    Everything ends at a signature, at a forwarded message and at the footer of a mailing list; quoted lines between
    answers are left out, with the lines that say whose they are.
    """
    body = _CONTROL.sub("", body.replace("\r\n", "\n").replace("\r", "\n"))
    lines = _without_pgp([line.rstrip() for line in body.split("\n")])
    dropped = {j for i in range(len(lines)) for j in _attribution(lines, i)}
    kept, i = [], 0
    while i < len(lines) and not _is_footer(lines, i):
        if _is_forwarded(lines, i):
            i = _past_headers(lines, i)
            if i == len(lines) or not _QUOTED.match(lines[i]):
                break  # a message that is quoted as it was, to the end; marked lines may have answers between them
            continue
        if i not in dropped and not _QUOTED.match(lines[i]):
            kept.append(lines[i])
        i += 1
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def _without_pgp(lines: list[str]) -> list[str]:
    """Leave out signatures, keys and encrypted blocks; of a signed text, its armour."""
    kept, until = [], None
    for line in lines:
        if until is not None:
            if until.match(line):
                until = None
        elif _PGP_TEXT.match(line):
            until = re.compile("$")  # the armour's own headers, up to a blank line
        elif _PGP_BLOCK.match(line):
            until = _PGP_END
        else:
            kept.append(line.removeprefix("- ") if line.startswith("- -") else line)
    return kept


def _is_footer(lines: list[str], i: int) -> bool:
    """Say whether a signature or the footer of a list or of a provider starts at line i."""
    if lines[i] == "--":
        return True
    after = _next(lines, i, _FOOTER_LINES) if _RULE.fullmatch(lines[i]) else []
    return any(_FOOTER.search(line) for line in after)


def _is_forwarded(lines: list[str], i: int) -> bool:
    """Say whether a forwarded message, or one quoted with its headers, starts at line i."""
    if _FORWARDED.match(lines[i]) or _is_header_block(lines, i):
        return True
    # Lotus Notes puts a name and a date, in one line or in two, above the headers of what it quotes.
    found = _NOTES_DATE.match(lines[i])
    if found is None and lines[i]:
        date = next((_NOTES_DATE.match(line) for line in _next(lines, i, 1)), None)
        found = date if date and not date[1].strip() else None
    return found is not None and any(
        _is_header_block(lines, j) for j in range(i + 1, min(i + 1 + _HEADER_LINES, len(lines)))
    )


def _past_headers(lines: list[str], i: int) -> int:
    """Return the first line after the mark of a quoted message and its headers."""
    i += 1
    while i < len(lines) and not _QUOTED.match(lines[i]):
        if lines[i] and not lines[i][0].isspace() and not _HEADER.match(lines[i]):
            break
        i += 1
    return i


def _is_header_block(lines: list[str], i: int) -> bool:
    """Say whether the headers of a quoted message start at line i: a recipient or sender, and a subject close by."""
    found = _HEADER.match(lines[i])
    if not found or found[1].lower() not in ("from", "to", "sent", "date"):
        return False
    names = {other[1].lower() for after in lines[i : i + 1 + _HEADER_LINES] if (other := _HEADER.match(after))}
    return "subject" in names and len(names) >= 3


def _attribution(lines: list[str], i: int) -> list[int]:
    """Return the lines of "On … wrote:" if they end at line i: those before a quotation, or those with a date."""
    if not _WROTE.fullmatch(lines[i]):
        return []
    if _WHEN.match(lines[i]):
        return [i]
    if i and _WHEN.match(lines[i - 1]):
        return [i - 1, i]
    after = _next(lines, i, 1)
    return [i] if after and _QUOTED.match(after[0]) else []


def _next(lines: list[str], i: int, count: int) -> list[str]:
    """Return the next lines after line i that are not blank."""
    found = []
    for line in lines[i + 1 : i + 1 + 3 * count]:
        if line:
            found.append(line)
        if len(found) == count:
            break
    return found
