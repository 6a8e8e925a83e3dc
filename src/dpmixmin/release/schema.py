"""The form of ``statement.json``: every field with its meaning, and the JSON schema that ships in each bundle.

Unknown fields are errors everywhere but in ``config``, whose form is the config's own schema (config/schema.json).
``docs/statement.schema.json`` is a copy, written by ``make schema``; a test keeps it in step.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dpmixmin.privacy.events import ADJACENCIES
from dpmixmin.privacy.statement import TUNING
from dpmixmin.sections import Model

FORMAT = 2
"""Version of the bundle's form: 2 since bundles can hold a language model."""

Adjacency = Literal[ADJACENCIES]
Id = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Part = Literal["mixing", "finetune", "validation", "test"]


# -- accounting events ------------------------------------------------------------------------------------------


class GaussianEvent(Model):
    """Steps of a (possibly Poisson-sampled) Gaussian mechanism."""

    kind: Literal["gaussian"] = Field(description="Kind of event.")
    noise_multiplier: Positive = Field(description="Noise standard deviation over the add/remove sensitivity.")
    sampling_rate: float = Field(gt=0, le=1, description="Chance of each unit to enter a step; 1 is full batch.")
    steps: int = Field(ge=1, description="Number of steps.")
    replace_factor: float = Field(ge=1, le=2, description="Replace-one sensitivity over add/remove sensitivity.")


class PureEvent(Model):
    """A pure-DP mechanism."""

    kind: Literal["pure"] = Field(description="Kind of event.")
    epsilon: Positive = Field(description="Epsilon for add/remove and zero-out neighbours.")
    replace_epsilon: Positive = Field(description="Epsilon for replace-one neighbours.")


BaseEvent = Annotated[GaussianEvent | PureEvent, Field(discriminator="kind")]


class RepeatSelectEvent(Model):
    """A base mechanism, repeated a random number of times; only the best run is released (arXiv 2110.03620)."""

    kind: Literal["repeat_select"] = Field(description="Kind of event.")
    base: list[BaseEvent] = Field(min_length=1, description="Events of one run.")
    mean: float = Field(ge=1, description="Mean number of runs.")
    shape: float | Literal["inf"] = Field(description="Law of the number of runs; inf is Poisson, 1 geometric.")
    delta_share: float = Field(gt=0, lt=1, description="Part of delta that this event takes for itself.")


Event = Annotated[GaussianEvent | PureEvent | RepeatSelectEvent, Field(discriminator="kind")]


# -- mechanisms -------------------------------------------------------------------------------------------------


class _Target(Model):
    nominal_units: Positive = Field(description="Public number of units of the parts read; never counted from data.")
    epsilon: Positive = Field(description="Target that the noise was calibrated to, together with `alongside`.")
    delta: float = Field(gt=0, lt=1, description="The target's failure probability.")
    unit: str = Field(description="What is protected.")
    adjacency: Adjacency = Field(description="Neighbours that the noise was calibrated to.")
    alongside: list[Event] = Field(description="Events of earlier releases on the same units that the target covers.")


class _Gaussian(_Target):
    clip: Positive = Field(description="Clipping norm C of one unit's vector.")
    noise_multiplier: Positive = Field(description="Noise standard deviation divided by C.")
    steps: int = Field(ge=1, description="Number of steps T.")
    sampling_rate: float = Field(gt=0, le=1, description="Chance of each unit to enter a step, by its own coin.")


class GridSpec(_Gaussian):
    """A noisy sum on an integer grid."""

    mechanism: Literal["GridGaussian", "ResponsibilityGaussian"] = Field(description="Class of the mechanism.")
    grid_bits: int = Field(ge=1, le=28, description="The grid is C / 2**grid_bits.")


class ModelSpec(_Gaussian):
    """DP-SGD."""

    mechanism: Literal["ModelGaussian"] = Field(description="Class of the mechanism.")


class MaxSpec(_Target):
    """The choice of one public candidate by private scores."""

    mechanism: Literal["NoisyMax"] = Field(description="Class of the mechanism.")
    candidates: int = Field(ge=1, description="Number of public candidates.")
    bound: Positive = Field(description="Largest score of a unit.")
    rule: Literal["permute_and_flip", "exponential"] = Field(description="How the choice is drawn.")


class RepeatSpec(_Target):
    """The best of a random number of private trials, by a noisy score."""

    mechanism: Literal["RepeatAndSelect"] = Field(description="Class of the mechanism.")
    base: list[Annotated[GridSpec | ModelSpec, Field(discriminator="mechanism")]] = Field(
        min_length=1, description="Mechanisms of one trial."
    )
    candidates: int = Field(ge=1, description="Number of public candidates.")
    mean: float = Field(ge=1, description="Mean number of trials.")
    shape: float | Literal["inf"] = Field(description="Law of the number of trials.")
    delta_share: float = Field(gt=0, lt=1, description="Part of delta that the selection takes for itself.")


