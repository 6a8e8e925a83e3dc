"""The sections of a configuration: every key's type, range, default and help text.

Models are frozen and forbid unknown keys, so that a typo is an error and never a silent default. config.py puts them
together and checks what concerns several of them.
"""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import ConfigDict, Field, model_validator

from dpmixmin.section import Epsilon, Model, Name, Seed
from dpmixmin.table_sections import PrivateTable, Source, Table
from dpmixmin.text_sections import Trainable

Method = Literal["none", "uniform", "proportional", "mixmin", "dp_mixmin"]
METHODS: tuple[str, ...] = get_args(Method)
USUAL: tuple[Method, ...] = ("none", "uniform", "mixmin", "dp_mixmin")


class LabelRule(Model):
    """A binary label: is the value of a column one of these? A function of one record and this config."""

    column: str = Field(description="Label column of the record table.")
    positive: tuple[float, ...] = Field(min_length=1, description="Values that count as positive.")


class Public(Model):
    """Public data: nothing here needs protection."""

    sources: Table | None = Field(
        None, description="Records whose label axes are the public sources: proxy and pretraining."
    )
    standins: Table | None = Field(
        None,
        description="Public records, disjoint from `sources`, that pose as the sensitive task for tuning. "
        "Without them, `mixture.settings` and `finetune.settings` must be given. With `text`, held-out documents of "
        "the sources pose instead.",
    )
    texts: dict[Name, Source] = Field(
        default_factory=dict, description="With the section `text`: the public sources by name, instead of `sources`."
    )


class Parts(Model):
    """Public fractions of the units that each part receives; they add up to 1."""

    mixing: float = Field(0.1, ge=0, le=1, description="Part that learns the mixture weights (the paper's rho).")
    finetune: float = Field(0.7, ge=0, le=1, description="Part that fine-tunes.")
    validation: float = Field(0.0, ge=0, le=1, description="Part that no stage reads; kept for charged selection.")
    test: float = Field(0.2, ge=0, le=1, description="Part that measures: exactly in a study, for a price in deploy.")

    @model_validator(mode="after")
    def _sum_to_one(self):
        total = self.mixing + self.finetune + self.validation + self.test
        if abs(total - 1) > 1e-9:
            raise ValueError(f"the fractions add up to {total:g}; they must add up to 1")
        if self.mixing <= 0 or self.finetune <= 0:
            raise ValueError("mixing and finetune must be above 0")
        return self


class Private(Model):
    """The sensitive dataset and how its units are divided."""

    name: Name = Field(description="Name of the dataset: its ledger is `{ledger.path}/{name}`.")
    table: PrivateTable = Field(description="The sensitive records.")
    unit: str = Field(
        "record",
        description="What is protected: `record`, or a column that names the person (patient, user) of a record. "
        "Splits, sampling, clipping and noise all work on this unit.",
    )
    max_records_per_unit: int = Field(
        15, ge=1, le=100_000, description="At most this many records of a unit are kept (a public cap)."
    )
    min_records_per_unit: int = Field(
        1, ge=1, le=100_000, description="A unit with fewer records is left out (a rule about that unit alone)."
    )
    records_per_step: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="At most this many of a unit's records enter a step, drawn anew for each (G_ULS; DP-MixMin paper, "
        "Algorithm 2). Default: all that are kept.",
    )
    nominal_units: int = Field(
        ge=10,
        le=10**9,
        description="Public estimate of the number of units. The real number is private and never used: sampling "
        "rates and divisors come from this one.",
    )
    parts: Parts = Field(default_factory=Parts, description="Public fractions of the parts.")


class Inputs(Model):
    """How raw feature values become model inputs: public constants, one record at a time."""

    shape: tuple[int, int, int] | None = Field(
        None, description="[channels, height, width] for images. Default: a flat vector, read by an MLP."
    )
    offset: float = Field(0.0, description="Subtracted from every raw value (in raw units).")
    scale: float = Field(1.0, gt=0, description="Divides every value after the offset (in raw units).")
    bound: float = Field(
        10.0, gt=0, description="Scaled private values are clamped to [-bound, bound]: one wild value stays harmless."
    )


