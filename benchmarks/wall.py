"""How much of a run's wall time is work: `python benchmarks/wall.py [CONFIG] [CORES]` runs it from nothing and says.

Prints the wall time of `snakemake all` on so many cores, the sum of the jobs' own wall times (Snakemake's benchmarks),
and their ratio: 1 would mean that no core ever waited. Everything is written to a temporary folder.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("Snakefile", "workflow", "src", "config", "envs", "pyproject.toml")


def main(config: str = "config/config.yaml", cores: str = "") -> None:
    wanted = int(cores or len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(prefix="dpmixmin-wall-") as folder:
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, Path(folder) / name)
        started = time.monotonic()
        command = [sys.executable, "-m", "snakemake", "all", f"-c{wanted}", "--quiet", "all", "--configfile", config]
        subprocess.run(command, cwd=folder, check=True)
        wall = time.monotonic() - started
        work = {}
        for path in sorted(Path(folder).glob("results/*/private/benchmarks/*.tsv")):
            with open(path, newline="") as handle:
                work[path.stem] = float(next(csv.DictReader(handle, delimiter="\t"))["s"])
    for name, seconds in sorted(work.items(), key=lambda item: -item[1])[:10]:
        print(f"{seconds:8.1f} s  {name}")
    total = sum(work.values())
    print(f"{len(work)} jobs, {total:.0f} s of jobs on {wanted} cores; wall {wall:.0f} s")
    print(f"wall / (jobs / cores) = {wall / (total / wanted):.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
