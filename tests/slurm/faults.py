"""A prepared experiment for the fault tests: two jobs of it are left to do, and a test kills what makes them.

One job reads sensitive records and spends (``finetune_three_or_eight_none``), one is public
(``pretrain_uniform``); both train for about fifteen seconds. Everything before them was made once, here, and
so was the public result, so that a disturbed run can be compared with an undisturbed one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from checkout import MINI, Checkout
from cluster import Cluster, Job
from cluster_checkout import ClusterCheckout

from dpmixmin import artifacts
from dpmixmin.privacy.ledger import entries_of
from dpmixmin.privacy.log import EventLog

PRIVATE = "finetune_three_or_eight_none"
PUBLIC = "pretrain_uniform"
STEPS = 3000
"""Of the private training."""

ALL = ("finetuned", "pretrained")
"""Targets; what comes after them is disturbed no differently."""

CELL = "released/finetuned/task=three_or_eight/method=none/mechanism=dp_sgd/eps=1/seed=0"
PRETRAINED = "public/pretrained/method=uniform/seed=0"

CONFIG = "config/faults.yaml"
_CHANGES = {
    "methods": ["none", "uniform"],
    "privacy": {"epsilons": [1], "delta": 1e-4},
    "pretrain": {"channels": [4, 8], "hidden": 8, "steps": 12000, "batch": 100},
    "mixture": {"settings": {"clip": 6, "steps": 20, "learning_rate": 1}},
    "finetune": {
        "settings": {"learning_rate": 0.5, "steps": STEPS, "batch": 100, "clip": 1},
        "grid": [{"methods": ["none"]}],
    },
    "audit": "none",
}

# Snakemake asks Slurm every second: how long the profile makes it wait is not what is tested here.
_IMPATIENT = """\
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
RemoteExecutor.next_seconds_between_status_checks = property(lambda self: 1, lambda self, value: None)
from snakemake.cli import main
main()
"""


class Experiment(ClusterCheckout):
    """A checkout with two jobs left to do."""

    def __init__(self, path: Path, cluster: Cluster):
        super().__init__(path, cluster)
        self._runs: list[Run] = []

    @classmethod
    def prepared(cls, path: Path, cluster: Cluster) -> Experiment:
        """Make everything before the two jobs, here; keep the public result in ``expected``."""
        copy = cls.fresh(path, cluster)
        text = yaml.safe_load((path / MINI).read_text())
        (path / CONFIG).write_text(yaml.safe_dump(text | _CHANGES))
        copy.snakemake("pretrained", "settings", "splits", "--quiet", "reason", "host", "progress", local=True)
        shutil.move(copy.base / PRETRAINED, path / "expected")
        return copy

    @classmethod
    def fresh(cls, path: Path, cluster: Cluster) -> Experiment:
        """Copy the code, without results."""
        return cls(Checkout.fresh(path).path, cluster)

    def clone(self, path: Path) -> Experiment:
        """Copy everything: code, results, Snakemake's records, ledger."""
        return Experiment(Checkout.clone(self, path).path, self.cluster)

    def command(self, *arguments: str, config: str = CONFIG, local: bool = False) -> list[str]:
        """Return a snakemake command for this experiment."""
        python, module, snakemake, *rest = super().command(*arguments, config=CONFIG, local=local)
        if local:
            return [python, module, snakemake, *rest]
        quick = ("--slurm-init-seconds-before-status-checks", "1", "--max-status-checks-per-second", "2")
        return [python, "-c", _IMPATIENT, *rest, *quick]

    @property
    def base(self) -> Path:
        """Folder of the results."""
        return self.path / "results" / "mini"

    # Runs.

    def begin(self, *arguments: str) -> Run:
        """Start ``snakemake --profile slurm`` for the two jobs; it goes on while the test does something else."""
        run = Run(self.command(*(arguments or ALL)), self)
        self._runs.append(run)
        return run

    def run(self, *arguments: str) -> Run:
        """Run ``snakemake --profile slurm`` to its end."""
        run = self.begin(*arguments)
        run.wait()
        return run

    def training(self, *rules: str) -> list[Job]:
        """Wait until the jobs of these rules are between two steps of their trainings, and return them."""

        def found() -> list[Job]:
            jobs = [self.cluster.job(rule, self.path) for rule in rules]
            return jobs if all(j and j.state == "RUNNING" and self._step(j) for j in jobs) else []

        return self.cluster.wait(found, 120, f"{', '.join(rules)} train")

    def _step(self, job: Job) -> int:
        """Return the step that a running job tells of in its live-status file, or 0."""
        try:
            status = json.loads((self.base / "private" / "progress" / f"{job.rule}.json").read_text())
        except (OSError, ValueError):
            return 0
        return max((loop["step"] for loop in status["loops"]), default=0) if status["slurm"] == str(job.id) else 0

    def worker(self, job: Job) -> int:
        """Return the process that trains in a job."""
        stage = job.rule.partition("_")[0].encode()

        def trains(pid: int) -> bool:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            return stage in words and b"snakemake" not in words

        (found,) = (pid for pid in self.cluster.pids_of(job.id) if trains(pid))
        return found

    @contextmanager
    def paused(self, *jobs: Job) -> Iterator[None]:
        """Pause the trainings of these jobs: what a test does meanwhile comes in their middle on any machine."""
        workers = [self.worker(job) for job in jobs]
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        """End what a failed test has left at work."""
        for run in self._runs:
            if run.status is None:
                os.killpg(run.process.pid, signal.SIGKILL)
                run.wait()
        for job in self.cluster.jobs(self.path):
            self.cluster.scancel(job.id)

    def jobs_end(self) -> None:
        """Wait until no job of this checkout waits or runs."""
        self.cluster.wait(lambda: all(job.ended for job in self.cluster.jobs(self.path)), 90, "the jobs have ended")

    # What there is.

    def log(self, rule: str) -> str:
        """Return the log of the last run of a stage."""
        return (self.base / "logs" / f"{rule}.log").read_text()

    def printed(self, job: Job) -> str:
        """Return what a job has printed, Snakemake's words on the node included."""
        path = self.path / "logs" / "slurm" / f"rule_{job.rule}" / f"{job.id}.log"
        return path.read_text() if path.exists() else ""

    @property
    def store(self) -> Path:
        """Folder of the dataset's ledger."""
        ledgers = yaml.safe_load((self.path / CONFIG).read_text()).get("ledger", {}).get("path", ".ledger")
        return self.path / ledgers / "mini_test"

    def ledger_events(self, dataset: str = "mini_test") -> list[dict]:
        """Return the ledger's events in order; reading them checks the hash chain."""
        return EventLog(self.store / "entries").read()

    def share_ledger(self, folder: Path) -> None:
        """Keep the ledger elsewhere, by its absolute path."""
        text = yaml.safe_load((self.path / CONFIG).read_text())
        (self.path / CONFIG).write_text(yaml.safe_dump(text | {"ledger": {"path": str(folder)}}))

    def saved_steps(self) -> int:
        """Return how many steps the saved state of the private training has, or 0."""
        return max((int(path.name[5:]) for path in self.store.glob("tmp/*.state/step=*")), default=0)

    def states(self) -> list[str]:
        """Return the states of the private training's entries, oldest first."""
        return [entry.state for entry in entries_of(self.ledger_events())]

    def check_ledger(self) -> None:
        """Check that the release was charged once, and that nothing is left under construction.

        Reading the log checks its hash chain. A reservation that is neither committed nor void is an error here.
        """
        entries = entries_of(self.ledger_events())
        assert [entry.state for entry in entries] == ["committed"]
        assert list(self.committed().values()) == [1]
        assert {path.name for path in (self.store / "store").iterdir()} == {entry.key for entry in entries}
        assert list((self.store / "tmp").iterdir()) == []

    def check_release(self) -> None:
        """Check that what is published is what the ledger has, of exactly the reserved steps."""
        (entry,) = (event for event in self.ledger_events() if event["event"] == "reserved")
        stored, published = self.store / "store" / entry["key"], self.base / CELL
        for path in stored.iterdir():
            assert (published / path.name).read_bytes() == path.read_bytes(), path.name
        statement = json.loads((published / "privacy.json").read_text())
        assert [e["entry"] for e in statement["entries"]] == [entry["entry"]]
        assert statement["aborted"] == []
        assert [event["steps"] for event in entry["events"]] == [STEPS]

    def check_whole(self) -> None:
        """Check that every artefact that has a manifest is what its manifest says."""
        for manifest in self.base.rglob("manifest.json"):
            artifacts.verify(manifest.parent)

    def everything(self) -> dict[Path, bytes]:
        """Return all results and the ledger."""
        found = [*self.base.rglob("*"), *self.store.rglob("*")]
        return {path: path.read_bytes() for path in found if path.is_file()}

    def check(self) -> None:
        """Check that the experiment is as if nothing had happened, and that nothing is left to do."""
        self.check_ledger()
        self.check_release()
        self.check_whole()
        for path in (self.path / "expected").iterdir():
            assert (self.base / PRETRAINED / path.name).read_bytes() == path.read_bytes(), path.name
        assert self.planned(*ALL) == set()


class Run:
    """A snakemake that was started.

    Attributes:
        process: it.
        seconds: how long it took, after :meth:`wait`.
    """

    def __init__(self, command: list[str], experiment: Experiment):
        self._file = experiment.path.with_name(f"{experiment.path.name}-{time.time_ns()}.txt")
        self._started, self.seconds = time.monotonic(), 0.0
        with open(self._file, "w") as out:
            self.process = subprocess.Popen(
                command,
                cwd=experiment.path,
                env=experiment.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Whoever started the tests in the background made them ignore Ctrl-C.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._file.read_text()

    def wait(self, seconds: float = 180) -> int:
        """Wait for its end and return its exit status."""
        status = self.process.wait(seconds)
        self.seconds = time.monotonic() - self._started
        return status

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Send it a signal, and to no process that it started."""
        os.kill(self.process.pid, how)

    @property
    def status(self) -> int | None:
        """Exit status, or None while it works."""
        return self.process.poll()
