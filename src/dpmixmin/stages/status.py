"""Show what is made, what runs now and how far it is, what waits, and what stopped.

Reads: which manifests exist, the live-status files in ``private/progress/`` (progress.py), and, where there is Slurm,
the user's own queue. Writes nothing, spends nothing, and opens no table. What it prints may hold the times and the
epsilon so far of private jobs: the files belong to the user who runs this (mode 0600), and so does the terminal.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dpmixmin import cells, jobs
from dpmixmin.artifacts import MANIFEST
from dpmixmin.config import Config
from dpmixmin.paths import Paths
from dpmixmin.progress import Live, duration, folder_of, read

SUMS = "SHA256SUMS"
"""The last file of a bundle, which has no manifest (release/bundle.py)."""

LOST_SECONDS = 600.0
"""A job on another machine, unknown to Slurm, is taken for stopped when its file is older."""
_SQUEUE_SECONDS = 5.0
_FIELDS = ("id", "state", "elapsed", "nodes", "reason", "comment", "name", "folder")
_FORMAT = "%A|%T|%M|%N|%r|%k|%j|%Z"
_LISTED = 20
"""Waiting jobs that are named; of more, only their number is said."""

_CLEAR = "\x1b[H\x1b[2J"


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument(
        "--watch", nargs="?", type=_seconds, const=5.0, metavar="SECONDS", help="show it anew, every 5 seconds"
    )
    parser.add_argument(
        "--ids", action="store_true", help="print only the Slurm ids of this checkout's jobs, for xargs -r scancel"
    )


def run(config: Config, args) -> None:
    """Print the state of a run on standard output."""
    if args.ids:
        for job in queue() or ():
            if job.ours:
                print(job.id)
        return
    if args.watch is None or not sys.stdout.isatty():
        print(text(config), flush=True)
        return
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            print(_CLEAR + text(config), flush=True)
            time.sleep(args.watch)


def text(config: Config) -> str:
    """Return the whole page."""
    paths = Paths(config.experiment)
    users, entries = queue(), read(folder_of(paths))
    queued = [job for job in users or () if job.ours]
    working = [entry for entry in entries if _works(entry, users)]
    stopped = [entry for entry in entries if entry not in working]
    table = jobs.jobs_of(config)
    # Nothing is left to do of a job whose cells are all there, or that Slurm has again.
    whole = {job.name for job in table if all(_whole(cell.folder(paths)) for cell in job.cells)}
    again = whole | {job.rule for job in queued}
    stopped = [entry for entry in stopped if entry.job not in again]
    sizes = {job.name: len(job.cells) for job in table}
    parts = [f"{config.experiment} ({config.mode})", *_table(made(config, paths))]
    parts += ["", "runs now", *(_running(working, queued, sizes, paths) or ["  nothing"])]
    waiting = [job for job in queued if job.waits]
    if waiting:
        parts += ["", "waits for Slurm", *_waiting(waiting, sizes)]
    if stopped:
        parts += ["", "stopped: run the same command again, what was saved is gone on from"]
        parts += [line for entry in stopped for line in _stopped(entry, paths)]
    return "\n".join(parts)


# -- what is made ---------------------------------------------------------------------------------------------


def made(config: Config, paths: Paths) -> list[tuple[str, int, int]]:
    """Return, for every kind of artefact, its name, how many are made, and how many there will be."""
    return [(name, sum(map(_whole, folders)), len(folders)) for name, folders in _folders(config, paths) if folders]


def _folders(config: Config, paths: Paths) -> Iterator[tuple[str, list[str]]]:
    if config.text:
        yield "sources", [paths.tokenizer(), *map(paths.text, config.sources)]
    else:
        yield "sources", [paths.source("sources"), *([paths.source("standins")] if config.public.standins else [])]
    yield "records", [paths.records()]
    yield "splits", [paths.split(seed) for seed in config.seeds]
    yield "proxies", [paths.proxy(name) for name in config.sources] if config.text else [paths.proxy()]
    yield "settings", [paths.settings("mixture"), *map(paths.finetune_settings, config.methods)]
    yield "predictions", [paths.predictions(seed) for seed in config.seeds]
    table = cells.cells_of(config)
    for stage in (*jobs.STAGES, "evaluation"):
        yield stage, [cell.folder(paths) for cell in cells.select(table, stage=stage)]
    audits = cells.audit_folders(config, paths)
    room = cells.audits_room(config)
    yield "audits", [*audits, paths.audit(room, "summary"), paths.audit(room, "gate")] if audits else []
    if config.mode == "deploy":
        yield "bundle", [paths.bundle()]
    else:
        yield "metrics", [paths.metrics(task) for task in config.task_names]
        yield "report", [paths.report()]


def _whole(folder: str) -> bool:
    """Whether an artefact is there: its last file is."""
    return any(os.path.exists(f"{folder}/{name}") for name in (MANIFEST, SUMS))


def _table(rows: list[tuple[str, int, int]]) -> list[str]:
    return [
        f"  {name:<12} {done:>5} of {total:<5}{'  done' if done == total else ''}".rstrip()
        for name, done, total in rows
    ]


# -- what runs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Queued:
    """One job in Slurm's queue.

    Attributes:
        id: what ``scancel`` takes.
        state: such as RUNNING or PENDING.
        elapsed: time since its start, as Slurm writes it.
        nodes: where it runs, or empty.
        reason: why it waits.
        rule: the rule, which is also the name of the log; empty where the site keeps no comments.
        ours: whether it is a job of this checkout's workflow. What only shares the folder is not: an interactive
            shell, Snakemake itself in a job.
    """

    id: str
    state: str
    elapsed: str
    nodes: str
    reason: str
    rule: str
    ours: bool

    @property
    def waits(self) -> bool:
        """Whether it has not started."""
        return self.state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD")


def queue() -> list[Queued] | None:
    """Return the user's jobs; None without Slurm, or where it does not answer."""
    try:
        command = ["squeue", "-h", "--me", "-o", _FORMAT]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SQUEUE_SECONDS, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    here, found = Path.cwd().resolve(), {}
    for line in done.stdout.splitlines():
        values = line.split("|", len(_FIELDS) - 1)
        if len(values) != len(_FIELDS):
            continue
        job = dict(zip(_FIELDS, map(str.strip, values), strict=True))
        ours = job["comment"].startswith("rule_") or job["name"].startswith("dpmixmin")
        ours = ours and Path(job["folder"]).resolve() == here
        if job["id"].isdigit():
            rule = job["comment"].removeprefix("rule_").split("_wildcards_")[0] if job["comment"] != "(null)" else ""
            found[job["id"]] = Queued(*(job[key] for key in _FIELDS[:5]), rule, ours)
    return list(found.values())