class Cell(Model):
    """Where a release stands in the table of cells."""

    stage: str = Field(description="mixture, finetuned or evaluation.")
    task: str = Field(description="Sensitive task.")
    method: str = Field(description="Where pretraining's weights come from.")
    learner: str = Field(description="How the weights are learned, or empty.")
    mechanism: str = Field(description="Fine-tuning mechanism, or empty.")
    epsilon: float | None = Field(description="Privacy target of the chain.")
    seed: int | None = Field(description="Public seed.")
    chain: str = Field(description="The private steps behind it, in order.")
    room: str = Field(description="Privacy label of its folder.")


class _Charged(Model):
    entry: Id = Field(description="Random id of the ledger entry.")
    cell: Cell = Field(description="What was released.")
    parts: list[Part] = Field(min_length=1, description="Disjoint parts of the units that were read.")
    split: str = Field(description="Name of the partition that defines the parts.")
    release: str = Field(description="Release label.")
    events: list[Event] = Field(min_length=1, description="What the accountant composes for it.")
    sampler_total_variation: NotNegative = Field(description="Distance of its noise from the ideal law.")
    private_randomness: bool = Field(description="False where the noise came from a test seed.")


class GridEntry(GridSpec, _Charged):
    """A charged release by a noisy sum on a grid."""


class ModelEntry(ModelSpec, _Charged):
    """A charged release by DP-SGD."""


class MaxEntry(MaxSpec, _Charged):
    """A charged choice among public candidates."""


class RepeatEntry(RepeatSpec, _Charged):
    """A charged choice among private trials."""


Entry = Annotated[GridEntry | ModelEntry | MaxEntry | RepeatEntry, Field(discriminator="mechanism")]


# -- the guarantee ----------------------------------------------------------------------------------------------


class Guarantee(Model):
    """The guarantee of the chain in this bundle; what needs a mechanism is null where nothing private was touched."""

    epsilon: NotNegative = Field(description="Epsilon for add/remove neighbours; an upper bound.")
    delta: NotNegative = Field(description="Delta of the guarantee.")
    unit: str | None = Field(description="What is protected: a record, or all records of one such person.")
    adjacency: Literal["add_remove"] | None = Field(description="Neighbours of the guarantee: one unit more or less.")
    calibrated_to: Adjacency | None = Field(
        description="Neighbours that the first mechanism's noise was calibrated to."
    )
    composition: str = Field(description="How the releases were composed.")
    no_dp_for_parts: list[Part] = Field(
        max_length=0, description="Parts whose units have no DP guarantee; empty: such chains are not bundled."
    )


class OtherAdjacency(Model):
    """The same chain for other neighbours."""

    epsilon: NotNegative = Field(description="Epsilon.")
    delta: NotNegative = Field(description="Delta.")
    condition: str = Field(description="Which datasets are neighbours here.")


class OtherAdjacencies(Model):
    """The same chain for other neighbours."""

    replace_one: OtherAdjacency = Field(description="One unit's records are replaced, under the same id.")
    zero_out: OtherAdjacency = Field(description="One unit's contribution is replaced by zero.")


class NoOtherAdjacencies(Model):
    """Nothing private was touched, so there is nothing to state."""


class Curve(Model):
    """The privacy curve of the chain (add/remove); null stands for infinity."""

    epsilon_at_delta: dict[str, NotNegative | None] = Field(description="Epsilon at several deltas.")
    delta_at_epsilon: dict[str, NotNegative | None] = Field(description="Delta at several epsilons.")
    gaussian_mu: NotNegative | None = Field(description="mu of the equivalent Gaussian mechanism, if it is one.")
    group_epsilon: dict[str, NotNegative | None] = Field(description="Epsilon for so many units together.")
    accountant: str = Field(description="Who computed it.")


class DatasetTotal(Model):
    """Everything ever charged to the dataset, this chain included, when the bundle was made."""

    epsilon: NotNegative = Field(description="Epsilon for add/remove neighbours.")
    delta: NotNegative = Field(description="Delta.")
    composition: str = Field(description="How the releases were composed.")


class Privacy(Model):
    """The privacy statement: a pure function of the entries in it."""

    headline: str = Field(description="The guarantee in a line.")
    stamp: str = Field(description="`private`, or in capitals why it is not.")
    guarantee: Guarantee = Field(description="The guarantee of this bundle.")
    pac: list[dict[str, Any]] = Field(
        max_length=0, description="PAC guarantees of the chain; empty: chains with a PAC step are not bundled."
    )
    stated_as: str = Field(description="What the guarantee covers.")
    other_adjacencies: OtherAdjacencies | NoOtherAdjacencies = Field(description="The same for other neighbours.")
    tuning: Literal[TUNING] = Field(description="How the settings were chosen; the worst of all steps.")
    entries: list[Entry] = Field(
        description="The charged releases in this bundle; none where nothing private was touched."
    )
    aborted_attempts: int = Field(ge=0, description="Attempts at these releases that died before they wrote anything.")
    aborted: list[Entry] = Field(description="Those attempts.")
    aborted_attempts_charged: bool = Field(description="Whether they count in the guarantee.")
    curve: Curve | None = Field(description="The privacy curve; null where nothing private was touched.")
    not_covered: list[str] = Field(description="What the guarantee does not cover.")
    dataset_total: DatasetTotal = Field(description="Everything ever charged to this dataset.")
    other_entries: list[Entry] = Field(description="Charged releases from the same dataset that are not in here.")