class Cap(Model):
    """The most that a deployment may ever spend on a dataset."""

    epsilon: Epsilon = Field(description="Largest total epsilon (add/remove) of everything that was charged.")
    delta: float = Field(1e-5, gt=0, lt=0.1, description="Delta at which that total is taken.")


class Ledger(Model):
    """Where the ledger of the sensitive datasets lives. It outlives every experiment."""

    path: str = Field(".ledger", description="Folder of the ledgers; relative paths start at the checkout.")
    cap: Cap | None = Field(None, description="The cap of `mode: deploy`, which needs one.")


class Privacy(Model):
    """The guarantee that is asked for."""

    epsilons: tuple[Epsilon, ...] = Field(
        (1.0,), min_length=1, description="Targets of both mechanisms (each cell spends at most its epsilon)."
    )
    delta: float = Field(1e-5, gt=0, lt=0.1, description="Failure probability; should be below 1/nominal_units.")
    adjacency: Literal["add_remove", "replace_one", "zero_out"] = Field(
        "add_remove",
        description="Neighbours that the noise is calibrated to: one unit added or removed; its records replaced by "
        "others under the same id; its contribution set to zero. Statements always give add_remove, and the others.",
    )
    composition: Literal["parallel", "sequential"] = Field(
        "parallel",
        description="parallel: the mixture and fine-tuning read disjoint parts, each at the full epsilon. sequential: "
        "both read all training units and share epsilon (DP-MixMin paper, A.7).",
    )
    mixture_share: float = Field(
        0.1, gt=0, le=0.9, description="Share of epsilon that the mixture gets under sequential composition."
    )
    release: Name = Field(
        "first", description="Release label: a new label is a new release, drawn with fresh noise and charged."
    )
    charge_aborted: bool = Field(
        False, description="Also charge attempts that died before they wrote anything (the strict option)."
    )
    settings_from: Literal["public", "private_uncharged"] = Field(
        "public",
        description="What the choices in this config rest on (declared settings, architecture, steps). Say "
        "private_uncharged if any score on sensitive records helped: statements then say so and `release` refuses.",
    )
    insecure_seed: Seed | None = Field(
        None, description="TESTS ONLY: draw private noise from this seed. Every output is stamped NOT PRIVATE."
    )


class Evaluation(Model):
    """The charged evaluation of a deployment: loss, accuracy and AUC of the model on the disjoint test part."""

    epsilon: Epsilon | None = Field(
        None, description="Its own target. Default: the chain's, which costs nothing more."
    )
    loss_bound: float = Field(
        5.0,
        gt=0,
        le=100,
        description="A record's loss is clipped to this (a public constant). Texts: a unit's mean loss per token, in "
        "nats; the logarithm of the vocabulary's size is what guessing costs.",
    )
    bins: int = Field(10, ge=2, le=100, description="Bins of the noisy histogram of predictions behind the AUC.")


Gate = Literal["required", "report", "none"]


def _or_one_word(schema: dict) -> None:
    """In the JSON schema, let the section be one word too."""
    section = dict(schema)
    schema.clear()
    schema["anyOf"] = [{"type": "string", "enum": list(get_args(Gate))}, section]


