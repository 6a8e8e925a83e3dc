"""What a reader of private tables holds: an open door, limited to some parts, that the ledger gave it (rule 26)."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpmixmin import artifacts
from dpmixmin.errors import UserError
from dpmixmin.privacy.log import fsync_folder

if TYPE_CHECKING:
    from dpmixmin.privacy.ledger import Ledger


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


@dataclass(frozen=True)
class Progress:
    """The state of a long mechanism between its steps (rule 23): raw private data beside the ledger, one file.

    A resumed mechanism goes on with the step that follows the saved one and ends after the spec's last: the released
    transcript has exactly the steps that were reserved. Steps after the saved state that a dead process had done are
    done again with fresh noise; nobody ever saw them.

    Attributes:
        folder: where the state is.
        seconds: how often it is saved at most.
    """

    folder: Path
    seconds: float = 60.0

    def load(self) -> tuple[int, bytes] | None:
        """Return the number of finished steps and the state after them, or None."""
        found = max(self.folder.glob("step=*"), key=self._step, default=None)
        return None if found is None else (self._step(found), found.read_bytes())

    def save(self, steps: int, state: Callable[[], bytes]) -> None:
        """Replace the state (one rename), unless the last one is fresh.

        Args:
            steps: number of finished steps.
            state: gives the bytes; called only when they are written.
        """
        newest = max(self.folder.glob("step=*"), key=self._step, default=None)
        if newest is not None and time.time() - newest.stat().st_mtime < self.seconds:
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self.folder / f".{uuid.uuid4().hex}"
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(state())
            out.flush()
            os.fsync(out.fileno())
        os.rename(temporary, self.folder / f"step={steps}")
        if newest is not None:
            newest.unlink()

    def exists(self) -> bool:
        """Whether there is a state to go on from."""
        return self.load() is not None

    def forget(self) -> None:
        """Delete the state."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @staticmethod
    def _step(path: Path) -> int:
        return int(path.name.removeprefix("step="))


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
        artifacts.publish(building, files, manifest)
        fsync_folder(building)
        os.rename(building, self.ledger.root / "store" / self.key)
        fsync_folder(self.ledger.root / "store")
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
