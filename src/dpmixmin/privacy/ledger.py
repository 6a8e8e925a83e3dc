"""The ledger of one sensitive dataset, and the only door to its records.

Layout, outside ``results/`` (mode 0700, never a Snakemake input or output)::

    {ledger.path}/{dataset}/
      dataset.json          random dataset id
      entries/000001.json   the log (see log.py): one file per event, each naming the hash of the one before
      leases/KEY.lock       held (flock) by the process that works on a release
      store/KEY/            write-once outputs; the rename into here is a release's commit point
      tmp/                  outputs under construction

An entry goes ``reserved -> committed`` or ``reserved -> void``. A process first takes the key's lease. If the entry is
committed, the stored output is re-published: nothing is drawn, nothing is charged. If it is reserved and we hold the
lease, its owner is dead: an output in the store commits it, else it becomes void (listed as an aborted attempt) and a
new entry is reserved, with fresh noise.

Rules kept here (docs/rules.md): 5, 18, 19, 26.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpmixmin import artifacts
from dpmixmin.config import Config
from dpmixmin.errors import UserError
from dpmixmin.paths import PRIVATE, STUDY, checkout
from dpmixmin.privacy.accounting import Event
from dpmixmin.privacy.composition import Touch, guarantee
from dpmixmin.privacy.log import EventLog, fsync_folder, link_new
from dpmixmin.privacy.mechanisms import MechanismSpec

PARTS = ("mixing", "finetune", "validation", "test")
"""The atoms: disjoint parts of the units under one split key."""


# -- purposes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Derive:
    """Private to private: free; the output stays in ``private/``."""


@dataclass(frozen=True)
class Study:
    """A non-private measurement on benchmark data: uncharged, output only in ``study/``."""


@dataclass(frozen=True)
class Mechanism:
    """A charged release.

    Attributes:
        spec: the mechanism's public parameters.
        cell: coordinates of the cell (task, method, learner, mechanism, epsilon, seed, chain).
        inputs: digests of the non-private inputs (settings, proxies, weights, checkpoint).
        made: how the private inputs were made (public config), never their content.
        code: digest of the stage's code (study mode).
        private_randomness: False under ``insecure_seed``: the output is stamped NOT PRIVATE.
        total_variation: distance of the whole run's noise from its ideal law; it is added to delta.
    """

    spec: MechanismSpec
    cell: dict[str, Any]
    inputs: dict[str, str]
    made: dict[str, Any]
    code: str
    private_randomness: bool = True
    total_variation: float = 0.0


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
        event = Event(**self.facts["event_spec"])
        return Touch(event, frozenset(self.facts["parts"]), self.facts["split"])


class Ledger:
    """The ledger of one sensitive dataset.

    Args:
        root: folder of all ledgers.
        dataset: the dataset's name.
        label: release label of new entries.
        charge_aborted: count void entries in statements too.
        caveats: what else every statement must say is not covered.
    """

    def __init__(
        self,
        root: str | Path,
        dataset: str,
        *,
        label: str = "first",
        charge_aborted: bool = False,
        caveats: tuple[str, ...] = (),
    ):
        self.root, self.caveats = Path(root) / dataset, caveats
        self.label, self.charge_aborted = label, charge_aborted
        for folder in (Path(root), self.root, *(self.root / n for n in ("entries", "leases", "store", "tmp"))):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.log = EventLog(self.root / "entries")
        identity = self.root / "dataset.json"
        link_new(identity, {"dataset": dataset, "id": uuid.uuid4().hex})
        self.dataset_id = json.loads(identity.read_text())["id"]

    @classmethod
    def of(cls, config: Config) -> Ledger:
        """Return the ledger that a config names; relative paths start at the checkout."""
        root = Path(config.ledger.path).expanduser()
        root = root if root.is_absolute() else checkout() / root
        by_position = config.private.table.kind == "idx" and config.private.table.rows is not None
        return cls(
            root,
            config.private.name,
            label=config.privacy.release,
            charge_aborted=config.privacy.charge_aborted,
            # Rule 11: positions move when a record is removed, so they are for frozen files, and stamped.
            caveats=("private.table.rows selects by position: the guarantee holds for a frozen file only",)
            if by_position
            else (),
        )

    def entries(self) -> list[Entry]:
        """Return every entry in the order of reservation."""
        entries: dict[str, Entry] = {}
        for event in self.log.read():
            if event["event"] == "reserved":
                entries[event["entry"]] = Entry(event["entry"], event["key"], "reserved", event)
            else:
                entries[event["entry"]].state = event["event"]
        return list(entries.values())

    # -- opening ----------------------------------------------------------------------------------------------

    @contextmanager
    def open(
        self, parts: Sequence[str], purpose: Derive | Study | Mechanism, split: str = ""
    ) -> Iterator[Access | Release]:
        """Open private tables for one purpose: the only way to read them.

        Args:
            parts: atoms that the reader may see; all others are filtered out of every table.
            purpose: :class:`Derive`, :class:`Study` or :class:`Mechanism` (reserved here, before anything is read).
            split: id of the split key that defines the parts; needed for mechanisms.

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
        artifacts.restrict({PRIVATE} if isinstance(purpose, Derive) else {PRIVATE, STUDY})
        access = Access(frozenset(parts))
        try:
            yield access
        finally:
            access.is_open = False

    @contextmanager
    def _release(self, parts: tuple[str, ...], purpose: Mechanism, split: str) -> Iterator[Release]:
        if not split:
            raise ValueError("a mechanism needs the id of its split key")
        identity = {
            "dataset": self.dataset_id,
            "split": split,
            "parts": sorted(parts),
            "cell": purpose.cell,
            "spec": purpose.spec.digest(),
            "inputs": purpose.inputs,
            "made": artifacts.digest(purpose.made),
            "label": self.label,
            "code": purpose.code,
            "private_randomness": purpose.private_randomness,
        }
        key = artifacts.digest(identity)[:32]
        with self._lease(key, purpose.cell):
            mine = [entry for entry in self.entries() if entry.key == key]
            stored = self.root / "store" / key
            for entry in mine:
                if entry.state == "reserved":
                    # We hold the lease, so its owner is dead. The rename into the store was the commit point.
                    if stored.exists():
                        self.log.append({"event": "committed", "entry": entry.id})
                    else:
                        self._void(entry.id)
            done = any(entry.state == "committed" for entry in self.entries() if entry.key == key)
            entry_id = next((e.id for e in self.entries() if e.key == key and e.state == "committed"), "")
            if not done:
                entry_id = uuid.uuid4().hex
                event = purpose.spec.event()
                self.log.append(
                    {
                        "event": "reserved",
                        "entry": entry_id,
                        "key": key,
                        **identity,
                        "parts": sorted(parts),
                        "spec": purpose.spec.describe(),
                        "event_spec": {
                            "noise_multiplier": event.noise_multiplier,
                            "sampling_rate": event.sampling_rate,
                            "steps": event.steps,
                        },
                        "total_variation": purpose.total_variation,
                        "process": {"pid": os.getpid(), "host": os.uname().nodename},
                    }
                )
            artifacts.restrict(set())
            release = Release(frozenset(parts), self, entry_id, key, done)
            try:
                yield release
            except BaseException:
                if not release.committed and not stored.exists():
                    self._void(entry_id)
                raise
            finally:
                release.is_open = False
            if not release.committed:
                self._void(entry_id)
                raise RuntimeError("a mechanism was opened and never committed")

    def _void(self, entry_id: str) -> None:
        shutil.rmtree(self.root / "tmp" / entry_id, ignore_errors=True)
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
            tuning: how the settings were chosen: public_standin or user_declared.
        """
        chain = [entry for entry in self.entries() if entry.id in set(entry_ids)]
        if len(chain) != len(set(entry_ids)):
            raise UserError(
                f"{self.root}: this ledger lacks an entry that a released artefact names; restore it from a backup, "
                "or delete results/ and set privacy.release to a new label"
            )
        aborted = [
            entry
            for entry in self.entries()
            if entry.state == "void" and any(entry.key == charged.key for charged in chain)
        ]
        touches = [entry.touch() for entry in chain + (aborted if self.charge_aborted else [])]
        total = guarantee(touches, delta)
        first = chain[0].facts["spec"] if chain else {}
        variation = sum(entry.facts["total_variation"] for entry in chain)
        private = all(entry.facts["private_randomness"] for entry in chain)
        return {
            "stamp": "private" if private else "NOT PRIVATE: the noise came from a test seed",
            "guarantee": {
                "epsilon": total["epsilon"],
                # A law within TV of an (epsilon, delta)-DP one is (epsilon, delta + (1 + e^epsilon) TV)-DP.
                "delta": total["delta"] + (1 + math.exp(total["epsilon"])) * variation,
                "unit": first.get("unit"),
                "adjacency": first.get("adjacency"),
                "composition": total["composition"],
            },
            "stated_as": "only release",
            "tuning": tuning,
            "entries": [
                {
                    "entry": entry.id,
                    "cell": entry.facts["cell"],
                    "parts": entry.facts["parts"],
                    "split": entry.facts["split"],
                    "release": entry.facts["label"],
                    **entry.facts["spec"],
                    "sampler_total_variation": entry.facts["total_variation"],
                }
                for entry in chain
            ],
            "aborted_attempts": len(aborted),
            "aborted_attempts_charged": self.charge_aborted,
            "curve": total["curve"],
            "not_covered": [
                "other releases from the same dataset (other tasks, seeds and epsilons compose)",
                "test metrics and everything else in study/",
                "floating-point effects of float32 gradients; timing",
                *self.caveats,
            ],
        }


TUNING = ("none", "public_standin", "user_declared", "private_uncharged")
"""How settings were chosen, from nothing to declare to the worst."""


def least_public(*tunings: str) -> str:
    """Return the worst of several ways in which a chain's settings were chosen."""
    return max(tunings, key=TUNING.index)


