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

Two modes. *Study* (benchmark data): every cell is stated as if it were the only release, an edit of code or config
makes a new one, and uncharged measurements are allowed and noted. *Deploy*: nothing is uncharged, a cap holds over
everything that was ever charged, and a release whose inputs changed needs a new label.

Rules kept here (docs/rules.md): 5, 18, 19, 21, 23, 26.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpmixmin import artifacts
from dpmixmin.config import Config
from dpmixmin.errors import UserError
from dpmixmin.paths import PRIVATE, STUDY, checkout
from dpmixmin.privacy import statement
from dpmixmin.privacy.access import Access, Progress, Release
from dpmixmin.privacy.composition import Touch
from dpmixmin.privacy.events import to_json
from dpmixmin.privacy.keys import Keys, bind
from dpmixmin.privacy.log import EventLog, link_new
from dpmixmin.privacy.mechanisms import Spec
from dpmixmin.privacy.totals import total
from dpmixmin.sections import Private

PARTS = ("mixing", "finetune", "validation", "test")
"""The atoms: disjoint parts of the units under one split key."""


# -- purposes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Derive:
    """Private to private: free; the output stays in ``private/``."""


@dataclass(frozen=True)
class Study:
    """A non-private measurement on benchmark data: uncharged, output only in ``study/``, noted in the ledger.

    Attributes:
        what: what is measured, for the note.
    """

    what: str


@dataclass(frozen=True)
class Mechanism:
    """A charged release.

    Attributes:
        spec: the mechanism's public parameters.
        cell: coordinates of the cell (task, method, learner, mechanism, epsilon, seed, chain).
        inputs: digests of the non-private inputs (settings, proxies, weights, checkpoint).
        made: how the private inputs were made (public config and code), never their content.
        code: digest of the stage's code.
        private_randomness: False under ``insecure_seed``: the output is stamped NOT PRIVATE.
        total_variation: distance of the whole run's noise from its ideal law; it is added to delta.
    """

    spec: Spec
    cell: dict[str, Any]
    inputs: dict[str, str]
    made: dict[str, Any]
    code: str
    private_randomness: bool = True
    total_variation: float = 0.0


@dataclass(frozen=True)
class Cap:
    """What a deployment may spend on a dataset, over everything that was ever charged."""

    epsilon: float
    delta: float


# -- entries --------------------------------------------------------------------------------------------------


@dataclass
class Entry:
    """One release as the log tells it.

    Attributes:
        id: random id.
        key: store key.
        state: reserved, committed or void.
        facts: the reserve event (cell, parts, split, spec, label, …).
    """

    id: str
    key: str
    state: str
    facts: dict[str, Any]

    def touch(self) -> Touch:
        """Return what the composition needs."""
        return statement.touch(self.facts)

    def public(self) -> dict[str, Any]:
        """Return what a statement shows."""
        return statement.public_facts(self.facts, self.id)

    def name(self) -> str:
        """Return a short name for messages."""
        cell = {key: value for key, value in self.facts["cell"].items() if value not in ("", None)}
        wanted = ("stage", "task", "method", "mechanism", "epsilon", "seed")
        words = " ".join(f"{key}={cell[key]}" for key in wanted if key in cell)
        return f"{words} (release {self.facts['label']})"


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
        self.log = EventLog(self.root / "entries")
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
        return _entries(self.log.read())

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
            if found is not None:
                self._check_unchanged(found, facts)
            done = found is not None and found.state == "committed"
            entry_id = found.id if found else self._reserve(key, facts)
            artifacts.restrict(set())
            release = Release(frozenset(parts), self, entry_id, key, done, split)
            try:
                yield release
            except BaseException as error:
                # Interrupted between two steps of a long mechanism: the next run goes on from its state.
                resumable = isinstance(error, KeyboardInterrupt | SystemExit) and release.progress.exists()
                if not release.committed and not (self.root / "store" / key).exists() and not resumable:
                    self._void(entry_id)
                raise
            finally:
                release.is_open = False
            if not release.committed:
                self._void(entry_id)
                raise RuntimeError("a mechanism was opened and never committed")

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
        before = self.charged(_entries(events))
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
        """Hold the key's lease; the kernel frees it when its owner dies, however it dies."""
        with open(self.root / "leases" / f"{key}.lock", "w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                name = " ".join(f"{k}={v}" for k, v in cell.items() if v not in ("", None))
                print(f"waiting for another job that computes {name}", file=sys.stderr, flush=True)
                fcntl.flock(handle, fcntl.LOCK_EX)
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


def _caveats(private: Private) -> tuple[str, ...]:
    """Return what statements must say about a dataset's ids (rule 11)."""
    found = []
    if getattr(private.table, "rows", None) is not None:
        # Positions move when a record is removed, so they are for frozen files.
        found.append("private.table.rows selects by position: the guarantee holds for a frozen file only")
    if private.unit == "record" and getattr(private.table, "record_id", None) is None:
        found.append("ids come from content: a record whose content changes is another record (replace-one is void)")
    return tuple(found)


def _entries(events: list[dict[str, Any]]) -> list[Entry]:
    entries: dict[str, Entry] = {}
    for event in events:
        if event["event"] == "reserved":
            entries[event["entry"]] = Entry(event["entry"], event["key"], "reserved", event)
        elif "entry" in event:
            entries[event["entry"]].state = event["event"]
    return list(entries.values())