class Audit(Model):
    """Attacks on every claim, by the mechanisms' own code. ``audit: required`` is short for ``{gate: required}``."""

    model_config = ConfigDict(json_schema_extra=_or_one_word)

    gate: Gate = Field(
        "required",
        description="required: `all` and `release` fail when an attack shows more than a claim allows, or when the "
        "strongest canary does not leak without noise; a deployment is audited (on public stand-ins) before it "
        "spends. report: audits are shown only. none: there are no audits.",
    )
    runs: int = Field(
        2000,
        ge=20,
        le=10**6,
        description="Runs of the mixture per world (with and without the canary); half choose the attack, half count.",
    )
    canaries: int = Field(
        1000,
        ge=0,
        le=10**6,
        description="Canaries in the one fine-tuning run that is audited (at most one a trainable parameter); 0: no "
        "audit of fine-tuning.",
    )
    tasks: tuple[Name, ...] = Field((), description="Tasks whose mixtures are audited; empty: all.")
    methods: tuple[Method, ...] = Field(
        (), description="Methods whose fine-tuning is audited; empty: dp_mixmin, or the first where it is not run."
    )
    seed: Seed = Field(0, description="Public seed of canaries and of the attacks' choices; noise has none.")

    @model_validator(mode="before")
    @classmethod
    def _one_word(cls, value):
        if isinstance(value, bool):
            raise ValueError("YAML reads on, off, yes and no as true and false: write `required`, `report` or `none`")
        return {"gate": value} if isinstance(value, str) else value


class Network(Model):
    """A small network and the public training of it."""

    channels: tuple[int, int] = Field((16, 32), description="Channels of the two convolutions (images).")
    hidden: int = Field(32, ge=1, le=4096, description="Width of the hidden layer.")
    steps: int = Field(300, ge=1, le=10**7, description="Optimiser steps on public data (Adam).")
    batch: int = Field(200, ge=1, le=10**6, description="Records per step.")
    learning_rate: float = Field(2e-3, gt=0, le=10, description="Adam's learning rate.")
    seed: Seed = Field(0, description="Public seed; cells with a seed of their own add it to this one.")


class MixtureSettings(Model):
    """Settings of one run of the private mixture learner."""

    clip: float = Field(gt=0, le=1e6, description="Clipping norm C of a unit's gradient.")
    steps: int = Field(ge=1, le=100_000, description="Steps T of entropic descent.")
    learning_rate: float = Field(gt=0, le=1e4, description="Step size eta of entropic descent.")


class Mixture(Model):
    """Mechanism 1: the mixture weights (DP-MixMin paper, Algorithm 1)."""

    learner: Literal["centred", "algorithm1", "responsibilities"] = Field(
        "centred",
        description="centred: gradients without their mean over sources, second half of the iterates averaged. "
        "algorithm1: the paper's Algorithm 1 (public divisor). responsibilities: private expectation maximisation; "
        "needs no clip (it is 1), and learning_rate is its over-relaxation (1 to 3).",
    )
    sampling_rate: float = Field(
        1.0, gt=0, le=1, description="Chance of a unit to enter a step: 1 is full batch, below 1 is Poisson."
    )
    objective: Literal["sequence", "token"] = Field(
        "sequence",
        description="Texts: what is mixed. sequence: whole records, the reduction that pretraining on drawn documents "
        "stands for. token: every next-token distribution, a convex surrogate that is far less flat on short records.",
    )
    settings: MixtureSettings | None = Field(
        None, description="Fixed settings; the default is to choose them on public stand-ins (`tune.mixture`)."
    )


class FinetuneSettings(Model):
    """Settings of one DP-SGD run."""

    learning_rate: float = Field(gt=0, le=1e4, description="Step size of plain SGD.")
    steps: int = Field(ge=1, le=10**6, description="Steps T.")
    batch: int = Field(ge=1, le=10**6, description="EXPECTED units per step; the sampling rate is batch / nominal.")
    clip: float = Field(gt=0, le=1e6, description="Clipping norm C of a unit's gradient.")


class FinetuneBlock(Model):
    """A block of the fine-tuning grid; an empty list stands for all."""

    methods: tuple[Method, ...] = Field((), description="Methods of this block; empty: all.")
    tasks: tuple[Name, ...] = Field((), description="Tasks of this block; empty: all.")
    epsilons: tuple[Epsilon, ...] = Field((), description="Epsilons of this block; empty: all.")
    seeds: tuple[Seed, ...] = Field((), description="Seeds of this block; empty: all.")


