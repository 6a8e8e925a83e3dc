"""Start a stage in several processes that train one model: ``python -m dpmixmin.launch STAGE OPTIONS``.

How many, and on how many machines, ``--processes`` and ``--nodes`` say, or the workflow by ``$DPMIXMIN_PROCESSES`` and
``$DPMIXMIN_NODES``. With one process this is ``python -m dpmixmin STAGE OPTIONS``. With more, torchrun's agent starts
them; on several machines one agent each, started by ``srun`` on the allocation that this runs in, on its first node.

What a user sees is what rank 0 says, and whatever made another rank fail. SIGTERM and Ctrl-C reach the processes as
SIGTERM; they have ``SAVE_SECONDS`` to save their state. The exit status is that of the process that failed.

The machines find each other at ``$DPMIXMIN_MASTER_ADDR``, else at the first one's host name. Their processes talk
through the network interface that ``$GLOO_SOCKET_IFNAME`` (CPUs) or ``$NCCL_SOCKET_IFNAME`` (GPUs) names, else through
that of their host name; the processes of one machine through its loopback.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from dpmixmin import interrupt

SAVE_SECONDS = 120
"""How long processes that were told to stop have until they are killed."""

_PASSED_ON = signal.SIGUSR1
"""What srun is sent to stop its tasks: it passes this one on as it is, and kills them when it is sent SIGTERM."""

_OUTLIVE_SECONDS = 180
"""How long a machine's processes may go on after another's have ended: they live and end together."""


def main(arguments: list[str] | None = None) -> int:
    """Run a stage; return the exit status."""
    parser = argparse.ArgumentParser(prog="dpmixmin.launch", description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=_from_environment("DPMIXMIN_PROCESSES"), help="in all")
    parser.add_argument("--nodes", type=int, default=_from_environment("DPMIXMIN_NODES"), help="machines")
    # What the agents are told that srun starts.
    parser.add_argument("--at", default="", help=argparse.SUPPRESS)
    parser.add_argument("stage", nargs=argparse.REMAINDER, metavar="STAGE OPTIONS", help="as for python -m dpmixmin")
    parsed = parser.parse_args(arguments)
    if parsed.nodes < 1 or parsed.processes < 1 or parsed.processes % parsed.nodes:
        parser.error("--processes must be a multiple of --nodes, and both at least 1")
    if parsed.processes == 1:
        os.execv(sys.executable, [sys.executable, "-m", "dpmixmin", *parsed.stage])  # noqa: S606 (no shell wanted)
    interrupt.install()
    if parsed.at:
        return _agent(parsed.stage, parsed.processes, parsed.nodes, int(os.environ["SLURM_NODEID"]), parsed.at)
    if parsed.nodes > 1:
        return _agents(parsed.stage, parsed.processes, parsed.nodes)
    _talk_through_loopback()
    return _agent(parsed.stage, parsed.processes, 1, 0, f"127.0.0.1:{_free_port()}")


def _agents(stage: list[str], processes: int, nodes: int) -> int:
    """Run an agent on each machine of the allocation; return the worst exit status."""
    if not os.environ.get("SLURM_JOB_ID"):
        print(
            f"error: compute.nodes {nodes}: several machines need a Slurm allocation; run with `--profile slurm`, or "
            "set nodes to 1",
            file=sys.stderr,
        )
        return 1
    address = os.environ.get("DPMIXMIN_MASTER_ADDR") or socket.gethostname()
    cores = int(os.environ.get("OMP_NUM_THREADS", "1")) * (processes // nodes)
    command = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={cores}"]
    # The agents themselves see to it that all end when one does; srun's own way is SIGKILL, at once.
    command += ["--kill-on-bad-exit=0", f"--wait={_OUTLIVE_SECONDS}", "--mpi=none", "--input=none", "--quiet"]
    command += [sys.executable, "-m", "dpmixmin.launch", "--processes", str(processes), "--nodes", str(nodes)]
    command += ["--at", f"{address}:{_free_port()}", *stage]
    # In a session of its own, out of the way of the SIGTERM that a cancelled job gets: srun would end by SIGKILL, at
    # once, the processes that save their state.
    process = subprocess.Popen(command, start_new_session=True)
    while True:
        try:
            status = process.wait()
            return status if status >= 0 else 128 - status
        except (KeyboardInterrupt, interrupt.Interrupted):
            process.send_signal(_PASSED_ON)


def _agent(stage: list[str], processes: int, nodes: int, node: int, address: str) -> int:
    """Run this machine's processes; return the exit status."""
    # torch's agent describes what fails by tables and tracebacks of its own.
    logging.disable(logging.CRITICAL)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def stop(number, frame):
        # Once: the same signal often comes twice, from Slurm and through srun, and must not cut the saving short.
        for each in stopping:
            signal.signal(each, signal.SIG_IGN)
        raise SignalException("stopped", signal.SIGTERM)

    stopping = (signal.SIGTERM, signal.SIGINT, _PASSED_ON)
    for number in stopping:
        signal.signal(number, stop)
    here = processes // nodes
    with tempfile.TemporaryDirectory(prefix="dpmixmin-") as folder:
        others = range(0 if node else 1, here)
        config = LaunchConfig(
            min_nodes=nodes,
            max_nodes=nodes,
            nproc_per_node=here,
            run_id="dpmixmin",
            rdzv_backend="static",
            rdzv_endpoint=address,
            rdzv_configs={"rank": node},
            local_addr=address.rpartition(":")[0] if node == 0 else None,
            max_restarts=0,
            # Seldom, so that of ranks that fail alike rank 0 is mostly seen too, whose words are shown.
            monitor_interval=1.0,
            logs_specs=DefaultLogsSpecs(folder, redirects=dict.fromkeys(others, Std.ALL)),
            # The others are handled above.
            signals_to_handle="SIGQUIT",
            shutdown_timeout=SAVE_SECONDS,
        )
        try:
            # What srun passes on reaches the processes too, and is not for them.
            shell = f"trap '' {_PASSED_ON.name.removeprefix('SIG')}; exec \"$@\""
            elastic_launch(config, "/bin/sh")("-c", shell, "sh", sys.executable, "-m", "dpmixmin", *stage)
        except SignalException:
            return interrupt.STATUS
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            return _explain(codes, processes, {node * here + local: _said(folder, local) for local in others})
        except (RuntimeError, OSError) as error:
            print(f"error: the processes do not find each other at {address}: {error}", file=sys.stderr)
            return 1
    return 0


