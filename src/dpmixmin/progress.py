"""How far a long loop is: lines on standard error, and a live-status file for its owner.

Lines are whole lines without control characters: they are read in log files. Of a public loop there is one every ten
seconds, with an estimated end. Of a private loop there is one at every tenth of its steps, made of public parameters
alone (steps, and the epsilon of the steps so far): how long a step takes depends on the number of records, so neither
a time nor the moment of a line may enter a public log.

The live-status file is ``private/progress/{job}.json``, mode 0600 in a folder of mode 0700, where times may stand for
private loops too; ``python -m dpmixmin status`` reads it. It is written directly, because the usual writers refuse
after a mechanism was opened, and only after :func:`begin`, which the command line calls.

Nothing here raises: a full disk or a closed terminal ends no training. Of processes that train together
(``torchrun``), only rank 0 speaks and writes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dpmixmin import jobs
from dpmixmin.paths import PRIVATE, Paths

LINE_SECONDS = 10.0
FILE_SECONDS = 5.0
TENTHS_FROM = 100
"""Fewest steps of a private loop that has lines."""

_SAMPLES, _SAMPLE_SECONDS = 60, 2.0
"""The estimated end comes from the speed over the last so many samples, taken at least so far apart."""

_RULES = {
    "sources": "prepare_sources",
    "records": "prepare_records",
    "split": "assign_parts",
    "proxy": "train_proxy",
    "report": "make_report",
    "release": "write_bundle",
}
"""Stages whose rule, and so whose log, has another name."""

_rehearsals = 0
"""How many :func:`rehearsal` blocks this is in."""

_job: _Job | None = None
"""What this process works on, after :func:`begin`."""


class Steps:
    """How far a loop of known length is.

    Args:
        total: number of steps of the whole loop.
        private: whether the loop reads sensitive records; see above.
        epsilon: gives the epsilon of so many steps, from public parameters alone; called for lines only.
        start: finished steps of a loop that is gone on with.
        unit: what a step is called.
    """

    def __init__(
        self,
        total: int,
        *,
        private: bool = False,
        epsilon: Callable[[int], float] | None = None,
        start: int = 0,
        unit: str = "step",
    ):
        self.total, self.step, self.unit = total, start, unit
        self._private, self._epsilon = private, epsilon
        now = time.monotonic()
        self._samples = deque([(now, start)], maxlen=_SAMPLES)
        self._said = now
        if _job is not None:
            _job.loops.append(weakref.ref(self))

    def at(self, step: int, note: Callable[[], str] | None = None) -> None:
        """Say that so many steps are finished; to be called after every step.

        Args:
            step: finished steps of the whole loop.
            note: gives what a line of a public loop says beside; never called in a private one.
        """
        self.step = step
        with contextlib.suppress(Exception):
            now = time.monotonic()
            if now - self._samples[-1][0] >= _SAMPLE_SECONDS:
                self._samples.append((now, step))
            if self._private:
                if not _rehearsals and self.total >= TENTHS_FROM and step % (self.total // 10) == 0:
                    self._say_tenth()
            elif now - self._said >= LINE_SECONDS:
                self._said = now
                left = self.seconds_left()
                end = f"about {duration(left)} left" if left else ""
                _say([self._place(), note() if note else "", end])
            if _job is not None and now - _job.written >= FILE_SECONDS:
                _job.write(now)

    def seconds_left(self) -> float | None:
        """Return the estimated time to the end of the loop, or None before the first step."""
        (then, before), now = self._samples[0], time.monotonic()
        if self.step <= before or now <= then:
            return None
        return max(0, self.total - self.step) * (now - then) / (self.step - before)

    def _say_tenth(self) -> None:
        spent = None if self._epsilon is None else float(self._epsilon(self.step))
        _say([self._place(), "" if spent is None else f"epsilon of the steps so far {spent:.3g}"])
        if _job is not None and spent is not None:
            _job.epsilon, _job.epsilon_step = spent, self.step

    def _place(self) -> str:
        return f"  {self.unit} {self.step}/{self.total}"


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Let mechanisms that are tried on public records say nothing: the loop over the trials does."""
    global _rehearsals
    _rehearsals += 1
    try:
        yield
    finally:
        _rehearsals -= 1


def begin(folder: str | Path, job: str, cells: Collection = (), *, stage: str = "") -> None:
    """Start to keep the live-status file of this process.

    Args:
        folder: from :func:`folder_of`.
        job: its name, from :func:`job_of`.
        cells: cells that it makes; only their number is used.
        stage: name of the stage.
    """
    global _job
    with contextlib.suppress(Exception):
        if os.environ.get("RANK", "0") != "0":
            return
        _job = _Job(Path(folder), job, stage, len(cells), time.time())
        _job.write(time.monotonic())


