"""What a reader of private tables holds: an open door, limited to some parts, that the ledger gave it (rule 26)."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpmixmin import artifacts, atomic
from dpmixmin.errors import UserError, disk_failure
from dpmixmin.privacy import lease

if TYPE_CHECKING:
    from dpmixmin.privacy.ledger import Ledger

_DIGEST_BYTES = hashlib.sha256().digest_size
"""A state's file begins with the SHA-256 of what follows."""


@dataclass
class Access:
    """An open door to private tables, limited to some parts."""

    parts: frozenset[str]
    is_open: bool = field(default=True, init=False)

    def table(self, folder: str | Path, name: str, **wanted: str):
        """Read a private table; rows of other parts are filtered out where the table has a part column.

        Args:
            folder: an artefact in ``private/``.
            name: file name without ``.parquet``.
            wanted: ``ids`` and ``partition`` that the table must have been made with (data/split.py). A mechanism
                also refuses a table of another partition than its own.

        Returns:
            ``pyarrow.Table``.

        Raises:
            UserError: the table belongs to other ids or another partition.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        self._check()
        manifest = artifacts.verify(folder)
        if "partition" in manifest and self.partition:
            wanted.setdefault("partition", self.partition)
        for key, value in wanted.items():
            if manifest.get(key) != value:
                raise UserError(
                    f"{folder}: made with other {key} than this config and ledger have (`{manifest.get(key)}`, wanted "
                    f"`{value}`); delete the run's private/ folder and run again"
                )
        table = artifacts.read_table(Path(folder) / f"{name}.parquet", access=self)
        if "part" in table.column_names:
            table = table.filter(pc.is_in(table["part"], value_set=pa.array(sorted(self.parts), pa.string())))
        return table

    def parent(self, folder: str | Path) -> dict[str, str]:
        """Name a private parent for a manifest: by its random artefact id only."""
        self._check()
        return {"path": str(folder), "artifact": artifacts.verify(folder)["artifact"]}

    @property
    def partition(self) -> str:
        """Name of the partition that this access is limited to, or empty."""
        return ""

    def _check(self) -> None:
        if not self.is_open:
            raise PermissionError("this access is closed")


@dataclass
class Progress:
    """The state of a long computation between its steps: one file, whole or not there.

    A mechanism's (rule 23) is raw private data, beside the ledger. A resumed mechanism goes on with the step that
    follows the saved one and ends after the spec's last: the released transcript has exactly the steps that were
    reserved. Steps after the saved state that a dead process had done are done again with fresh noise; nobody ever
    saw them.

    One process at a time may save here: the holder of a mechanism's entry, or of :meth:`lease`.

    Attributes:
        folder: where the state is.
        seconds: how often it is saved at most.
    """

    folder: Path
    seconds: float = 60.0
    _tried: float | None = field(default=None, init=False, repr=False, compare=False)
    _failed: bool = field(default=False, init=False, repr=False, compare=False)

    def load(self) -> tuple[int, bytes] | None:
        """Return the number of finished steps and the state after them, or None; damaged files do not count."""
        atomic.remove_leftovers(self.folder)
        for steps, path in sorted(self._found().items(), reverse=True):
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as saved:
                expected, state = saved.read(_DIGEST_BYTES), saved.read()
                if hashlib.sha256(state).digest() == expected:
                    return steps, state
        return None

    def save(self, steps: int, state: Callable[[], bytes], now: bool = False) -> None:
        """Replace the state, unless the last one is fresh. A disk that fails ends no computation.

        On a full disk the last state that was written stays, what was half written is removed, one line says that
        nothing is saved, and the next attempt is made after as many seconds as between two states.

        Args:
            steps: number of finished steps.
            state: gives the bytes; called only when they are written.
            now: whatever the age of the last one.
        """
        if self._tried is None:
            # By this process's own clock: the last state may come from a machine with another.
            self._tried = time.monotonic() if self._found() else -math.inf
        if not now and time.monotonic() - self._tried < self.seconds:
            return
        try:
            self._write(steps, state())
        except OSError as error:
            failure = disk_failure(error)
            if failure is None:
                raise
            if not self._failed:
                print(
                    f"warning: {failure.what}: the state is not saved; going on without", file=sys.stderr, flush=True
                )
            self._failed = True
        finally:
            self._tried = time.monotonic()

    def exists(self) -> bool:
        """Whether there is a state to go on from."""
        return self.load() is not None

    def forget(self) -> None:
        """Delete the state."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Keep other processes from this state: they wait here, and then find what this one left.

        A mechanism needs none, its entry has one. The lease's file lies beside the folder until the end of the block.
        """
        path = self.folder.with_name(f"{self.folder.name}.lock")
        try:
            handle = lease.take(path, f"waiting for another job that works on {self.folder}")
        except lease.Unsupported:
            # Two trainings of the same public data and seed then do the same twice: slow, but not wrong.
            print("warning: no file locks here; nothing keeps a second job from doing the same", file=sys.stderr)
            handle = None
        with handle or contextlib.nullcontext():
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _write(self, steps: int, state: bytes) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic.remove_leftovers(self.folder)
        with atomic.replacing(self.folder / f"step={steps}") as out:
            out.write(hashlib.sha256(state).digest())
            out.write(state)
        atomic.fsync_folder(self.folder)
        for other, path in self._found().items():
            if other != steps:
                path.unlink(missing_ok=True)

    def _found(self) -> dict[int, Path]:
        """Return the states by their number of steps; two where a process died between writing and deleting."""
        paths = self.folder.glob("step=*")
        return {int(path.name[5:]): path for path in paths if re.fullmatch(r"step=\d+", path.name)}


@dataclass
class Joined(Access):
    """What another process of one training holds: the tables of its mechanism. It commits and publishes nothing."""

    split: str

    @property
    def partition(self) -> str:
        """Name of the partition that the entry is about."""
        return self.split


@dataclass
class Release(Access):
    """An open mechanism: reads its parts, commits once to the store, re-publishes from there.

    Attributes:
        entry: id of its ledger entry.
        committed: True when the store holds the output; nothing may be drawn then.
    """

    ledger: Ledger
    entry: str
    key: str
    committed: bool
    split: str = ""

    @property
    def partition(self) -> str:
        """Name of the partition that the entry is about."""
        return self.split

    @property
    def progress(self) -> Progress:
        """Where a long mechanism keeps its state, so that a killed one goes on instead of starting again."""
        return self.ledger.progress(self.entry)

    def commit(self, files: dict[str, bytes], manifest: dict[str, Any]) -> None:
        """Write the output into the store (one rename: the commit point) and log it."""
        self._check()
        if self.committed:
            raise RuntimeError("this release is committed already")
        building = self.ledger.root / "tmp" / self.entry
        shutil.rmtree(building, ignore_errors=True)
        try:
            artifacts.publish(building, files, manifest)
            os.rename(building, self.ledger.root / "store" / self.key)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        atomic.fsync_folder(self.ledger.root / "store")
        self.committed = True
        self.ledger.log.append({"event": "committed", "entry": self.entry})
        self.progress.forget()

    def stored(self, name: str) -> bytes:
        """Return one file of the committed output."""
        return (self._store() / name).read_bytes()

    def _store(self) -> Path:
        store = self.ledger.root / "store" / self.key
        if not store.is_dir():
            raise UserError(f"{store}: missing, though the ledger says it was released; restore it from a backup")
        return store

    def publish(self, folder: str | Path, views: dict[str, bytes]) -> None:
        """Copy the committed output to its place in the run.

        Args:
            folder: the artefact's folder.
            views: files that are views of the ledger (``privacy.json``), written beside the copies.
        """
        if not self.committed:
            raise RuntimeError("commit first")
        artifacts.republish(self._store(), folder, views)
