"""The private cluster itself: it is a real Slurm, it can be broken and repaired, and it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cluster as module
import pytest
from cluster import Cluster, UnavailableError
from processes import name_of

pytestmark = pytest.mark.slurm

MEMORY = "python3 -c 'import time; kept = bytearray(b\"1\") * (200 << 20); time.sleep(60)'"


def ended(cluster, job, seconds=60):
    return cluster.wait(lambda: cluster.job(job).ended and cluster.job(job), seconds, f"job {job} has ended")


def running(cluster, job):
    return cluster.wait(lambda: cluster.job(job).state == "RUNNING", 30, f"job {job} runs")


def test_a_cpu_job_runs_on_one_node_and_a_gpu_job_gets_its_device_on_the_other(cluster):
    show = "srun sh -c 'echo $SLURMD_NODENAME ${CUDA_VISIBLE_DEVICES:-none}'"
    jobs = [
        cluster.submit(show, "--comment=rule_cpu"),
        cluster.submit(show, "--comment=rule_gpu", "--partition=gpu", "--gpus=2"),
        cluster.submit(show, "--comment=rule_gres", "--partition=gpu", "--gres=gpu:1"),
    ]
    found = [ended(cluster, job) for job in jobs]
    assert [(job.state, job.rule, job.node) for job in found] == [
        ("COMPLETED", "cpu", "cn1"),
        ("COMPLETED", "gpu", "gn1"),
        ("COMPLETED", "gres", "gn1"),
    ]
    assert [cluster.output(job).strip() for job in jobs] == ["cn1 none", "gn1 0,1", "gn1 0"]


def test_a_job_that_takes_more_memory_than_it_asked_for_is_killed(cluster):
    job, modest = cluster.submit(MEMORY, "--mem=100"), cluster.submit(MEMORY, "--mem=400")
    assert ended(cluster, job).state == "FAILED"
    assert "exceeded memory limit" in cluster.output(job)
    assert not cluster.job(modest).ended
    cluster.scancel(modest)


def test_jobs_survive_the_controller_and_a_node_that_loses_power_loses_them(cluster):
    kept = cluster.submit("sleep 20; echo survived", "--comment=rule_kept", "--partition=gpu")
    lost = cluster.submit("sleep 300 & sleep 300", "--comment=rule_lost", "--no-requeue")
    running(cluster, kept)
    running(cluster, lost)
    processes = cluster.pids_of(lost)
    assert len(processes) == 3
    time.sleep(6)  # until the controller has saved that they run
    cluster.kill_controller()
    cluster.start_controller()
    assert {cluster.job(name).state for name in ("kept", "lost")} == {"RUNNING"}
    cluster.kill_node("cn1")
    assert not any(map(alive, processes))
    assert ended(cluster, lost, 90).state == "NODE_FAIL"
    cluster.start_node_daemon("cn1")
    cluster.wait(lambda: cluster.nodes()["cn1"] == "idle", 60, "the node is back")
    assert ended(cluster, kept).state == "COMPLETED"
    assert cluster.output(kept) == "survived\n"


def test_a_drained_node_takes_no_job_until_it_is_resumed(cluster):
    cluster.drain("cn1")
    try:
        job = cluster.submit("true", "--comment=rule_waits")
        time.sleep(3)
        assert cluster.job("waits").state == "PENDING"
    finally:
        cluster.resume("cn1")
    assert ended(cluster, job).state == "COMPLETED"


def test_at_the_end_of_the_walltime_a_job_has_time_to_save(cluster):
    work = "while true; do sleep 0.1; done"
    saves = cluster.submit(f"srun sh -c \"trap 'sleep 3; echo saved; exit' TERM; {work}\"")
    stubborn = cluster.submit(f"srun sh -c \"trap 'echo ignored' TERM; {work}\"")
    for job in (saves, stubborn):
        running(cluster, job)
    time.sleep(2)  # until the traps are set
    for job in (saves, stubborn):
        cluster.expire(job)
    assert [ended(cluster, job, 90).state for job in (saves, stubborn)] == ["TIMEOUT"] * 2
    assert "saved" in cluster.output(saves)
    assert "ignored" in cluster.output(stubborn)
    assert cluster.pids_of(stubborn) == []


def test_a_cluster_stops_without_a_trace_and_several_work_side_by_side(cluster):
    with Cluster() as second:
        folder = second.folder
        job = second.submit("trap '' TERM; setsid sleep 600 & sleep 600")
        running(second, job)
        pids = [*second.pids_of(job), *daemons(folder)]
        assert len(pids) >= 3 + 4
        assert [job.id for job in second.jobs()] == [1]
    assert not any(map(alive, pids))
    assert not folder.exists()
    assert "idle" in cluster.nodes().values()


def test_what_a_killed_owner_has_left_is_ended_by_the_next_start(cluster):
    code = "import sys, time; from cluster import Cluster; k = Cluster(); k.start(); print(k.folder, flush=True); "
    owner = subprocess.Popen(
        [sys.executable, "-c", code + "time.sleep(600)"], cwd=Path(module.__file__).parent, stdout=subprocess.PIPE
    )
    folder = Path(owner.stdout.readline().decode().strip())
    left = daemons(folder)
    assert len(left) == 4
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert all(map(alive, left))
    with Cluster():
        assert not folder.exists()
        assert not any(map(alive, left))


def test_where_it_cannot_be_had_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(module, "_PATH", tempfile.gettempdir())
    with pytest.raises(UnavailableError, match="apt-get install munge slurmctld slurmd slurm-client"):
        Cluster().start()
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UnavailableError, match="needs root"):
        Cluster().start()


def alive(pid: int) -> bool:
    return name_of(pid) != ""


def daemons(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in (folder / "run").glob("*.pid")]
