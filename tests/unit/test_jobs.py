"""Which cells share a job, and what a job asks a cluster for."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from dpmixmin import jobs
from dpmixmin.cells import cells_of
from dpmixmin.config import load, validate
from dpmixmin.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def grid(**compute):
    """The demo's grid with 3 epsilons and 10 seeds."""
    raw = load(ROOT / "config/config.yaml").model_dump(mode="json", exclude_none=True)
    raw["seeds"] = list(range(10))
    raw["finetune"].pop("grid")
    return validate({**raw, "compute": compute})


def test_by_default_a_task_and_a_method_are_one_job_and_every_cell_has_one():
    config = grid()
    found = jobs.jobs_of(config)
    assert len({job.name for job in found}) == len(found)
    assert {job.parts for job in found} == {1}
    made = [cell for job in found for cell in job.cells]
    assert sorted(made, key=repr) == sorted(cells_of(config), key=repr)
    names = {job.name for job in found}
    assert {"mix_uniform", "mix_odd_dp_mixmin", "pretrain_none", "finetune_odd_dp_mixmin"} <= names


@pytest.mark.parametrize("size", [1, 7, 29, 30, 31])
def test_groups_are_cut_into_even_parts_of_at_most_the_wanted_size(size):
    config = grid(cells_per_job=size, max_jobs=10_000)
    found = jobs.jobs_of(config)
    assert [cell for job in found for cell in job.cells] == [c for job in jobs.jobs_of(grid()) for c in job.cells]
    assert all(1 <= len(job.cells) <= size for job in found)
    odd = [job for job in found if (job.stage, job.task, job.method) == ("finetuned", "odd", "dp_mixmin")]
    assert len(odd) == -(-30 // size)
    assert max(len(job.cells) for job in odd) - min(len(job.cells) for job in odd) <= 1
    assert len({job.name for job in found}) == len(found)


@pytest.mark.parametrize("limit", [40, 100, 333])
def test_the_sites_limit_packs_cells_further_and_no_further_than_needed(limit):
    cells = len(cells_of(grid()))
    found = jobs.jobs_of(grid(cells_per_job=1, max_jobs=limit))
    assert cells > limit >= len(found)
    largest = max(len(job.cells) for job in found)
    assert len(jobs.jobs_of(grid(cells_per_job=largest - 1, max_jobs=10**6))) > limit


def test_a_limit_below_one_job_a_group_is_one_line():
    with pytest.raises(UserError, match=r"compute.max_jobs: 5 is below the \d+ jobs .* raise it"):
        jobs.jobs_of(grid(max_jobs=5))


def test_a_stage_finds_the_cells_of_the_job_it_was_called_for():
    config = grid(cells_per_job=4)
    parser = argparse.ArgumentParser()
    parser.add_argument("--task")
    parser.add_argument("--method")
    jobs.add_part(parser)
    for job in jobs.jobs_of(config):
        args = parser.parse_args(job.options.split())
        args.task = args.task or ""
        assert tuple(jobs.own(config, job.stage, args)) == job.cells
    args = parser.parse_args(["--task", "odd", "--method", "dp_mixmin"])
    assert len(jobs.own(config, "finetuned", args)) == 30
    args.part = (2, 99)
    with pytest.raises(UserError, match=r"--part 2/99: this config has no such part"):
        jobs.own(config, "finetuned", args)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "/", "-1/2"])
def test_a_part_is_written_i_of_n(text):
    parser = argparse.ArgumentParser()
    jobs.add_part(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--part={text}"])


def asked(found: dict, attempt: int) -> dict:
    return {key: value(None, attempt) if callable(value) else value for key, value in found.items()}


def test_memory_grows_with_attempts_of_public_jobs_only():
    """That a job ran out of memory may depend on the records that it read."""
    config = grid(memory_mb=1000, runtime=10, steps={"finetune": {"memory_mb": 3000}})
    public = jobs.resources(config, "pretrain")
    assert [asked(public, n)["mem_mb"] for n in (1, 2, 3)] == [1000, 1500, 2000]
    assert [asked(public, n)["runtime"] for n in (1, 2, 3)] == [10, 15, 20]
    private = jobs.resources(config, "finetune", private=True)
    assert private == {"mem_mb": 3000, "runtime": 10}


def test_gpus_are_asked_for_as_the_site_wants_them(monkeypatch):
    for name in ("DPMIXMIN_GRES", "DPMIXMIN_GPU_PARTITION"):
        monkeypatch.delenv(name, raising=False)
    cpu, gpu = grid(devices=4), grid(devices=4, accelerator="gpu")
    assert "gpu" not in jobs.resources(cpu, "pretrain", gpu=True, together=True)
    found = jobs.resources(gpu, "pretrain", gpu=True, together=True)
    assert (found["gpu"], found["slurm_partition"]) == (4, "gpu")
    assert jobs.resources(gpu, "proxy", gpu=True)["gpu"] == 1
    assert "gpu" not in jobs.resources(gpu, "mix")
    monkeypatch.setenv("DPMIXMIN_GRES", "gpu:a100")
    monkeypatch.setenv("DPMIXMIN_GPU_PARTITION", "big")
    found = jobs.resources(gpu, "pretrain", gpu=True, together=True)
    assert (found["gres"], found["slurm_partition"]) == ("gpu:a100:4", "big")
    assert "gpu" not in found


def test_several_nodes_are_one_task_each(monkeypatch):
    monkeypatch.delenv("DPMIXMIN_GRES", raising=False)
    config = grid(devices=8, nodes=2, accelerator="gpu")
    found = jobs.resources(config, "finetune", private=True, gpu=True, together=True)
    assert {key: found[key] for key in ("mpi", "nodes", "tasks", "gres", "tasks_per_gpu")} == {
        "mpi": "srun", "nodes": 2, "tasks": 2, "gres": "gpu:4", "tasks_per_gpu": 0,
    }  # fmt: skip
    assert jobs.cores(config, together=True) == 4 * config.threads
    assert jobs.cores(config) == config.threads
    assert "nodes" not in jobs.resources(config, "proxy", gpu=True)


def test_devices_are_spread_evenly():
    with pytest.raises(UserError, match="devices 3 is not a multiple of nodes 2; change one"):
        grid(devices=3, nodes=2)
