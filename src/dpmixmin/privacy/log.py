"""An append-only log that any number of processes, on any number of machines, may write at once.

One file per event: ``000001.json``, ``000002.json``, … each naming the hash of the one before. An event is appended by
linking a complete, fsynced file to the next free number. That is exclusive on every POSIX filesystem, NFS included, so
the number itself is the lock: a writer that lost the race re-reads and tries the next.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

from dpmixmin.artifacts import json_bytes
from dpmixmin.errors import UserError


class EventLog:
    """The log in one folder.

    Args:
        folder: where its files are; it must exist.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._events: list[dict[str, Any]] = []
        self._last_hash = ""

    def append(self, event: dict[str, Any]) -> None:
        """Append an event; it gains its number, the hash of the one before, and the time."""
        while True:
            self.read()
            full = {"number": len(self._events) + 1, "previous": self._last_hash, "time": time.time(), **event}
            if link_new(self._path(len(self._events) + 1), full):
                return

    def read(self) -> list[dict[str, Any]]:
        """Return every event in order, reading only those that are new since the last look.

        Raises:
            UserError: the hash chain is broken, or an event is missing in the middle.
        """
        while True:
            path = self._path(len(self._events) + 1)
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                break
            event = json.loads(data)
            if event["previous"] != self._last_hash:
                raise UserError(f"{path}: the ledger's hash chain is broken here; restore it from a backup")
            self._events.append(event)
            self._last_hash = hashlib.sha256(data).hexdigest()
        highest = max((int(path.stem) for path in self.folder.glob("[0-9]*.json")), default=0)
        if highest > len(self._events):
            # Another process may have appended between the two looks; a real gap stays one.
            missing = self._path(len(self._events) + 1)
            if not missing.exists():
                raise UserError(f"{missing}: missing from the ledger; restore it from a backup")
            return self.read()
        return self._events

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.json"


def link_new(path: Path, value: dict[str, Any]) -> bool:
    """Create a JSON file with this content, whole or not at all; return False when it exists already."""
    temporary = path.parent / f".{uuid.uuid4().hex}"
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(json_bytes(value))
        out.flush()
        os.fsync(out.fileno())
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    fsync_folder(path.parent)
    return True


def fsync_folder(folder: Path) -> None:
    """Make a folder's new names survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
