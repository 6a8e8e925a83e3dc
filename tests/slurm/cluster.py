"""A private Slurm on this machine, for tests: a controller, a node of CPUs and a node with two GPUs that are none.

Everything lies in one temporary folder, listens on the loopback address at free ports, and ends with `Cluster.stop`.
It needs root (the daemons start jobs as their owners) and Debian's packages, but neither systemd nor accounting, and
it leaves `/etc/slurm` and other clusters alone: several can work at once. What was left by a test process that was
killed is ended by the next start.

    with Cluster() as cluster:
        job = cluster.submit("sleep 60", "--comment=rule_sleep")
        cluster.wait(lambda: cluster.job(job).state == "RUNNING", 20, "the job runs")
        cluster.kill_controller()
        cluster.start_controller()
        cluster.scancel("sleep")
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import IO

from processes import MARK, alive, kill, kill_all, marked, step_daemons

PACKAGES = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client"}
"""Programs, and Debian's packages that bring them."""

NODES = {"cn1": "cpu", "gn1": "gpu"}
"""Nodes, and the partition of each; `gn1` has two GPUs."""

_PREFIX = "dpmixmin-slurm-"
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")

# KillWait is the time between SIGTERM and SIGKILL, at the end of the walltime and on scancel: a job saves its state in
# it. CPUs and memory may be more than the machine has (config_overrides), so that several jobs run on two cores.
# A job that uses more memory than it asked for is killed. Finished jobs stay in the list for a day.
_CONFIGURATION = Template("""\
ClusterName=$name
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$controller_port
SlurmdPort=$cn1_port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/run/munge.socket
CredType=cred/munge
CommunicationParameters=NoAddrCache,NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd.%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd.%n.log
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=30,sched_interval=1,default_queue_depth=1000
GresTypes=gpu
DefMemPerCPU=500
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MinJobAge=86400
KillWait=$kill_wait
InactiveLimit=0
SlurmctldTimeout=10
SlurmdTimeout=$node_timeout
MessageTimeout=10
UnkillableStepTimeout=20
NodeName=cn1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$cn1_port CPUs=$cpus RealMemory=$memory_mb
NodeName=gn1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$gn1_port CPUs=$cpus RealMemory=$memory_mb Gres=gpu:2
PartitionName=cpu Nodes=cn1 Default=YES MaxTime=INFINITE State=UP
PartitionName=gpu Nodes=gn1 MaxTime=INFINITE State=UP
""")

# A GPU must be a device file; these two exist everywhere, and nobody opens them as GPUs.
_GPUS = """\
NodeName=gn1 Name=gpu File=/dev/null
NodeName=gn1 Name=gpu File=/dev/zero
"""


class UnavailableError(Exception):
    """Why there can be no cluster here, in words for the person who runs the tests."""


@dataclass(frozen=True)
class Job:
    """What the controller knows about a job.

    Attributes:
        id: its number.
        state: in Slurm's words, such as PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL.
        rule: Snakemake's rule, from the job's comment.
        node: where it runs or ran; empty before.
        partition: cpu or gpu.
        name: of the job: Snakemake gives all jobs of one run the same.
        reason: why it waits, or how it ended.
        folder: where it was started.
    """

    id: int
    state: str
    rule: str
    node: str
    partition: str
    name: str
    reason: str
    folder: str

    @property
    def ended(self) -> bool:
        """Whether it will do nothing more."""
        return self.state in _ENDED


