"""The ledger of one sensitive dataset, and the only door to its records.

Layout, outside ``results/`` (mode 0700, never a Snakemake input or output)::

    {ledger.path}/{dataset}/
      dataset.json          random dataset id
      keys.json             deploy: the keys of record ids and splits, drawn once
      deployment.json       deploy: what it protects, fixed once
      entries/000001.json   the log (see log.py): one file per event, each naming the hash of the one before
      leases/KEY.lock       held (flock) by the process that works on a release
      store/KEY/            write-once outputs; the rename into here is a release's commit point
      tmp/                  outputs under construction; states of long mechanisms between two steps

An entry goes ``reserved -> committed`` or ``reserved -> void``. A process first takes the key's lease. If the entry is
committed, the stored output is re-published: nothing is drawn, nothing is charged. If it is reserved and we hold the
lease, its owner is dead: an output in the store commits it; a state between two steps is gone on from, under the same
entry; else it becomes void (listed as an aborted attempt) and a new entry is reserved, with fresh noise.

A mechanism that a signal or a failing disk ends between two saved steps stays reserved; any other error makes it void.
Where the disk is so full that the log cannot say so, the next process finds the entry as a dead owner's.

Two modes. *Study* (benchmark data): every cell is stated as if it were the only release, an edit of code or config
makes a new one, and uncharged measurements are allowed and noted. *Deploy*: nothing is uncharged, a cap holds over
everything that was ever charged, and a release whose inputs changed needs a new label.

Rules kept here (docs/rules.md): 5, 18, 19, 21, 23, 26.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpmixmin import artifacts, atomic
from dpmixmin.config import Config
from dpmixmin.errors import UserError, disk_failure
from dpmixmin.paths import PRIVATE, STUDY, checkout
from dpmixmin.privacy import lease, statement
from dpmixmin.privacy.access import Access, Joined, Progress, Release
from dpmixmin.privacy.entries import Entry, entries_of
from dpmixmin.privacy.events import to_json
from dpmixmin.privacy.keys import Keys, bind
from dpmixmin.privacy.log import EventLog, link_new
from dpmixmin.privacy.purposes import Cap, Derive, Mechanism, Study
from dpmixmin.privacy.totals import total
from dpmixmin.sections import Private

PARTS = ("mixing", "finetune", "validation", "test")
"""The atoms: disjoint parts of the units under one split key."""

__all__ = ("PARTS", "Cap", "Derive", "Entry", "Ledger", "Mechanism", "Study")


class Ledger:
    """The ledger of one sensitive dataset.

    Args:
        root: folder of all ledgers.
        dataset: the dataset's name.
        label: release label of new entries.
        charge_aborted: count void entries in statements and against the cap too.
        caveats: what else every statement must say is not covered.
        cap: makes this a deployment: see the module's text.
    """

    def __init__(
        self,
        root: str | Path,
        dataset: str,
        *,
        label: str = "first",
        charge_aborted: bool = False,
        caveats: tuple[str, ...] = (),
        cap: Cap | None = None,
    ):
        self.root, self.caveats, self.cap = Path(root) / dataset, caveats, cap
        self.label, self.charge_aborted = label, charge_aborted
        for folder in (Path(root), self.root, *(self.root / n for n in ("entries", "leases", "store", "tmp"))):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.log, self._swept = EventLog(self.root / "entries"), False
        identity = self.root / "dataset.json"
        link_new(identity, {"dataset": dataset, "id": uuid.uuid4().hex})
        self.dataset_id = json.loads(identity.read_text())["id"]
        self.keys = Keys(self.root, deploy=cap is not None)

    @classmethod
    def of(cls, config: Config) -> Ledger:
        """Return the ledger that a config names; relative paths start at the checkout."""
        root = Path(config.ledger.path).expanduser()
        root = root if root.is_absolute() else checkout() / root
        if config.mode == "deploy" and root.resolve().is_relative_to(checkout()):
            raise UserError(
                f"ledger.path: {root} lies in the checkout; mode deploy keeps it outside, where it is safe"
            )
        cap = config.ledger.cap
        ledger = cls(
            root,
            config.private.name,
            label=config.privacy.release,
            charge_aborted=config.privacy.charge_aborted,
            caveats=_caveats(config.private),
            cap=Cap(cap.epsilon, cap.delta) if cap else None,
        )
        bind(ledger.root, deploy=config.mode == "deploy", unit=config.private.unit)
        return ledger

    # -- reading the log --------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Return every entry in the order of reservation."""
        return entries_of(self.log.read())

    def uncharged(self) -> list[str]:
        """Return what was measured on this dataset without charge, each once."""
        return [event["what"] for event in self.log.read() if event["event"] == "uncharged"]

    def charged(self, entries: Sequence[Entry] | None = None) -> list[Entry]:
        """Return the entries that count: committed, still running, and void ones where those are charged."""
        entries = self.entries() if entries is None else entries
        return [entry for entry in entries if self.charge_aborted or entry.state != "void"]

    # -- opening ----------------------------------------------------------------------------------------------

    @contextmanager
    def open(
        self, parts: Sequence[str], purpose: Derive | Study | Mechanism, split: str = ""
    ) -> Iterator[Access | Release]:
        """Open private tables for one purpose: the only way to read them.

        Args:
            parts: atoms that the reader may see; all others are filtered out of every table.
            purpose: :class:`Derive`, :class:`Study` or :class:`Mechanism` (reserved here, before anything is read).
            split: name of the partition that defines the parts; needed for mechanisms, which then read tables of
                that partition only.

        Yields:
            An :class:`Access`, or for a mechanism a :class:`Release`.
        """
        unknown = set(parts) - set(PARTS)
        if unknown or not parts:
            raise ValueError(f"parts must be some of {PARTS}")
        if isinstance(purpose, Mechanism):
            with self._release(tuple(parts), purpose, split) as release:
                yield release
            return
        if isinstance(purpose, Study):
            if self.cap is not None:
                raise PermissionError("mode deploy: nothing is measured on sensitive records without charge")
            self._note(purpose.what, parts)
        artifacts.restrict({PRIVATE} if isinstance(purpose, Derive) else {PRIVATE, STUDY})
        access = Access(frozenset(parts))
        try:
            yield access
        finally:
            access.is_open = False

    def _note(self, what: str, parts: Sequence[str]) -> None:
        """Note an uncharged touch, once."""
        text = f"{what} on {', '.join(sorted(parts))}"
        if text not in self.uncharged():
            self.log.append({"event": "uncharged", "what": text})

    @contextmanager
    def _release(self, parts: tuple[str, ...], purpose: Mechanism, split: str) -> Iterator[Release]:
        if not split:
            raise ValueError("a mechanism needs the name of its partition")
        facts = self._facts(parts, purpose, split)
        key = artifacts.digest(facts["identity"])[:32]
        with self._lease(key, purpose.cell):
            found = self._take_over(key)
            self._sweep()
            if found is not None and found.state == "reserved" and not _same(found, facts):
                # Nothing was released, and a state of other settings, inputs or code is not gone on from.
                self._void(found.id)
                found = None
            if found is not None:
                self._check_unchanged(found, facts)
            done = found is not None and found.state == "committed"
            entry_id = found.id if found else self._reserve(key, facts)
            artifacts.restrict(set())
            release = Release(frozenset(parts), self, entry_id, key, done, split)
            try:
                yield release
            except BaseException as error:
                self._give_up(release, error)
                raise
            finally:
                release.is_open = False
            if not release.committed:
                self._void(entry_id)
                raise RuntimeError("a mechanism was opened and never committed")

    def _give_up(self, release: Release, error: BaseException) -> None:
        """Void an entry, unless its output is stored, or the next run can go on from its state.

        That is so after a signal and after a failure of the disk. Nothing here may hide the error itself.
        """
        with contextlib.suppress(OSError, UserError):
            if release.committed or (self.root / "store" / release.key).exists():
                return
            resumable = isinstance(error, KeyboardInterrupt | SystemExit) or disk_failure(error) is not None
            if not (resumable and release.progress.exists()):
                self._void(release.entry)

    @contextmanager
    def join(
        self, entry_id: str, parts: Sequence[str], purpose: Mechanism, split: str, *, seconds: float = 60.0
    ) -> Iterator[Joined]:
        """Open the door of a mechanism for another process of the same training: it reads the tables, no more.

        The process that opened the mechanism holds its lease and commits it; it tells the others its entry.

        Args:
            entry_id: the reserved entry.
            parts: as it was opened with.
            purpose: as it was opened with.
            split: as it was opened with.
            seconds: how long to wait for the entry: a network filesystem may show it late.

        Raises:
            UserError: there is no such entry, or it was reserved for something else.
            PermissionError: it is committed or void: there is nothing left to compute.
        """
        facts = self._facts(tuple(parts), purpose, split)
        key = artifacts.digest(facts["identity"])[:32]
        entry = self._awaited(entry_id, seconds)
        if entry.key != key or not _same(entry, facts):
            raise UserError(
                f"{self.root}: the processes of one training were started with different configs, inputs or code; "
                "start all of them from the same checkout"
            )
        if entry.state != "reserved":
            raise PermissionError(f"this release is {entry.state}; nothing may be computed for it")
        artifacts.restrict(set())
        access = Joined(frozenset(parts), split)
        try:
            yield access
        finally:
            access.is_open = False

    def _awaited(self, entry_id: str, seconds: float) -> Entry:
        end = time.monotonic() + seconds
        while True:
            for entry in self.entries():
                if entry.id == entry_id:
                    return entry
            if time.monotonic() > end:
                raise UserError(
                    f"{self.root}: this ledger lacks the entry that another process of the training has reserved; "
                    "set ledger.path to a folder that all machines share"
                )
            time.sleep(min(0.5, seconds))

    def _sweep(self) -> None:
        """Remove what killed processes left under construction, once in the life of this object."""
        if self._swept:
            return
        self._swept = True
        for folder in (self.root / "entries", self.root):
            atomic.remove_leftovers(folder)
        over = {entry.id for entry in self.entries() if entry.state != "reserved"}
        for path in (self.root / "tmp").iterdir():
            if path.name.partition(".")[0] in over:
                shutil.rmtree(path, ignore_errors=True)

    def _facts(self, parts: tuple[str, ...], purpose: Mechanism, split: str) -> dict[str, Any]:
        """Return what the log keeps of a release; ``identity`` is what its store key is made of."""
        where = {"dataset": self.dataset_id, "split": split, "parts": sorted(parts), "cell": purpose.cell}
        made = {
            "spec": purpose.spec.digest(),
            "inputs": purpose.inputs,
            "made": artifacts.digest(purpose.made),
            "private_randomness": purpose.private_randomness,
        }
        if self.cap is None:
            identity = {**where, **made, "label": self.label, "code": purpose.code}
        else:
            # Code and inputs are no part of a deployment's key: an edit must not become a second release by itself.
            identity = {**where, "label": self.label}
            made["made"] = artifacts.digest(purpose.made["config"])
        return {
            "identity": identity,
            **where,
            "label": self.label,
            "code": purpose.code,
            "inputs_digest": artifacts.digest(made),
            "private_randomness": purpose.private_randomness,
            "spec": purpose.spec.describe(),
            "events": [to_json(event) for event in purpose.spec.events()],
            "total_variation": purpose.total_variation,
            "process": {"pid": os.getpid(), "host": os.uname().nodename},
        }

    def _take_over(self, key: str) -> Entry | None:
        """Return the entry of a key to go on with, if any. We hold its lease, so owners of reserved ones are dead."""
        for entry in self.entries():
            if entry.key == key and entry.state == "reserved":
                if (self.root / "store" / key).exists():
                    # The rename into the store was the commit point.
                    self.log.append({"event": "committed", "entry": entry.id})
                elif not self.progress(entry.id).exists():
                    self._void(entry.id)
        mine = [entry for entry in self.entries() if entry.key == key and entry.state != "void"]
        if not mine and (self.root / "store" / key).exists():
            raise UserError(
                f"{self.root}: the store holds a release that the ledger's log has lost; restore the log from a backup"
            )
        return mine[0] if mine else None

    def progress(self, entry_id: str) -> Progress:
        """Return where an entry's mechanism keeps its state."""
        return Progress(self.root / "tmp" / f"{entry_id}.state")

    def _check_unchanged(self, done: Entry, facts: dict[str, Any]) -> None:
        if done.facts["inputs_digest"] != facts["inputs_digest"]:
            raise UserError(
                f"{done.name()} was released already, from other settings or inputs: set privacy.release to a new "
                "label to make and charge another one, or restore what changed"
            )

    def _reserve(self, key: str, facts: dict[str, Any]) -> str:
        entry = Entry(uuid.uuid4().hex, key, "reserved", facts)
        # Checked against exactly the events that this one is appended to, whoever else writes at the same time.
        self.log.append(
            {"event": "reserved", "entry": entry.id, "key": key, **facts}, check=lambda log: self._cap(entry, log)
        )
        return entry.id

    def _cap(self, new: Entry, events: list[dict[str, Any]]) -> None:
        if self.cap is None:
            return
        before = self.charged(entries_of(events))
        together, _ = total([entry.touch() for entry in [*before, new]], self.cap.delta)
        if together > self.cap.epsilon:
            spent = "; ".join(entry.name() for entry in before) or "nothing yet"
            raise UserError(
                f"ledger.cap: {new.name()} would bring this dataset to epsilon {together:.4g} at delta "
                f"{self.cap.delta:g}, above the cap of {self.cap.epsilon:g}; spent so far: {spent}"
            )

    def _void(self, entry_id: str) -> None:
        shutil.rmtree(self.root / "tmp" / entry_id, ignore_errors=True)
        self.progress(entry_id).forget()
        self.log.append({"event": "void", "entry": entry_id})

    @contextmanager
    def _lease(self, key: str, cell: dict) -> Iterator[None]:
        """Hold the key's lease."""
        name = " ".join(f"{k}={v}" for k, v in cell.items() if v not in ("", None))
        try:
            handle = lease.take(self.root / "leases" / f"{key}.lock", f"waiting for another job that computes {name}")
        except lease.Unsupported:
            raise UserError(
                f"ledger.path: {self.root} is on a filesystem without file locks (flock), so two jobs could spend at "
                "once; put the ledger on another one (Lustre: mount it with the option `flock`)"
            ) from None
        with handle:
            yield

    # -- statements -------------------------------------------------------------------------------------------

    def statement(self, entry_ids: Sequence[str], *, delta: float, tuning: str) -> dict[str, Any]:
        """Return ``privacy.json``: a view of ledger entries as one guarantee, never written on its own.

        Args:
            entry_ids: the charged entries of one chain.
            delta: where epsilon is stated.
            tuning: how the settings were chosen, see statement.py.
        """
        entries, wanted = self.entries(), set(entry_ids)
        chain = [entry for entry in entries if entry.id in wanted]
        if len(chain) != len(wanted):
            raise UserError(
                f"{self.root}: this ledger lacks an entry that a released artefact names; restore it from a backup, "
                "or delete results/ and set privacy.release to a new label"
            )
        keys = {entry.key for entry in chain}
        others = [entry for entry in self.charged(entries) if entry.id not in wanted and entry.key not in keys]
        return statement.build(
            [entry.public() for entry in chain],
            delta=delta,
            tuning=tuning,
            aborted=[entry.public() for entry in entries if entry.state == "void" and entry.key in keys],
            charge_aborted=self.charge_aborted,
            others=None if self.cap is None else [entry.public() for entry in others],
            caveats=self.caveats,
        )


def _same(entry: Entry, facts: dict[str, Any]) -> bool:
    """Say whether an entry was reserved for these settings, inputs and code. In deploy its key does not tell."""
    return all(entry.facts[key] == facts[key] for key in ("inputs_digest", "code"))


def _caveats(private: Private) -> tuple[str, ...]:
    """Return what statements must say about a dataset's ids (rule 11)."""
    found = []
    if getattr(private.table, "rows", None) is not None:
        # Positions move when a record is removed, so they are for frozen files.
        found.append("private.table.rows selects by position: the guarantee holds for a frozen file only")
    if private.unit == "record" and getattr(private.table, "record_id", None) is None:
        found.append("ids come from content: a record whose content changes is another record (replace-one is void)")
    return tuple(found)
