"""The section `compute`: how the work is cut into jobs, and what a job asks a cluster for. It changes no result."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dpmixmin.section import Model

Step = Literal[
    "fetch",
    "sources",
    "records",
    "split",
    "proxy",
    "predict",
    "tune_mixture",
    "tune_finetune",
    "mix",
    "pretrain",
    "finetune",
    "evaluate",
    "audit",
    "report",
    "release",
]


class Resources(Model):
    """What one job asks for; what is left out is `compute`'s."""

    memory_mb: int | None = Field(None, ge=300, le=10**8, description="Memory of the job, in MB.")
    runtime: int | None = Field(None, ge=1, le=10**6, description="Walltime of the job, in minutes.")


class Compute(Model):
    """How the work is cut into jobs, and what they ask for; locally only `devices` and the number of jobs matter."""

    accelerator: Literal["cpu", "gpu"] = Field(
        "cpu", description="gpu: jobs that train, score or attack networks ask the cluster for GPUs."
    )
    devices: int = Field(
        1,
        ge=1,
        le=4096,
        description="Processes that pretrain, and privately fine-tune, one model together: one GPU each with "
        "`accelerator: gpu`, else `threads` cores each.",
    )
    nodes: int = Field(1, ge=1, le=1024, description="Machines that `devices` are spread over, evenly.")
    max_jobs: int = Field(
        500,
        ge=1,
        le=10**6,
        description="The cells of the grid are packed into at most so many jobs: a site's job limit.",
    )
    cells_per_job: int | None = Field(
        None,
        ge=1,
        le=10**6,
        description="Cells that share one process; more where `max_jobs` asks for it. Default: all cells of one task "
        "and method, because starting Python and torch costs more than a small cell.",
    )
    memory_mb: int = Field(4000, ge=300, le=10**8, description="Memory of a job, in MB; see `steps`.")
    runtime: int = Field(60, ge=1, le=10**6, description="Walltime of a job, in minutes; see `steps`.")
    steps: dict[Step, Resources] = Field(
        default_factory=dict, description="What the jobs of single steps ask for instead."
    )

    @model_validator(mode="after")
    def _even(self):
        if self.devices % self.nodes:
            raise ValueError(f"devices {self.devices} is not a multiple of nodes {self.nodes}; change one")
        return self
