"""An append-only log that any number of processes, on any number of machines, may write at once.

One file per event: ``000001.json``, ``000002.json``, … each naming the hash of the one before. An event is appended by
linking a complete, fsynced file to the next free number. That is exclusive on every POSIX filesystem, NFS included, so
the number itself is the lock: a writer that lost the race re-reads and tries the next.

The chain shows any change but one to its last events. ``head.json`` beside the folder names the newest event and its
hash, so that losing or altering those is seen too. Only somebody who rewrites both goes unnoticed: who must be able to
prove more keeps a copy of ``head.json`` elsewhere.

On a full disk :meth:`EventLog.append` raises, and the event is not there, or is there whole (the head alone could not
be moved). The caller takes it for not appended; the next process reads what there is.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpmixmin.artifacts import json_bytes
from dpmixmin.atomic import fsync_folder, new_file, replacing, temporary_beside
from dpmixmin.errors import UserError

LATE_SECONDS = 1.0
"""How long an event that must be there is waited for."""


class EventLog:
    """The log in one folder.

    Args:
        folder: where its files are; it must exist.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._events: list[dict[str, Any]] = []
        self._hashes: list[str] = []
        self._head = folder.parent / "head.json"

    def append(self, event: dict[str, Any], check: Callable[[list[dict[str, Any]]], None] | None = None) -> None:
        """Append an event; it gains its number, the hash of the one before, and the time.

        Args:
            event: plain JSON types.
            check: raises where the event may not follow the events it is given: exactly those it is appended to,
                because a writer that lost the race for the number checks again.
        """
        while True:
            events = self.read()
            if check is not None:
                check(events)
            if self._events and not self._head.exists():
                # Its writer died, or the disk was full. A log of two events without a head is refused as cut short.
                self._point_head(self._events[-1])
            full = {"number": len(self._events) + 1, "previous": self._last_hash(), "time": time.time(), **event}
            if link_new(self._path(full["number"]), full):
                self._point_head(full)
                return
            time.sleep(0.002)  # another writer was faster; a network filesystem may need a moment to show its event

    def read(self) -> list[dict[str, Any]]:
        """Return every event in order, reading only those that are new since the last look.

        Raises:
            UserError: the hash chain is broken, or an event is missing or altered.
        """
        while True:
            path = self._path(len(self._events) + 1)
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                break
            self._take(path, data)
        highest = max((int(path.stem) for path in self.folder.glob("[0-9]*.json")), default=0)
        if highest > len(self._events):
            # Another process may have appended between the two looks; a real gap stays one.
            missing = self._path(len(self._events) + 1)
            if not self._shows(missing):
                raise UserError(f"{missing}: missing from the ledger; restore it from a backup")
            return self.read()
        self._check_head()
        return self._events

    def _take(self, path: Path, data: bytes) -> None:
        """Add the next event after checking that it continues the chain."""
        try:
            event = json.loads(data)
            continues = event["previous"] == self._last_hash() and event["number"] == len(self._events) + 1
        except (ValueError, KeyError, TypeError):
            continues = False
        if not continues:
            raise UserError(f"{path}: the ledger's hash chain is broken here; restore it from a backup")
        self._events.append(event)
        self._hashes.append(hashlib.sha256(data).hexdigest())

    def _last_hash(self) -> str:
        return self._hashes[-1] if self._hashes else ""

    def _point_head(self, event: dict[str, Any]) -> None:
        """Name the newest event. Of two writers the slower may win, so the head may lag behind, never run ahead."""
        value = {"number": event["number"], "sha256": hashlib.sha256(json_bytes(event)).hexdigest()}
        with replacing(self._head) as out:
            out.write(json_bytes(value))
        fsync_folder(self._head.parent)

    def _check_head(self) -> None:
        try:
            head = json.loads(self._head.read_bytes())
        except FileNotFoundError:
            if len(self._events) > 1:
                raise UserError(f"{self._head}: missing from the ledger; restore it from a backup") from None
            return  # a ledger without any event, or one whose first writer died before it wrote this file
        number = head["number"]
        if number > len(self._events):
            for late in range(len(self._events) + 1, number + 1):
                if not self._shows(self._path(late)):
                    raise UserError(f"{self._path(late)}: missing from the ledger; restore it from a backup")
            self.read()  # appended between the two looks
        elif self._hashes[number - 1] != head["sha256"]:
            raise UserError(f"{self._path(number)}: altered since it was written; restore it from a backup")

    def _shows(self, path: Path) -> bool:
        """Whether an event is there that others tell of: a network filesystem may show it a moment late."""
        end = time.monotonic() + LATE_SECONDS
        while not path.exists():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
            os.close(os.open(self.folder, os.O_RDONLY))  # an NFS client then asks its server again
        return True

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.json"


def link_new(path: Path, value: dict[str, Any]) -> bool:
    """Create a JSON file with this content, whole or not at all; return False when it exists already."""
    temporary = temporary_beside(path)
    with new_file(temporary, 0o600) as out:
        out.write(json_bytes(value))
    try:
        os.link(temporary, path)
    except FileExistsError:
        # A network filesystem that repeated a request whose answer was lost says so of our own link.
        if temporary.stat().st_nlink == 1:
            return False
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)
    return True
