"""The processes of a test cluster: found by a mark in their variables, and ended without hitting another's."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

MARK = "DPMIXMIN_CLUSTER"
"""The variable that every process of a cluster carries; its value is the name of the cluster's folder."""


def alive(pid_file: Path, name: str) -> int | None:
    """Return the process of a pid file if it works and has this name: numbers are used again."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        pid = int(pid_file.read_text())
        if name_of(pid) == name:
            return pid
    return None


def kill(pid_file: Path, name: str, how: signal.Signals) -> None:
    """Send a signal to the process of a pid file, and SIGKILL where it still works after five seconds."""
    for number in (how, signal.SIGKILL):
        if pid := alive(pid_file, name):
            kill_all([pid], number)


def name_of(pid: int) -> str:
    """Return a process's name; empty if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    inside, after = text[text.index("(") + 1 :].rsplit(")", 1)
    return "" if after.split()[0] in "ZX" else inside


def kill_all(pids: list[int], how: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to processes and wait until they have ended, at most five seconds."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)
    deadline = time.monotonic() + 5
    while any(name_of(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)


def _processes() -> list[Path]:
    """Return the folders that describe all processes but this one."""
    return [p for p in Path("/proc").iterdir() if p.name.isdigit() and int(p.name) != os.getpid()]


def marked(folder: Path) -> list[tuple[int, dict[str, str]]]:
    """Return the processes that carry a cluster's mark, and their variables."""
    found = []
    for process in _processes():
        with contextlib.suppress(OSError):
            text = (process / "environ").read_bytes().decode(errors="replace")
            variables = dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
            if variables.get(MARK) == folder.name:
                found.append((int(process.name), variables))
    return found


def step_daemons(folder: Path) -> list[tuple[int, int]]:
    """Return job and process of every slurmstepd of a cluster: they overwrite their variables, but not their place."""
    found = []
    for process in _processes():
        with contextlib.suppress(OSError):
            title = re.match(r"slurmstepd: \[(\d+)\.", (process / "cmdline").read_text(errors="replace"))
            if title and (process / "cwd").readlink().is_relative_to(folder):
                found.append((int(title[1]), int(process.name)))
    return found