def _explain(codes: dict[int, int], world: int, said: dict[int, str]) -> int:
    """Print what made processes fail, unless rank 0 has said it, and return the exit status.

    Args:
        codes: exit status of the ranks that failed, minus the number of a signal that killed one.
        world: number of processes.
        said: what the ranks wrote that are not shown.
    """
    stopped = {interrupt.STATUS, -signal.SIGTERM}
    failed = {rank: code for rank, code in sorted(codes.items()) if code not in stopped}
    if not failed:
        return interrupt.STATUS
    rank, code = next(iter(failed.items()))
    print(said.get(rank, ""), end="", file=sys.stderr)
    if code < 0:
        name = signal.Signals(-code).name
        print(f"error: process {rank + 1} of {world} was killed ({name}); out of memory?", file=sys.stderr)
        return 128 - code
    return code


def _said(folder: str, local: int) -> str:
    """Return what a process wrote to its standard error."""
    found = Path(folder).glob(f"*/attempt_0/{local}/stderr.log")
    return "".join(path.read_text(errors="replace") for path in found)


def _talk_through_loopback() -> None:
    """Let the processes of one machine find each other whatever its host name resolves to."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]


def _from_environment(name: str) -> int:
    return int(os.environ.get(name) or 1)


if __name__ == "__main__":
    sys.exit(main())
