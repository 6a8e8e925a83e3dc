"""Writing and reading artefacts: atomic, verified, with a manifest written last.

An artefact is a folder of files plus ``manifest.json``. A reader calls :func:`verify` first, so a folder whose writer
died is never taken as whole; after a power cut neither, because what a manifest names is on the disk before it.
Outside ``private/`` a manifest names a private parent by a random artefact id, never by a hash, size, count or time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from pathlib import Path
from typing import Any

from dpmixmin import atomic
from dpmixmin.errors import UserError
from dpmixmin.paths import PRIVATE, room_of

MANIFEST = "manifest.json"

VIEWS = ("privacy.json", "README.md")
"""Files derived from the ledger: the statement, and the model card that quotes it."""

_writable_rooms: set[str] | None = None
"""Rooms this process may still write to; None before any private table was opened (see :func:`restrict`)."""


def canonical(value: Any) -> str:
    """Return the one JSON text of a value: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value's canonical text."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def file_digest(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


# -- what a process may write ---------------------------------------------------------------------------------


def restrict(rooms: set[str]) -> None:
    """Narrow the rooms that this process may write to; called when a private table is opened.

    The rule it enforces: after reading private data, only ``private/`` (derived tables), ``study/`` (measurements),
    or the ledger's store (mechanisms) can be written. It never widens.
    """
    global _writable_rooms
    _writable_rooms = rooms if _writable_rooms is None else _writable_rooms & rooms


def unrestrict_for_tests() -> None:
    """Forget restrictions; a test process plays several stages in turn."""
    global _writable_rooms
    _writable_rooms = None


def _check_room(path: Path) -> None:
    room = room_of(path)
    if _writable_rooms is not None and room is not None and room not in _writable_rooms:
        raise PermissionError(f"this process has opened private tables and may not write to {room}/")


# -- writing --------------------------------------------------------------------------------------------------


def make_dir(path: str | Path) -> Path:
    """Create a folder with its parents; folders in ``private/`` get mode 0700."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if room_of(path) == PRIVATE:
        for folder in (path, *path.parents):
            if room_of(folder) != PRIVATE:
                break
            folder.chmod(0o700)
    return path


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file atomically (temporary name, fsync, rename); mode 0600 in ``private/``."""
    path = Path(path)
    _write(path, data)
    atomic.fsync_folder(path.parent)


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically; its name survives a power cut once its folder is synced."""
    _check_room(path)
    make_dir(path.parent)
    with atomic.replacing(path, 0o600 if room_of(path) == PRIVATE else 0o644) as out:
        out.write(data)


def write_json(path: str | Path, value: Any) -> None:
    """Write a value as indented JSON, atomically."""
    write_bytes(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """Return a value as indented JSON text with a final newline."""
    return (json.dumps(value, indent=2, sort_keys=False, allow_nan=False) + "\n").encode()


def read_json(path: str | Path) -> Any:
    """Read a JSON file.

    Raises:
        UserError: missing or not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: missing; run the stage that makes it") from None
    except json.JSONDecodeError:
        raise UserError(f"{path}: not valid JSON; delete it and run again") from None