# -- the rest of the statement ----------------------------------------------------------------------------------


class Bundle(Model):
    """What this bundle is."""

    format: Literal[FORMAT] = Field(description="Version of the bundle's form.")
    experiment: str = Field(description="Name of the run.")
    task: str = Field(description="Sensitive task of the model.")
    method: str = Field(description="Where pretraining's weights come from.")
    created: str = Field(pattern=r"^\d{4}-\d\d-\d\d$", description="Day on which the bundle was made (UTC).")
    versions: dict[str, str] = Field(description="Versions of this package and those that decide the result.")


class Parts(Model):
    """Public fractions of the units that each part receives."""

    mixing: NotNegative = Field(description="Part that learns the mixture weights.")
    finetune: NotNegative = Field(description="Part that fine-tunes.")
    validation: NotNegative = Field(description="Part kept for charged selection.")
    test: NotNegative = Field(description="Part that measures.")


class Dataset(Model):
    """The sensitive dataset: public facts only."""

    name: str = Field(description="Its name.")
    id: Id = Field(description="Random id of its ledger.")
    unit: str = Field(description="What is protected.")
    max_records_per_unit: int = Field(ge=1, description="At most this many records of a unit enter a step.")
    nominal_units: int = Field(ge=1, description="Public estimate of the number of units; the real one is private.")
    parts: Parts = Field(description="Public fractions of the parts.")


class Cap(Model):
    """The most that may ever be spent on the dataset."""

    epsilon: Positive = Field(description="Largest total epsilon (add/remove).")
    delta: float = Field(gt=0, lt=1, description="Delta at which that total is taken.")
    spent: NotNegative = Field(description="Total epsilon of everything charged, at that delta.")


class Table(Model):
    """A public table, or text, behind the model."""

    name: str = Field(description="Key in the config: sources or standins, or the name of a text.")
    used_for: str = Field(description="What it was used for.")
    licence: str = Field(description="Its licence, as the config declares it.")


class Artefact(Model):
    """A public artefact behind the model."""

    name: str = Field(description="Its folder in the run.")
    sha256: Sha256 = Field(description="Digest of its content.")


class Data(Model):
    """The public data behind the model."""

    tables: list[Table] = Field(description="Public tables or texts.")
    artefacts: list[Artefact] = Field(description="Public artefacts: prepared tables or texts, proxies, settings.")


class TextData(Data):
    """The public data behind a language model."""

    tokenizer: Sha256 = Field(description="SHA-256 of tokenizer.json; weights and model belong to this tokenizer.")
    left_out: list[str] = Field(
        description="Texts of the config that could not be had: not mixed, and nothing in the bundle is made of them."
    )


class File(Model):
    """A file of the bundle."""

    name: str = Field(description="Its name.")
    sha256: Sha256 = Field(description="SHA-256 of its bytes.")
    bytes: int = Field(ge=0, description="Its length.")


class Statement(Model):
    """The statement of a DP-MixMin bundle: what is protected, at what price, how it was made, what is not covered."""

    bundle: Bundle = Field(description="What this bundle is.")
    dataset: Dataset = Field(description="The sensitive dataset.")
    privacy: Privacy = Field(description="The guarantee, with everything it follows from.")
    cap: Cap = Field(description="The dataset's cap.")
    data: Data | TextData = Field(description="The public data behind the model.")
    config: dict[str, Any] = Field(
        description="The resolved config (its schema: config/schema.json), without the paths of private tables and of "
        "the ledger."
    )
    files: list[File] = Field(
        description="The other files, except statement.md and SHA256SUMS, which follow from all."
    )
    sha256: Sha256 = Field(description="Digest of everything else in this file, as canonical JSON.")


@cache
def schema() -> dict[str, Any]:
    """Return the JSON schema of :class:`Statement`; one object for all callers, not to be changed."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Statement.model_json_schema()}


@cache
def text() -> str:
    """Return the schema as the text of ``statement.schema.json``."""
    return json.dumps(schema(), indent=2) + "\n"


def write(path: str) -> None:
    """Write the schema to a file (docs/statement.schema.json; a test keeps it in step)."""
    Path(path).write_text(text(), encoding="utf-8")