# -- what a reader holds --------------------------------------------------------------------------------------


@dataclass
class Access:
    """An open door to private tables, limited to some parts."""

    parts: frozenset[str]
    is_open: bool = field(default=True, init=False)

    def table(self, folder: str | Path, name: str):
        """Read a private table; rows of other parts are filtered out where the table has a part column.

        Args:
            folder: an artefact in ``private/``.
            name: file name without ``.parquet``.

        Returns:
            ``pyarrow.Table``.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        self._check()
        artifacts.verify(folder)
        table = artifacts.read_table(Path(folder) / f"{name}.parquet", access=self)
        if "part" in table.column_names:
            table = table.filter(pc.is_in(table["part"], value_set=pa.array(sorted(self.parts), pa.string())))
        return table

    def parent(self, folder: str | Path) -> dict[str, str]:
        """Name a private parent for a manifest: by its random artefact id only."""
        self._check()
        return {"path": str(folder), "artifact": artifacts.verify(folder)["artifact"]}

    def _check(self) -> None:
        if not self.is_open:
            raise PermissionError("this access is closed")


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

    def stored(self, name: str) -> bytes:
        """Return one file of the committed output."""
        return (self.ledger.root / "store" / self.key / name).read_bytes()

    def publish(self, folder: str | Path, views: dict[str, bytes]) -> None:
        """Copy the committed output to its place in the run.

        Args:
            folder: the artefact's folder.
            views: files that are views of the ledger (``privacy.json``), written beside the copies.
        """
        if not self.committed:
            raise RuntimeError("commit first")
        artifacts.republish(self.ledger.root / "store" / self.key, folder, views)