def _works(entry: Live, users: list[Queued] | None) -> bool:
    """Whether the process behind a live-status file still works."""
    if entry.ended is not None:
        return False
    if entry.host == socket.gethostname():
        return _is_ours(entry.pid)
    if entry.slurm and users is not None:
        return any(job.id == entry.slurm and not job.waits for job in users)
    return time.time() - entry.updated < LOST_SECONDS


def _is_ours(pid: int) -> bool:
    """Whether a process of this machine exists, and is one of this program where that can be seen."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True
    # Nothing, if it is dead and its parent has not noticed.
    return b"python" in command


def _running(working: list[Live], queued: list[Queued], sizes: dict[str, int], paths: Paths) -> list[str]:
    lines = []
    started = {job.id: job for job in queued if not job.waits}
    for entry in working:
        lines += [*_who(entry.job, started.pop(entry.slurm, None), entry), *_how_far(entry)]
        lines.append(f"    log: {paths.log(entry.job)}")
    for job in started.values():
        lines += [*_who(job.rule or "?", job, None), f"    {_cells(job, sizes)}has said nothing yet"]
        if job.rule:
            lines.append(f"    log: {paths.log(job.rule)}")
    return lines


def _who(name: str, job: Queued | None, entry: Live | None) -> list[str]:
    if job is not None:
        return [f"  {name}: Slurm job {job.id} on {job.nodes or '?'}, {job.state.lower()} for {job.elapsed}"]
    slurm = f"Slurm job {entry.slurm}" if entry.slurm else f"process {entry.pid}"
    return [f"  {name}: {slurm} on {entry.host}, for {duration(time.time() - entry.started)}"]


def _how_far(entry: Live) -> Iterator[str]:
    if entry.cell:
        yield f"    cell {entry.cell_number} of {max(entry.cells, entry.cell_number)}: {entry.cell}"
    said = [f"{loop['unit']} {loop['step']}/{loop['total']}" for loop in entry.loops]
    if entry.epsilon is not None:
        said.append(f"epsilon so far {entry.epsilon:.3g} (after step {entry.epsilon_step})")
    if entry.estimated_end is not None:
        left = entry.estimated_end - time.time()
        loop = entry.loops[0]["unit"]
        at = time.strftime("%a %H:%M", time.localtime(entry.estimated_end))
        said.append(f"last {loop} in about {duration(left)} ({at})" if left > 0 else f"last {loop} due")
    if said:
        yield f"    {', '.join(said)}"


def _cells(job: Queued, sizes: dict[str, int]) -> str:
    return f"{sizes[job.rule]} cell(s), " if job.rule in sizes else ""


def _waiting(waiting: list[Queued], sizes: dict[str, int]) -> list[str]:
    lines = [
        f"  {job.rule or '?'}: {_cells(job, sizes)}Slurm job {job.id}, {_because(job.reason)}"
        for job in waiting[:_LISTED]
    ]
    return [*lines, f"  and {len(waiting) - _LISTED} more"] if len(waiting) > _LISTED else lines


def _because(reason: str) -> str:
    return "just submitted" if reason in ("", "None") else f"because of {reason}"


def _stopped(entry: Live, paths: Paths) -> Iterator[str]:
    ago = duration(time.time() - (entry.ended or entry.updated))
    how = "ended before its work was done" if entry.ended else "was killed, or its machine was lost"
    yield f"  {entry.job}: {how}, {ago} ago on {entry.host}"
    yield from _how_far(replace(entry, estimated_end=None))
    yield f"    log: {paths.log(entry.job)}"


def _seconds(given: str) -> float:
    return min(max(1.0, float(given)), 3600.0)