def publish(folder: str | Path, files: dict[str, bytes], manifest: dict[str, Any]) -> None:
    """Write an artefact: its files, then its manifest (with their hashes) last. Removes what dead writers left.

    Args:
        folder: the artefact's folder.
        files: name to content.
        manifest: from :func:`manifest`; gains the key ``files``.
    """
    folder = Path(folder)
    _check_room(folder)
    make_dir(folder)
    atomic.remove_leftovers(folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    for name, data in files.items():
        _write(folder / name, data)
    atomic.fsync_folder(folder)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    write_json(folder / MANIFEST, {**manifest, "files": hashes})


def republish(stored: str | Path, folder: str | Path, views: dict[str, bytes]) -> None:
    """Copy an artefact from the ledger's store, manifest last. Allowed whatever was opened: it is a release.

    Args:
        stored: the artefact in the store.
        folder: where it goes.
        views: files derived from the ledger's log, written beside the copies.
    """
    stored, folder = Path(stored), make_dir(folder)
    atomic.remove_leftovers(folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    for name, data in views.items():
        with atomic.replacing(folder / name, 0o644) as out:
            out.write(data)
    names = sorted(path.name for path in stored.iterdir() if path.name != MANIFEST)
    for name in names:
        _copy(stored / name, folder / name)
    atomic.fsync_folder(folder)
    _copy(stored / MANIFEST, folder / MANIFEST)
    atomic.fsync_folder(folder)


def _copy(source: Path, target: Path) -> None:
    with open(source, "rb") as data, atomic.replacing(target, 0o644) as out:
        shutil.copyfileobj(data, out, 1 << 20)


def verify(folder: str | Path) -> dict[str, Any]:
    """Check an artefact against its manifest and return the manifest.

    Raises:
        UserError: incomplete or altered.
    """
    folder = Path(folder)
    found = read_json(folder / MANIFEST)
    for name, expected in found["files"].items():
        path = folder / name
        if not path.exists() or file_digest(path) != expected:
            raise UserError(f"{path}: incomplete or altered since it was made; delete {folder} and run again")
    return found


# -- manifests ------------------------------------------------------------------------------------------------


def manifest(
    stage: str,
    *,
    config: dict,
    code: str,
    parents: list[dict],
    cell: dict | None = None,
    seed: int | None = None,
    private: bool = False,
    partition: dict[str, str] | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Return the manifest of a new artefact.

    Args:
        stage: the stage that makes it.
        config: the config subtree it depends on.
        code: digest of the stage's code.
        parents: from :func:`parent` (public) or an access's ``parent`` (private).
        cell: coordinates of the cell, if it is one.
        seed: public seed, if one was used.
        partition: names of the ids and the partition that a private table was made with; of texts the tokenizer's
            hash too.
        device: what the model ran on.
        private: the artefact goes to ``private/``: it gets the random id by which others may name it.
    """
    return {
        **({"artifact": uuid.uuid4().hex} if private else {}),
        **(partition or {}),
        "stage": stage,
        "cell": cell or {},
        "parents": parents,
        "public_seed": seed,
        "config": config,
        "code": code,
        "versions": versions(),
        "device": device,
    }


def parent(folder: str | Path) -> dict[str, str]:
    """Name a non-private parent by path and content.

    Raises:
        UserError: incomplete or altered.
    """
    if room_of(folder) == PRIVATE:
        raise PermissionError("a private parent is named through ledger.open")
    return {"path": str(folder), "sha256": content_digest(folder)}


def content_digest(folder: str | Path) -> str:
    """Return the digest of an artefact's content, without what was derived from the ledger.

    Raises:
        UserError: incomplete or altered.
    """
    files = verify(folder)["files"]
    return digest({name: value for name, value in files.items() if name not in VIEWS})


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide results."""
    from importlib.metadata import version

    import dpmixmin

    names = ("numpy", "scipy", "torch", "opacus", "transformers", "tokenizers", "peft", "dp-accounting", "pyarrow")
    return {"dpmixmin": dpmixmin.__version__, **{name: version(name) for name in names}}


# -- tables ---------------------------------------------------------------------------------------------------


def parquet_bytes(table) -> bytes:
    """Return an Arrow table as the bytes of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def read_table(path: str | Path, *, access: object | None = None):
    """Read a Parquet file of a run as an Arrow table.

    Args:
        path: the file.
        access: an open ``ledger.Access``; needed for files in ``private/`` (the runtime half of rule 26).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if room_of(path) == PRIVATE and not getattr(access, "is_open", False):
        raise PermissionError("private tables are opened through ledger.open only")
    try:
        return pq.read_table(path, partitioning=None)
    except FileNotFoundError:
        raise UserError(f"{path}: missing; run the stage that makes it") from None
    except pa.ArrowInvalid:
        raise UserError(f"{path}: not a readable Parquet file; delete it and run again") from None
