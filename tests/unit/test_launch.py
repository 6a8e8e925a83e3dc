"""The launcher: real processes, started by torchrun's agent; what they run is replaced by a small script."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORKER = """
import os, signal, sys, time
from pathlib import Path

rank, folder = os.environ["RANK"], Path(sys.argv[-1])
print(f"output of rank {rank}", flush=True)
came = []
signal.signal(signal.SIGTERM, lambda *_: came.append(1))
(folder / f"started{rank}").write_text(" ".join([os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"], *sys.argv[1:]]))
if sys.argv[-2] == "fail":
    if rank == "1":
        sys.exit("RuntimeError: rank 1 has no memory")
if sys.argv[-2] == "killed":
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
while sys.argv[-2] != "end" and not came:
    time.sleep(0.05)
if came:
    time.sleep(2.5)
    (folder / f"saved{rank}").write_text("whole")
    sys.exit(143)
"""

DRIVER = """
import sys
from dpmixmin import launch

# What the launcher starts instead of this Python; it is given `-m dpmixmin STAGE OPTIONS`.
sys.executable = sys.argv.pop(1)
sys.exit(launch.main())
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts the launcher of two processes, as a job's shell does: SIGTERM is ignored."""
    worker = tmp_path / "worker"
    worker.write_text(f"#!{sys.executable}\n{WORKER}")
    worker.chmod(0o700)
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    running = []

    def started(what: str) -> subprocess.Popen:
        command = f"trap '' TERM; exec {sys.executable} {driver} {worker} --processes 2 mix {what} {tmp_path}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        running.append(
            subprocess.Popen(
                ["bash", "-c", command], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
        return running[-1]

    yield started
    for process in running:
        process.kill()


def until(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} did not come")


def test_all_processes_run_and_rank_0_alone_is_heard(start, tmp_path):
    out, error = (process := start("end")).communicate(timeout=60)
    assert process.returncode == 0
    assert [(tmp_path / f"started{rank}").read_text() for rank in (0, 1)] == [
        f"2 127.0.0.1 -m dpmixmin mix end {tmp_path}"
    ] * 2
    assert out == "output of rank 0\n"
    assert error == ""


def test_a_signal_reaches_all_processes_and_leaves_them_time_to_save(start, tmp_path):
    process = start("wait")
    for rank in (0, 1):
        until(tmp_path / f"started{rank}")
    process.send_signal(signal.SIGINT)
    # Slurm sends it to every process, and what started the process passes it on.
    for _ in range(2):
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == ["whole"] * 2
    assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("what", "status", "text"),
    [
        ("fail", 1, "RuntimeError: rank 1 has no memory\n"),
        ("killed", 128 + 9, "error: process 2 of 2 was killed (SIGKILL); out of memory?\n"),
    ],
)
def test_what_made_another_rank_fail_is_said_and_the_others_are_stopped(start, tmp_path, what, status, text):
    _, error = (process := start(what)).communicate(timeout=60)
    assert (process.returncode, error) == (status, text)
    assert (tmp_path / "saved0").exists()


def run(*options: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "dpmixmin.launch", *options]
    return subprocess.run(
        command, env={**os.environ, **environment}, text=True, capture_output=True, check=False, timeout=60
    )


def test_a_users_mistake_is_the_stages_own_line():
    for found in (
        run("--processes", "2", "budget", "--config", "missing.yaml"),
        run("budget", "--config", "missing.yaml", DPMIXMIN_PROCESSES="1"),
    ):
        assert found.returncode == 1
        (line,) = set(found.stderr.splitlines())
        assert line.startswith("error: missing.yaml: no such config file")


def test_numbers_that_make_no_sense_are_refused():
    found = run("--processes", "3", "--nodes", "2", "budget")
    assert found.returncode == 2
    assert "--processes must be a multiple of --nodes" in found.stderr
    found = run("budget", DPMIXMIN_PROCESSES="4", DPMIXMIN_NODES="2", SLURM_JOB_ID="")
    assert "error: compute.nodes 2: several machines need a Slurm allocation" in found.stderr
    assert len(found.stderr.splitlines()) == found.returncode == 1
