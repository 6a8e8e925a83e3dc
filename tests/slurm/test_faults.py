"""The fault table of docs/slurm.md: what a person sees, what a rerun does, and that the ledger is right.

Every test disturbs a private and a public training at once, on a real Slurm. Then the run is started again with the
same command, and must end as if nothing had happened: the release charged once, exactly the reserved steps, no
attempt lost, the public model byte for byte that of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults import ALL, CELL, PRIVATE, PUBLIC, STEPS, Experiment, Run

pytestmark = pytest.mark.slurm

STOPPED = "stopped by a signal; the same command goes on from where it is"
LOCKED = "Directory cannot be locked"


def failed(run: Run, job, state: str) -> None:
    """Check that the run has said in one line why a job has failed, and has gone on with what does not need it."""
    assert f"SLURM-job '{job.id}' failed" in run.output, run.output
    assert f"status is: '{state}'" in run.output


def rerun(experiment: Experiment) -> Run:
    """Run again what was disturbed, and check that the private training does no step again that was saved."""
    assert experiment.states() == ["reserved"]
    saved = experiment.saved_steps()
    assert 0 < saved < STEPS
    run = experiment.run()
    assert run.status == 0, run.output
    told = [int(step) for step in re.findall(rf"step (\d+)/{STEPS}\b", experiment.log(PRIVATE))]
    assert told == [step for step in range(STEPS // 10, STEPS + 1, STEPS // 10) if step > saved]
    experiment.check()
    print(f"saved {saved}, rerun {run.seconds:.0f} s")
    return run


def went_on(experiment: Experiment, rule: str = PUBLIC) -> int:
    """Check that the last job of the public training has gone on from a saved state; return its step."""
    found = re.search(r"going on after step (\d+)/", experiment.printed(experiment.cluster.job(rule, experiment.path)))
    assert found, experiment.log(rule)
    return int(found[1])


def test_scancel(experiment, cluster):
    """Both trainings save and stop; Snakemake starts the public one again, and never the private one."""
    run = experiment.begin()
    private, public = experiment.training(PRIVATE, PUBLIC)
    cluster.scancel(private.id)
    cluster.scancel(public.id)
    assert run.wait() == 1
    failed(run, private, "CANCELLED")
    failed(run, public, "CANCELLED")
    assert STOPPED in experiment.printed(private)
    assert STOPPED in experiment.printed(public)
    assert [job.rule for job in cluster.jobs(experiment.path)].count(PRIVATE) == 1
    assert went_on(experiment) > 1
    print(f"run {run.seconds:.0f} s")
    assert experiment.saved_steps() > 1
    rerun(experiment)


def test_sigkill_of_snakemake(experiment, cluster):
    """Jobs outlive it; a second pair of them waits for what the first pair makes."""
    run = experiment.begin()
    jobs = experiment.training(PRIVATE, PUBLIC)
    with experiment.paused(*jobs):
        run.kill()
        run.wait()
        refused = experiment.run()
        assert refused.status == 1
        assert LOCKED in refused.output
        assert all(cluster.job(job.id).state == "RUNNING" for job in jobs)
        unlocked = experiment.run("--unlock")
        assert unlocked.status == 0, unlocked.output
        again = experiment.begin()

        def second_pair_waits() -> bool:
            found = [cluster.job(rule, experiment.path) for rule in (PRIVATE, PUBLIC)]
            return all("waiting for another job" in experiment.printed(job) for job in found)

        cluster.wait(second_pair_waits, 60, "the second jobs wait for the first")
        assert len(cluster.jobs(experiment.path)) == 4
    assert again.wait() == 0, again.output
    experiment.jobs_end()
    assert [cluster.job(job.id).state for job in jobs] == ["COMPLETED"] * 2
    print(f"again {again.seconds:.0f} s")
    experiment.check()


def test_sigkill_of_workers(experiment, cluster):
    """The public job is started again, the private one goes on in the next run, from what was saved last."""
    run = experiment.begin()
    private, public = experiment.training(PRIVATE, PUBLIC)
    for job in (private, public):
        os.kill(experiment.worker(job), signal.SIGKILL)
    assert run.wait() == 1
    failed(run, private, "FAILED")
    failed(run, public, "FAILED")
    assert sorted(job.rule for job in cluster.jobs(experiment.path)) == [PRIVATE, PUBLIC, PUBLIC]
    print(f"run {run.seconds:.0f} s")
    rerun(experiment)


def test_sigkill_of_slurmctld(experiment, cluster):
    """Nothing answers for twenty seconds, the jobs go on and end meanwhile, and the run ends well."""
    run = experiment.begin()
    experiment.training(PRIVATE, PUBLIC)
    time.sleep(6)  # the controller writes its state every five seconds
    cluster.kill_controller()
    try:
        time.sleep(20)
        assert run.status is None
    finally:
        cluster.start_controller()
    assert run.wait(90) == 0, run.output
    print(f"run {run.seconds:.0f} s")
    experiment.check()


def test_drained_node(experiment, cluster):
    """Jobs wait for a drained node; jobs on a node that is drained go on."""
    cluster.drain("cn1")
    try:
        run = experiment.begin()
        cluster.wait(lambda: len(cluster.jobs(experiment.path)) == 2, 60, "both jobs are queued")
        time.sleep(5)
        assert {job.state for job in cluster.jobs(experiment.path)} == {"PENDING"}
        assert run.status is None
        cluster.resume("cn1")
        experiment.training(PRIVATE, PUBLIC)
        cluster.drain("cn1")
        assert run.wait() == 0, run.output
        assert cluster.nodes()["cn1"] == "drained"
    finally:
        cluster.resume("cn1")
    print(f"run {run.seconds:.0f} s")
    experiment.check()


def test_failed_node(experiment, cluster):
    """Slurm starts nothing again; Snakemake starts the public job, which waits until a node is there."""
    run = experiment.begin()
    private, _ = experiment.training(PRIVATE, PUBLIC)
    cluster.kill_node("cn1")
    try:
        cluster.wait(lambda: cluster.job(private.id).state == "NODE_FAIL", 90, "Slurm has noticed")
        cluster.wait(lambda: len(cluster.jobs(experiment.path)) == 3, 60, "the public job is queued again")
    finally:
        cluster.start_node_daemon("cn1")
    assert run.wait() == 1
    assert run.output.count("failed due to a node failure") == 2
    assert sorted(job.rule for job in cluster.jobs(experiment.path)) == [PRIVATE, PUBLIC, PUBLIC]
    print(f"run {run.seconds:.0f} s")
    rerun(experiment)


def test_walltime(experiment, cluster):
    """At the end of the walltime both save and stop, as after scancel."""
    run = experiment.begin()
    private, public = experiment.training(PRIVATE, PUBLIC)
    with experiment.paused(private, public):
        cluster.expire(private.id)
        cluster.expire(public.id)
        # Slurm continues what it is about to stop.
        cluster.wait(lambda: cluster.job(private.id).ended and cluster.job(public.id).ended, 90, "both are over")
    assert run.wait() == 1
    failed(run, private, "TIMEOUT")
    failed(run, public, "TIMEOUT")
    assert STOPPED in experiment.printed(private)
    assert STOPPED in experiment.printed(public)
    assert [job.rule for job in cluster.jobs(experiment.path)].count(PRIVATE) == 1
    assert went_on(experiment) > 1
    print(f"run {run.seconds:.0f} s")
    assert experiment.saved_steps() > 1
    rerun(experiment)


def test_ctrl_c(experiment, cluster):
    """Snakemake cancels its jobs, which save and stop."""
    run = experiment.begin()
    private, public = experiment.training(PRIVATE, PUBLIC)
    run.kill(signal.SIGINT)
    assert run.wait() == 1
    print(f"run {run.seconds:.0f} s")
    experiment.jobs_end()
    assert {job.state for job in cluster.jobs(experiment.path)} == {"CANCELLED"}
    assert STOPPED in experiment.printed(private)
    assert STOPPED in experiment.printed(public)
    assert experiment.saved_steps() > 1
    rerun(experiment)
    assert went_on(experiment) > 1


@pytest.fixture
def small_disk(experiment) -> Iterator[Callable[[str, str], None]]:
    """Put results and ledger on file systems of 4 MB each, and return a function that mounts one with options."""
    places = {name: experiment.path / name for name in ("results", ".ledger")}

    def mount(name: str, options: str) -> None:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", places[name]], capture_output=True)
        if done.returncode:
            pytest.skip(f"cannot mount a small file system here: {done.stderr.decode().strip()}")

    mounted = []
    try:
        for name, place in places.items():
            place.rename(experiment.path / f"{name}.whole")
            place.mkdir(mode=0o700)
            mount(name, "size=4m,mode=700")
            mounted.append(place)
            shutil.copytree(experiment.path / f"{name}.whole", place, dirs_exist_ok=True)
        yield mount
    finally:
        for place in mounted:
            subprocess.run(["umount", "-l", place], check=True)


def fill(folder: Path) -> None:
    """Fill the file system of a folder to its last byte."""
    with contextlib.suppress(OSError), open(folder / "ballast", "wb", buffering=0) as out:
        while out.write(bytes(4096)):
            pass


@pytest.mark.parametrize("full", ["results", ".ledger"])
def test_full_disk(experiment, cluster, small_disk, full):
    """One line says so, nothing half written counts, and with more room the same command finishes."""
    run = experiment.begin(*ALL, "--retries", "0")
    private, public = experiment.training(PRIVATE, PUBLIC)
    with experiment.paused(private, public):
        fill(experiment.path / full)
    assert run.wait() == 1
    print(full, f"run {run.seconds:.0f} s")
    failed(run, private, "FAILED")
    assert experiment.printed(private).count("the disk is full") == 1
    assert not (experiment.base / CELL / "manifest.json").exists()
    assert experiment.states() == ["committed" if full == "results" else "reserved"]
    experiment.check_whole()
    small_disk(full, "remount,size=64m")
    if full == "results":
        again = experiment.run()
        assert again.status == 0, again.output
        assert "step" not in experiment.log(PRIVATE)
        experiment.check()
        print(f"again {again.seconds:.0f} s")
    else:
        rerun(experiment)


def test_two_snakemakes_in_one_directory(experiment, cluster):
    """The second is refused in one line and changes nothing."""
    run = experiment.begin()
    jobs = experiment.training(PRIVATE, PUBLIC)
    with experiment.paused(*jobs):
        before = experiment.everything()
        second = experiment.run()
        assert second.status == 1
        assert LOCKED in second.output
        assert experiment.everything() == before
        assert len(cluster.jobs(experiment.path)) == 2
        print(f"refused {second.seconds:.0f} s")
    assert run.wait() == 0, run.output
    experiment.check()


def test_two_checkouts_with_one_ledger(experiment, prepared, cluster, tmp_path):
    """Who comes second waits, and publishes what the first has paid for."""
    other = prepared.clone(tmp_path / "other")
    (experiment.path / ".ledger").rename(tmp_path / "ledger")
    shutil.rmtree(other.path / ".ledger")
    for copy in (experiment, other):
        copy.share_ledger(tmp_path / "ledger")
    run = experiment.begin("finetuned")
    (first,) = experiment.training(PRIVATE)
    with experiment.paused(first):
        second = other.begin("finetuned")
        waiting = "waiting for another job that computes"
        cluster.wait(lambda: (j := cluster.job(PRIVATE, other.path)) and waiting in other.printed(j), 90, "it waits")
    assert second.wait() == 0, second.output
    assert run.wait() == 0, run.output
    print(f"run {run.seconds:.0f} s, other {second.seconds:.0f} s")
    for copy in (experiment, other):
        copy.check_ledger()
        copy.check_release()
        copy.check_whole()
        assert copy.planned("finetuned") == set()
    shutil.rmtree(other.path)
