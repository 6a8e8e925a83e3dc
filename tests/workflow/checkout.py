"""A copy of the checkout in which a test may run, edit, kill and delete things."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("Snakefile", "workflow", "src", "config", "envs", "slurm", "pyproject.toml", "Makefile")
MINI = "config/test.yaml"


class Checkout:
    """A working copy with its own results and ledger.

    Attributes:
        path: its folder.
    """

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def fresh(cls, path: Path) -> Checkout:
        """Copy the code, without results."""
        path.mkdir(parents=True)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, path / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                shutil.copy2(source, path / name)
        return cls(path)

    def clone(self, path: Path) -> Checkout:
        """Copy everything: code, results, Snakemake's records, ledger."""
        shutil.copytree(self.path, path, symlinks=True)
        return Checkout(path)

    def command(self, *arguments: str, config: str = MINI) -> list[str]:
        """Return a snakemake command; targets first, because several options take many values."""
        return [sys.executable, "-m", "snakemake", *arguments, "--configfile", config]

    def snakemake(self, *arguments: str, config: str = MINI, check: bool = True) -> subprocess.CompletedProcess:
        """Run snakemake here and return what it printed (both streams in ``stdout``)."""
        environment = {key: value for key, value in os.environ.items() if key != "DPMIXMIN_CONFIG"}
        done = subprocess.run(
            self.command(*arguments, config=config),
            cwd=self.path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        if check:
            assert done.returncode == 0, done.stdout[-5000:]
        return done

    def planned(self, *arguments: str, config: str = MINI) -> set[str]:
        """Return the rules that a dry run would run, without the targets that only collect files."""
        text = self.snakemake(*arguments, "-n", config=config).stdout
        table = re.search(r"^job +count\n[- ]+\n(.*?)^total", text, re.M | re.S)
        names = {line.split()[0] for line in table[1].strip().splitlines()} if table else set()
        return names - {"all"}

    def kill_when_ledger_has(self, events: int, *arguments: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Start snakemake with its jobs in one process group; kill all of them when the ledger has so many events."""
        process = subprocess.Popen(
            self.command(*arguments),
            cwd=self.path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 300
        while process.poll() is None and len(self.ledger_events()) < events and time.monotonic() < deadline:
            time.sleep(0.02)
        os.killpg(process.pid, how)
        process.wait()

    def edit(self, file: str, old: str, new: str) -> None:
        """Replace a text that must be there."""
        path = self.path / file
        text = path.read_text()
        assert old in text, f"{old!r} is not in {file}"
        path.write_text(text.replace(old, new, 1))

    def ledger_events(self, dataset: str = "mini_test") -> list[dict]:
        """Return the ledger's events in order."""
        return [
            json.loads(path.read_text())
            for path in sorted((self.path / ".ledger" / dataset / "entries").glob("*.json"))
        ]

    def committed(self) -> dict[str, int]:
        """Return how often each store key was committed."""
        events = self.ledger_events()
        keys = {event["entry"]: event["key"] for event in events if event["event"] == "reserved"}
        counts: dict[str, int] = {}
        for event in events:
            if event["event"] == "committed":
                counts[keys[event["entry"]]] = counts.get(keys[event["entry"]], 0) + 1
        return counts

    def files(self, *rooms: str) -> dict[str, bytes]:
        """Return path and content of every file in some rooms of the mini run."""
        base = self.path / "results" / "mini"
        return {
            str(path.relative_to(base)): path.read_bytes()
            for room in rooms
            for path in sorted((base / room).rglob("*"))
            if path.is_file()
        }