class Finetune(Model):
    """Mechanism 2: private fine-tuning."""

    mechanism: Literal["dp_sgd"] = Field("dp_sgd", description="dp_sgd: Poisson-sampled, clipped, noisy SGD.")
    grid: tuple[FinetuneBlock, ...] = Field(
        (FinetuneBlock(),), description="Which cells are fine-tuned: the union of these blocks."
    )
    settings: FinetuneSettings | None = Field(
        None, description="Fixed settings for every method; the default is to choose them on public stand-ins."
    )
    trainable: Trainable = Field(default_factory=Trainable, description="Which parameters fine-tuning changes.")
    twice_the_steps: bool = Field(
        False, description="Also fine-tune each cell with twice the chosen steps: was a method cut short?"
    )
    physical_batch: int = Field(512, ge=1, le=10**6, description="Records in memory at once; changes only speed.")


class MixtureGrid(Model):
    """Candidates for the mixture learner: every combination is tried on every stand-in task."""

    clip: tuple[float, ...] = Field((4.0, 6.0, 8.0, 13.0), min_length=1, description="Clipping norms.")
    steps: tuple[int, ...] = Field((25, 50, 100), min_length=1, description="Steps.")
    learning_rate: tuple[float, ...] = Field((0.5, 1.0, 2.0), min_length=1, description="Step sizes.")
    tasks: int = Field(8, ge=1, le=100, description="Stand-in tasks that every candidate is tried on.")
    repeats: int = Field(3, ge=1, le=100, description="Noise draws per candidate and task.")


class FinetuneGrid(Model):
    """Candidates for fine-tuning: `budget` of them for every method, each value tried equally often."""

    learning_rate: tuple[float, ...] = Field((0.1, 0.5, 1.5, 4.0), min_length=1, description="Step sizes.")
    steps: tuple[int, ...] = Field((40, 120), min_length=1, description="Steps.")
    batch: tuple[int, ...] = Field((125, 250), min_length=1, description="Expected units per step.")
    clip: tuple[float, ...] = Field((0.5, 1.0), min_length=1, description="Clipping norms.")
    budget: int = Field(8, ge=1, le=1000, description="Candidates tried for EVERY method, besides `do not fine-tune`.")
    tasks: int = Field(3, ge=1, le=100, description="Stand-in tasks that every candidate is tried on.")


class Tune(Model):
    """Choosing settings on public stand-ins, so that no private score is ever used."""

    epsilon: Epsilon = Field(1.0, description="Privacy target of the trial runs; the choice serves every epsilon.")
    axes_per_task: tuple[int, int] = Field(
        (1, 5), description="A stand-in task is the union of so many random axes (fewer where there are fewer)."
    )
    difference: float = Field(
        0.5, ge=0, le=1, description="Chance that another axis is taken out of the union, so no mixture fits exactly."
    )
    label_noise: float = Field(0.02, ge=0, lt=0.5, description="Chance that a stand-in label is flipped.")
    records_per_unit: int = Field(5, ge=1, le=1000, description="Texts: mean records of a stand-in unit.")
    tokens_per_record: int = Field(80, ge=2, le=100_000, description="Texts: mean tokens of a stand-in record.")
    mixture: MixtureGrid = Field(default_factory=MixtureGrid, description="Candidates for the mixture.")
    finetune: FinetuneGrid = Field(default_factory=FinetuneGrid, description="Candidates for fine-tuning.")
    seed: Seed = Field(0, description="Public seed of the stand-in tasks and of the candidate sample.")

    @model_validator(mode="after")
    def _axes_in_order(self):
        if not 1 <= self.axes_per_task[0] <= self.axes_per_task[1]:
            raise ValueError("axes_per_task must be [smallest, largest] with 1 <= smallest <= largest")
        return self