def cell(name: str) -> None:
    """Say which cell of the job is being made from now on."""
    with contextlib.suppress(Exception):
        if _job is not None:
            _job.cell, _job.cell_number, _job.epsilon, _job.epsilon_step = name, _job.cell_number + 1, None, None
            _job.write(time.monotonic())


def end(*, finished: bool = True) -> None:
    """End the live-status file: removed after a job that finished, else marked, until the job starts again.

    Called by the command line; a process that ends otherwise marks its job as not finished.
    """
    global _job
    job, _job = _job, None
    with contextlib.suppress(Exception):
        if job is None or job.pid != os.getpid():
            return
        if finished:
            job.path.unlink(missing_ok=True)
        else:
            job.ended = time.time()
            job.write(time.monotonic())


def folder_of(paths: Paths) -> str:
    """Return the folder of a run's live-status files."""
    return f"{paths.base}/{PRIVATE}/progress"


def job_of(stage: str, options: Mapping) -> str:
    """Return the name of the job, and of its log, that a stage is when it is called with these options."""
    step = stage.removeprefix("text_")
    words = (options.get("task") or options.get("source") or "", options.get("method") or "")
    return jobs.name(_RULES.get(step, step), *words, options.get("part") or (1, 1))


def duration(seconds: float) -> str:
    """Write a duration for people: ``40 s``, ``3 min``, ``2.5 h``, ``3 days``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    if seconds < 36 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{round(seconds / 86400)} days"


def read(folder: str | Path) -> list[Live]:
    """Return the live-status files of a folder, by the name of their job; what is no such file is left out."""
    found = []
    for path in sorted(Path(folder).glob("[!.]*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Live(**json.loads(path.read_text(encoding="utf-8"))))
    return found


@dataclass(frozen=True)
class Live:
    """What a live-status file says. Times are seconds since 1970.

    Attributes:
        job: name of the job.
        stage: name of the stage.
        cells: number of cells that it makes.
        cell: folder of the one that it works on, or empty.
        cell_number: how many it has begun.
        loops: loops that are not at their end, the outermost first: ``unit``, ``step``, ``total``.
        epsilon: of the steps so far, at the last line that said it; or None.
        epsilon_step: the step of that line.
        started: start of the process.
        updated: time of this file.
        estimated_end: of the outermost loop, or None.
        ended: when the process ended without finishing, or None.
        host: machine.
        pid: process.
        slurm: id of its Slurm job, or None.
    """

    job: str
    stage: str
    cells: int
    cell: str
    cell_number: int
    loops: list[dict]
    epsilon: float | None
    epsilon_step: int | None
    started: float
    updated: float
    estimated_end: float | None
    ended: float | None
    host: str
    pid: int
    slurm: str | None


@dataclass
class _Job:
    """What the live-status file says about this process."""

    folder: Path
    name: str
    stage: str
    cells: int
    started: float
    cell: str = ""
    cell_number: int = 0
    epsilon: float | None = None
    epsilon_step: int | None = None
    ended: float | None = None
    pid: int = field(default_factory=os.getpid)
    written: float = 0.0
    loops: list[weakref.ref[Steps]] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.json"

    def write(self, now: float) -> None:
        """Replace the file (one rename). Not synchronised to the disk: after a power cut nobody is at work."""
        self.written = now
        self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        temporary = self.folder / f".{self.name}.{self.pid}"
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
                json.dump(asdict(self._content()), out, indent=1)
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def _content(self) -> Live:
        # A loop that was left early is gone; one inside another comes after it.
        self.loops = [loop for loop in self.loops if loop() is not None]
        loops = [loop for loop in (ref() for ref in self.loops) if loop is not None and loop.step < loop.total]
        left = loops[0].seconds_left() if loops else None
        return Live(
            job=self.name,
            stage=self.stage,
            cells=self.cells,
            cell=self.cell,
            cell_number=self.cell_number,
            loops=[{"unit": loop.unit, "step": loop.step, "total": loop.total} for loop in loops],
            epsilon=self.epsilon,
            epsilon_step=self.epsilon_step,
            started=self.started,
            updated=time.time(),
            estimated_end=None if left is None else time.time() + left,
            ended=self.ended,
            host=socket.gethostname(),
            pid=self.pid,
            slurm=os.environ.get("SLURM_JOB_ID"),
        )


def _say(parts: list[str]) -> None:
    """Print the parts that are not empty as one line."""
    line = ", ".join(part for part in parts if part)
    if sys.stderr is None or os.environ.get("RANK", "0") != "0":
        return
    sys.stderr.write("".join(sign if sign.isprintable() else "?" for sign in line) + "\n")
    sys.stderr.flush()


atexit.register(end, finished=False)
