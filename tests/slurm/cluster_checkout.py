"""A copy of the checkout whose runs go to a cluster: `snakemake … --profile slurm`, with the profile as it is shipped.

Only waiting is shortened, on the command line. What the nodes need, the jobs bring: they call the Python that runs
Snakemake by its path, and find the code in the copy.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from checkout import MINI, Checkout
from cluster import Cluster

FIRST_LOOK = 8
"""Seconds until Snakemake looks at its jobs; then 18, 28, … more, until one has succeeded. Most jobs here take 7 s."""

OVERRIDES = (
    *("--slurm-status-command", "squeue"),  # this cluster keeps no accounts
    *("--slurm-init-seconds-before-status-checks", str(FIRST_LOOK)),
    *("--max-status-checks-per-second", "1"),
    *("--max-jobs-per-timespan", "20/1s"),
    *("--latency-wait", "15"),
    *("--jobs", "6"),
)


class ClusterCheckout(Checkout):
    """A working copy with its own results and ledger; `snakemake` submits to the cluster and waits.

    Attributes:
        path: its folder.
        cluster: where its jobs go; `cluster.jobs(copy.path)` are those of this copy.
        site: variables of the site, as a user would set them (DPMIXMIN_GRES and so on).
    """

    def __init__(self, path: Path, cluster: Cluster, **site: str):
        super().__init__(path)
        self.cluster, self.site = cluster, site

    @classmethod
    def fresh(cls, path: Path, cluster: Cluster, **site: str) -> ClusterCheckout:
        """Copy the code, without results."""
        return cls(Checkout.fresh(path).path, cluster, **site)

    def clone(self, path: Path) -> ClusterCheckout:
        """Copy everything: code, results, Snakemake's records, ledger."""
        return ClusterCheckout(super().clone(path).path, self.cluster, **self.site)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a run: the cluster's, without what this machine's user has set for another run or site."""
        inherited = self.cluster.environment
        mark = {key: value for key, value in inherited.items() if key == "DPMIXMIN_CLUSTER"}
        return {k: v for k, v in inherited.items() if not k.startswith("DPMIXMIN_")} | mark | self.site

    @property
    def said(self) -> str:
        """What the last run has printed so far."""
        path = self.path / "snakemake.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def command(self, *arguments: str, config: str = MINI, local: bool = False) -> list[str]:
        """Return a snakemake command; what a test gives wins over the overrides. Targets first, as everywhere."""
        where = ("-c2",) if local else ("--profile", "slurm", *OVERRIDES)
        return super().command(*where, *arguments, config=config)

    def snakemake(
        self, *arguments: str, config: str = MINI, check: bool = True, local: bool = False, timeout: float = 900
    ) -> subprocess.CompletedProcess:
        """Run snakemake on the cluster (or here, with ``local``) and return what it printed (both in ``stdout``)."""
        process = self.start(*arguments, config=config, local=local)
        try:
            process.wait(timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for job in self.cluster.jobs(self.path):
                self.cluster.scancel(job.id)
            error.add_note(f"{self.said[-3000:]}\n{self.cluster.log_tail()}")
            raise
        if check:
            assert process.returncode == 0, f"{self.said[-6000:]}\n{self.cluster.log_tail()}"
        return subprocess.CompletedProcess(process.args, process.returncode, self.said)

    def start(self, *arguments: str, config: str = MINI, local: bool = False) -> subprocess.Popen:
        """Start snakemake and do not wait; what it prints is in ``said``.

        It leads a process group of its own: ``os.killpg(process.pid, how)`` reaches it and its local jobs.
        """
        with open(self.path / "snakemake.out", "w") as out:
            return subprocess.Popen(
                self.command(*arguments, config=config, local=local),
                cwd=self.path,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
