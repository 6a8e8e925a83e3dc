"""Which cells share a job, what the job is called, and what it asks a cluster for.

A group is all cells of one (stage, task, method). It runs in one process unless ``compute.cells_per_job`` cuts it into
parts, because starting Python and torch costs more than a small cell. Cells that the ledger has committed are only
copied, so asking for one cell runs its job and costs nothing more.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpmixmin.cells import Cell, cells_of, select
from dpmixmin.compute_section import Resources
from dpmixmin.config import Config
from dpmixmin.errors import UserError

STAGES = {"mixture": "mix", "pretrained": "pretrain", "finetuned": "finetune"}
"""Stages of cells whose groups can be cut, and the step that makes them."""


@dataclass(frozen=True)
class Job:
    """Cells that one process makes.

    Attributes:
        stage: mixture, pretrained or finetuned.
        task: sensitive task, or empty where the cells serve every task.
        method: where the weights come from.
        part: number of the part, from 1.
        parts: parts that the group is cut into.
        cells: its cells, in the order of the table.
    """

    stage: str
    task: str
    method: str
    part: int
    parts: int
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        """Name of the rule and of its log, such as ``mix_odd_dp_mixmin`` or ``finetune_odd_dp_mixmin_2of9``."""
        return name(STAGES[self.stage], self.task, self.method, (self.part, self.parts))

    @property
    def options(self) -> str:
        """What the stage is called with."""
        task = f"--task {self.task} " if self.task else ""
        part = f" --part {self.part}/{self.parts}" if self.parts > 1 else ""
        return f"{task}--method {self.method}{part}"


def name(step: str, task: str = "", method: str = "", part: tuple[int, int] = (1, 1)) -> str:
    """Return the name of a job from what its stage was called with."""
    words = [step, task, method, f"{part[0]}of{part[1]}" if part[1] > 1 else ""]
    return "_".join(word for word in words if word)


def jobs_of(config: Config) -> list[Job]:
    """Return every job that makes cells, in the order of the table.

    Raises:
        UserError: ``compute.max_jobs`` is below the number of groups.
    """
    found = []
    size = _cells_per_job(config)
    for (stage, task, method), cells in _groups(config).items():
        parts = -(-len(cells) // size)
        bounds = [round(i * len(cells) / parts) for i in range(parts + 1)]
        found += [
            Job(stage, task, method, i + 1, parts, tuple(cells[bounds[i] : bounds[i + 1]])) for i in range(parts)
        ]
    return found


def add_part(parser: argparse.ArgumentParser) -> None:
    """Add the option that names a part of a group to a stage."""
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="only this part of the cells")


def own(config: Config, stage: str, args: argparse.Namespace) -> Sequence[Cell]:
    """Return the cells of the job that a stage was called for.

    Args:
        config: the configuration.
        stage: mixture, pretrained or finetuned.
        args: with ``task``, ``method`` and ``part``.

    Raises:
        UserError: this config does not cut the group into so many parts.
    """
    if args.part == (1, 1):
        return select(cells_of(config), stage=stage, task=args.task, method=args.method)
    wanted = name(STAGES[stage], args.task, args.method, args.part)
    for job in jobs_of(config):
        if job.name == wanted:
            return job.cells
    raise UserError(f"--part {args.part[0]}/{args.part[1]}: this config has no such part; see compute.cells_per_job")


def resources(config: Config, step: str, *, private: bool = False, gpu: bool = False, together: bool = False) -> dict:
    """Return what a rule asks Snakemake's executor for.

    Args:
        config: the configuration.
        step: of ``compute.steps``.
        private: whether the job touches sensitive records. Then it is not retried, and asks for the same memory every
            time: that it ran out of memory may depend on the records.
        gpu: whether it gains from a GPU.
        together: whether ``compute.devices`` processes share its work.

    Returns:
        Names and values of Snakemake resources; those that grow with the attempts of a public job are functions of
        ``(wildcards, attempt)``. ``slurm_partition`` and ``gres`` come from the site's environment
        (slurm/profile.yaml).
    """
    compute = config.compute
    own = compute.steps.get(step, Resources())
    wanted = {"mem_mb": own.memory_mb or compute.memory_mb, "runtime": own.runtime or compute.runtime}
    found = wanted if private else {key: _growing(value) for key, value in wanted.items()}
    nodes, devices = (compute.nodes, compute.devices) if together else (1, 1)
    if nodes > 1:
        # One task a node, which starts the node's processes (launch.py); Snakemake's job step must not wrap it.
        found |= {"mpi": "srun", "nodes": nodes, "tasks": nodes}
    if gpu and compute.accelerator == "gpu":
        found["slurm_partition"] = os.environ.get("DPMIXMIN_GPU_PARTITION", "gpu")
        gres = os.environ.get("DPMIXMIN_GRES") or ("gpu" if nodes > 1 else "")
        found |= {"gres": f"{gres}:{devices // nodes}"} if gres else {"gpu": devices}
        found |= {"tasks_per_gpu": 0} if nodes > 1 else {}
    return found


def cores(config: Config, *, together: bool = False) -> int:
    """Return the threads of a rule: on each of its nodes, ``config.threads`` for each process."""
    return config.threads * (config.compute.devices // config.compute.nodes if together else 1)


def _growing(value: int) -> Callable:
    """Return a resource that is a half larger at every further attempt."""
    return lambda wildcards, attempt: value * (attempt + 1) // 2


def _part(text: str) -> tuple[int, int]:
    number, slash, of = text.partition("/")
    if not (slash and number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text}: write I/N, with 1 <= I <= N")
    return int(number), int(of)


def _groups(config: Config) -> dict[tuple[str, str, str], list[Cell]]:
    found: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells_of(config):
        if cell.stage in STAGES:
            found.setdefault((cell.stage, cell.task, cell.method), []).append(cell)
    return found


def _cells_per_job(config: Config) -> int:
    """Return the smallest size of a job, from the wanted one on, with which the cells fit the site's limit."""
    sizes = [len(cells) for cells in _groups(config).values()]
    limit, largest = config.compute.max_jobs, max(sizes, default=1)
    if len(sizes) > limit:
        raise UserError(
            f"compute.max_jobs: {limit} is below the {len(sizes)} jobs that the grid takes (one a stage, task and "
            "method); raise it"
        )
    wanted = min(config.compute.cells_per_job or largest, largest)
    fits: Callable[[int], bool] = lambda size: sum(-(-n // size) for n in sizes) <= limit  # noqa: E731
    return next(size for size in range(wanted, largest + 1) if fits(size))