class Cluster:
    """One controller and two nodes, ``cn1`` (partition cpu) and ``gn1`` (partition gpu, two fake GPUs).

    Args:
        cpus: CPUs of each node; more than the machine has is fine.
        memory_mb: memory of each node; more than the machine has is fine.
        kill_wait: seconds between SIGTERM and SIGKILL.
        node_timeout: seconds without an answer after which a node is down and its jobs have failed (NODE_FAIL).

    Attributes:
        folder: configuration, states and logs; None before the start.
    """

    def __init__(self, *, cpus: int = 4, memory_mb: int = 64000, kill_wait: int = 10, node_timeout: int = 20):
        self.folder: Path | None = None
        self._settings = {"cpus": cpus, "memory_mb": memory_mb, "kill_wait": kill_wait, "node_timeout": node_timeout}

    # Start and stop.

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *exception) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything and wait until both nodes are idle: one to three seconds; stopping takes about three.

        Raises:
            UnavailableError: packages or rights are missing.
            TimeoutError: the nodes did not come up; the text has the ends of the logs.
        """
        missing = [package for program, package in PACKAGES.items() if shutil.which(program, path=_PATH) is None]
        if missing:
            raise UnavailableError(f"Slurm is not installed: apt-get install {' '.join(missing)}")
        if os.geteuid() != 0:
            raise UnavailableError("needs root: Slurm's daemons start jobs in their owners' names")
        _end_leftovers()
        self.folder, self._owner = _new_folder()
        try:
            self._configure()
            self._run("munged", *self._munge())
            self.start_controller()
            for node in NODES:
                self.start_node_daemon(node)
            self.wait(lambda: set(self.nodes().values()) == {"idle"}, 60, "both nodes are idle")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End jobs, daemons and what else was started here, and remove the folder."""
        if self.folder is None:
            return
        _end(self.folder)
        self._owner.close()
        self.folder = None

    @property
    def environment(self) -> dict[str, str]:
        """This process's variables for a command that is to talk to this cluster and to no other."""
        own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_"))}
        path = f"{self.folder / 'bin'}:{_PATH}"
        return own | {"SLURM_CONF": str(self.folder / "slurm.conf"), MARK: self.folder.name, "PATH": path}

    # What goes on.

    def jobs(self, folder: Path | None = None) -> list[Job]:
        """Return every job since the start, finished ones too, in the order of their numbers.

        Args:
            folder: only those that were started in this folder (the checkout of one run).
        """
        lines = self.command("squeue", "-h", "-t", "all", "-o", "%i|%T|%k|%N|%P|%j|%r|%Z").splitlines()
        found = []
        for line in lines:
            number, state, comment, node, partition, name, reason, started = line.split("|", 7)
            rule = comment.removeprefix("rule_")
            found.append(Job(int(number), state, rule, node, partition, name, reason, started))
        return sorted((j for j in found if folder is None or j.folder == str(folder)), key=lambda j: j.id)

    def job(self, which: int | str, folder: Path | None = None) -> Job | None:
        """Return the job of this number, or the newest one of this rule, or None."""
        found = [job for job in self.jobs(folder) if which in (job.id, job.rule)]
        return found[-1] if found else None

    def nodes(self) -> dict[str, str]:
        """Return the state of each node, such as idle, mixed, allocated, drained, draining, down."""
        return dict(line.split() for line in self.command("sinfo", "-h", "-N", "-o", "%N %T").splitlines())

    def pids_of(self, job: int) -> list[int]:
        """Return the processes of a job: its script, Snakemake's, and the rule's own; none of Slurm's daemons."""
        return [pid for pid, variables in marked(self.folder) if variables.get("SLURM_JOB_ID") == str(job)]

    def wait(self, predicate: Callable[[], object], seconds: float, what: str = "the condition holds") -> object:
        """Ask five times a second until the answer is true, and return it.

        Raises:
            TimeoutError: it was not true in time; the text names ``what`` and shows jobs, nodes and ends of the logs.
        """
        deadline = time.monotonic() + seconds
        while not (answer := predicate()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {seconds} s: {what}\n{self.log_tail()}")
            time.sleep(0.2)
        return answer

    def log_tail(self, lines: int = 15) -> str:
        """Return what a person looks at first: jobs, nodes, and the ends of the daemons' logs."""
        parts = []
        for command in (("squeue", "-t", "all", "-o", "%i %T %P %N %r %k"), ("sinfo", "-N", "-l")):
            with contextlib.suppress(subprocess.SubprocessError):
                parts.append(self.command(*command))
        for path in sorted((self.folder / "log").glob("*.log")):
            parts.append(f"{path.name}:\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:]))
        return "\n".join(parts)

    # What is done to it.

    def command(self, *arguments: str, timeout: float = 60) -> str:
        """Run one of Slurm's commands and return what it printed.

        Raises:
            subprocess.CalledProcessError: it failed; its words are in ``stderr``.
        """
        try:
            return subprocess.run(
                arguments, env=self.environment, check=True, capture_output=True, text=True, timeout=timeout
            ).stdout
        except subprocess.CalledProcessError as error:
            error.add_note(error.stderr)
            raise

    def submit(self, script: str, *options: str) -> int:
        """Queue a line of shell and return the job's number. Its output goes to the cluster's folder."""
        output = f"--output={self.folder}/log/job-%j.txt"
        return int(self.command("sbatch", "--parsable", output, *options, f"--wrap={script}"))

    def output(self, job: int) -> str:
        """Return what a job of :meth:`submit` has printed."""
        path = self.folder / "log" / f"job-{job}.txt"
        return path.read_text() if path.exists() else ""

    def scancel(self, which: int | str, folder: Path | None = None) -> None:
        """Cancel the job of this number, or all waiting and running ones of this rule (in this folder)."""
        for job in self.jobs(folder):
            if which in (job.id, job.rule) and not job.ended:
                self.command("scancel", "--quiet", str(job.id))

    def expire(self, job: int) -> None:
        """Let a running job's walltime end now; Slurm notices within half a minute and sends SIGTERM, then SIGKILL."""
        self.command("scontrol", "update", f"JobId={job}", "EndTime=now")

    def drain(self, node: str) -> None:
        """Give a node no new jobs; those that run there go on."""
        self.command("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")

    def resume(self, node: str) -> None:
        """Let a drained or failed node work again."""
        self.command("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def kill_controller(self) -> None:
        """End slurmctld with SIGKILL; jobs go on, and nothing answers squeue, sbatch and scancel.

        Its state is saved five seconds after a change. A job whose start was not saved is ended when the controller is
        back, and started once more under the same number, whatever `--no-requeue` says. A test that means another
        case waits six seconds after the start of a job.
        """
        kill(self.folder / "run" / "slurmctld.pid", "slurmctld", signal.SIGKILL)

    def start_controller(self) -> None:
        """Start slurmctld from its saved state, as after a restart; returns when it answers and knows its nodes."""
        self._run("slurmctld")
        self.wait(self._answers, 60, "the controller answers")
        working = [node for node in NODES if alive(self.folder / "run" / f"slurmd.{node}.pid", "slurmd")]
        self.wait(lambda: not any("unknown" in self.nodes()[node] for node in working), 60, "the nodes have answered")

    def kill_node_daemon(self, node: str) -> None:
        """End a node's slurmd with SIGKILL. Its jobs go on, even when the controller takes them for failed later."""
        kill(self.folder / "run" / f"slurmd.{node}.pid", "slurmd", signal.SIGKILL)

    def start_node_daemon(self, node: str) -> None:
        """Start a node's slurmd; it finds the jobs that still run, and a node that was down becomes idle."""
        self._run("slurmd", "-N", node)

    def kill_node(self, node: str) -> None:
        """Cut a node's power: its daemon and all processes of its jobs end at once, and it answers no more."""
        jobs = [job.id for job in self.jobs() if job.node == node and not job.ended]
        self.kill_node_daemon(node)
        daemons = [pid for job, pid in step_daemons(self.folder) if job in jobs]
        kill_all(daemons + [pid for job in jobs for pid in self.pids_of(job)])

    # How it is made.

    def _configure(self) -> None:
        ports = _free_ports(3)
        text = _CONFIGURATION.substitute(
            self._settings,
            name=self.folder.name.replace("-", "_").lower(),
            host=socket.gethostname().partition(".")[0],
            folder=self.folder,
            controller_port=ports[0],
            cn1_port=ports[1],
            gn1_port=ports[2],
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text(_GPUS)
        # Snakemake's job step forgets SLURM_CONF before it calls srun, which would then look in /etc/slurm.
        srun = self.folder / "bin" / "srun"
        srun.write_text(
            f'#!/bin/sh\nSLURM_CONF={self.folder}/slurm.conf exec {shutil.which("srun", path=_PATH)} "$@"\n'
        )
        srun.chmod(0o755)

    def _munge(self) -> list[str]:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        run = self.folder / "run"
        places = {"socket": run / "munge.socket", "pid-file": run / "munged.pid", "seed-file": run / "munge.seed"}
        places |= {"key-file": key, "log-file": self.folder / "log" / "munged.log"}
        return [f"--{option}={path}" for option, path in places.items()]

    def _run(self, *daemon: str) -> None:
        """Start a daemon, which goes to the background by itself."""
        done = subprocess.run(
            daemon, env=self.environment, cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=60
        )
        if done.returncode:
            raise TimeoutError(f"{daemon[0]} did not start: {done.stderr.decode()}\n{self.log_tail()}")

    def _answers(self) -> bool:
        with contextlib.suppress(subprocess.SubprocessError):
            return "UP" in self.command("scontrol", "ping", timeout=10)
        return False


def _free_ports(number: int) -> list[int]:
    """Return ports that nobody listens at, below those that the system gives to outgoing connections."""
    found = []
    for port in random.SystemRandom().sample(range(20000, 30000), 1000):
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == number:
            break
    return found


def _new_folder() -> tuple[Path, IO]:
    """Return a cluster's folder and the lock of its owner; it gets its name when it is locked."""
    made = Path(tempfile.mkdtemp(prefix="."))
    made.chmod(0o755)
    for name in ("bin", "log", "run", "spool", "state"):
        (made / name).mkdir()
    owner = _lock(made)
    folder = made.rename(made.with_name(_PREFIX + made.name.strip("._")))
    return folder, owner


def _lock(folder: Path) -> IO:
    """Return the open lock of a cluster's owner. It is free as soon as the owner has ended, however it ended.

    Raises:
        BlockingIOError: the owner still works.
    """
    handle = open(folder / "owner", "w")  # noqa: SIM115 (it stays open on purpose)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise
    return handle


def _end_leftovers() -> None:
    """End the clusters whose owners were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(BlockingIOError, FileNotFoundError), _lock(folder):
            _end(folder)


def _end(folder: Path) -> None:
    """End every process of the cluster in a folder, jobs first, and remove the folder."""
    kill_all([pid for pid, variables in marked(folder) if "SLURM_JOB_ID" in variables])
    for daemon in ("slurmd.cn1", "slurmd.gn1", "slurmctld", "munged"):
        kill(folder / "run" / f"{daemon}.pid", daemon.partition(".")[0], signal.SIGTERM)
    # What is left: daemons of steps, which wait for a controller that is gone, and what a job has detached.
    kill_all([pid for _, pid in step_daemons(folder)] + [pid for pid, _ in marked(folder)])
    shutil.rmtree(folder, ignore_errors=True)
