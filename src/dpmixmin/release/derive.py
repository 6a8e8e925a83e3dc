"""What a chain's charged releases must look like, from public files alone: the config and the chosen settings.

`release` looks the entries up in the ledger by it, `verify` compares a statement's entries with it. ``left_out`` names
the text sources that could not be had (``text.missing: leave_out``): nothing in the chain knows of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Any

from dpmixmin import evaluation
from dpmixmin.cells import Cell, cells_of, mixing_parts, train_parts
from dpmixmin.config import PLACES, Config
from dpmixmin.models.card import licence
from dpmixmin.paths import GPT2_FILES, PUBLIC, RELEASED, Paths
from dpmixmin.privacy.events import from_json
from dpmixmin.privacy.mechanisms import GridGaussian, ModelGaussian, ResponsibilityGaussian, Spec
from dpmixmin.privacy.selection import NoisyMax, RepeatAndSelect
from dpmixmin.privacy.statement import touch
from dpmixmin.privacy.totals import total
from dpmixmin.sections import FinetuneSettings, MixtureSettings
from dpmixmin.specs import evaluation_spec, finetune_spec, mixture_spec

SPECS: dict[str, type[Spec]] = {
    cls.__name__: cls for cls in (GridGaussian, ResponsibilityGaussian, ModelGaussian, NoisyMax, RepeatAndSelect)
}
"""Mechanism classes by the name that a statement gives them."""

WITHHELD = "withheld"
"""Stands for every path of a private table."""


@dataclass(frozen=True)
class Charged:
    """One release that a chain must have been charged for.

    Attributes:
        cell: its cell.
        parts: what it reads.
    """

    cell: Cell
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Expected(Charged):
    """The same with the public parameters that follow from config and settings.

    Attributes:
        spec: the mechanism.
        total_variation: distance of its noise from the ideal law.
    """

    spec: Spec
    total_variation: float


def spec_of(values: dict[str, Any]) -> Spec:
    """Return the spec that ``Spec.describe`` wrote (other keys are ignored).

    Raises:
        ValueError: unknown mechanism, or a parameter out of range.
    """
    cls = SPECS.get(values["mechanism"])
    if cls is None:
        raise ValueError(f"unknown mechanism {values['mechanism']!r}; known: {', '.join(SPECS)}")
    kept = {field.name: values[field.name] for field in fields(cls)}
    kept["alongside"] = tuple(from_json(event) for event in kept["alongside"])
    if cls is RepeatAndSelect:
        kept["base"] = tuple(spec_of(each) for each in kept["base"])
        kept["shape"] = inf if kept["shape"] == "inf" else kept["shape"]
    return cls(**kept)


def chain_cells(config: Config) -> dict[str, Cell]:
    """Return the cells of a deployment's one chain, by stage."""
    return {cell.stage: cell for cell in cells_of(config)}


def has_private_mixture(config: Config) -> bool:
    """Whether the weights came from mechanism 1."""
    mixture = chain_cells(config).get("mixture")
    return mixture is not None and mixture.room == RELEASED


def model_files(config: Config) -> tuple[str, ...]:
    """Return the names of a model's files."""
    return GPT2_FILES if config.text else ("model.safetensors",)


def mixed(config: Config, left_out: Collection[str]) -> tuple[str, ...]:
    """Return the names of the sources that are mixed, in the config's order."""
    return tuple(name for name in config.sources if name not in left_out)


def public_tables(config: Config, left_out: Collection[str]) -> list[dict[str, str]]:
    """Return the public data behind a deployment's model, as a statement lists it: tables, or texts."""
    if config.text:
        uses = _uses_of_texts(config)
        return [{"name": name, "used_for": uses, "licence": licence(config, name)} for name in mixed(config, left_out)]
    tables = [("sources", "the proxy and pretraining", config.public.sources)]
    if _tuned(config):
        tables.append(("standins", "choosing settings", config.public.standins))
    return [{"name": name, "used_for": why, "licence": table.licence} for name, why, table in tables]


def _uses_of_texts(config: Config) -> str:
    uses = ["the tokenizer"] if config.text.tokenizer.kind == "bpe" else []
    uses += ["a proxy"] if has_private_mixture(config) else []
    uses += ["pretraining"] if config.methods != ("none",) else []
    uses += ["choosing settings"] if _tuned(config) else []
    return " and ".join(part for part in (", ".join(uses[:-1]), *uses[-1:]) if part) or "nothing"


def public_artefacts(config: Config, left_out: Collection[str]) -> list[str]:
    """Return the names of the public artefacts behind a deployment's model, sorted: their folders in the run."""
    paths, cells = Paths(config.experiment), chain_cells(config)
    found = {cell.folder(paths) for cell in cells.values() if cell.room == PUBLIC}
    found |= {paths.finetune_settings(cells["finetuned"].method)}
    found |= {paths.settings("mixture")} if has_private_mixture(config) else set()
    found |= _of_texts(config, paths, mixed(config, left_out)) if config.text else _of_labels(config, paths)
    return sorted(path.removeprefix(f"{paths.base}/") for path in found)


def _of_labels(config: Config, paths: Paths) -> set[str]:
    found = {paths.source("sources")}
    found |= {paths.proxy()} if has_private_mixture(config) else set()
    if config.finetune.settings is None:
        found.add(paths.settings("mixture"))  # the method was played through on the stand-ins
    if _tuned(config):
        found |= {paths.source("standins"), paths.proxy()}
    return found


def _of_texts(config: Config, paths: Paths, names: tuple[str, ...]) -> set[str]:
    found = {paths.tokenizer(), *map(paths.text, names)}
    return found | (set(map(paths.proxy, names)) if has_private_mixture(config) else set())


def _tuned(config: Config) -> bool:
    """Whether settings of this chain were chosen on public stand-ins."""
    mixture = has_private_mixture(config) and config.mixture.settings is None
    return config.finetune.settings is None or mixture


def charged_cells(config: Config, finetune_choice: dict | None) -> list[Charged]:
    """Return what a deployment's chain is charged for, in order.

    Args:
        config: mode deploy.
        finetune_choice: the fine-tuning settings, or None where the stand-ins chose not to fine-tune.
    """
    cells, found = chain_cells(config), []
    if has_private_mixture(config):
        found.append(Charged(cells["mixture"], mixing_parts(config)))
    if finetune_choice is not None:
        found.append(Charged(cells["finetuned"], train_parts(config, cells["finetuned"].method)))
    if "evaluation" in cells:
        found.append(Charged(cells["evaluation"], ("test",)))
    return found


def expected(config: Config, settings: dict[str, dict | None], left_out: Collection[str]) -> list[Expected]:
    """Return the same with specs, calibrated anew.

    Args:
        config: mode deploy; the paths of private tables are not used.
        settings: the choices by name: ``mixture`` (with a private mixture) and ``finetune``.
        left_out: text sources that could not be had.
    """
    found: list[Expected] = []
    for charged in charged_cells(config, settings["finetune"]):
        cell, parts = charged.cell, charged.parts
        if cell.stage == "mixture":
            spec = mixture_spec(config, MixtureSettings(**settings["mixture"]), cell.epsilon)
            variation = spec.total_variation(len(mixed(config, left_out)))
        elif cell.stage == "finetuned":
            shared = [each for each in found if set(each.parts) & set(parts)]
            alongside = tuple(event for each in shared for event in each.spec.events())
            values = FinetuneSettings(**settings["finetune"])
            spec, variation = finetune_spec(config, values, cell.epsilon, parts, alongside=alongside), 0.0
        else:
            spec = evaluation_spec(config, cell.epsilon)
            variation = spec.total_variation(evaluation.dimension(config))
        found.append(Expected(cell, parts, spec, variation))
    return found


def public_config(config: Config) -> dict[str, Any]:
    """Return the resolved config as a bundle shows it: a valid config, without private paths."""
    values = config.dump()
    table = values["private"]["table"]
    for key in PLACES.get(table["kind"], ()):
        if table[key] is not None:
            # The format is public: partitions are named by it (data/split.py).
            table[key] = WITHHELD + (Path(table[key]).suffix if table["kind"] == "text" else "")
    values["ledger"]["path"] = f"/{WITHHELD}"  # deploy asks for an absolute path
    return values


def spent_at(privacy: dict[str, Any], delta: float) -> float:
    """Return the epsilon at ``delta`` of everything charged to the dataset, from a deployment's statement."""
    charged = [*privacy["entries"], *privacy["other_entries"]]
    charged += privacy["aborted"] if privacy["aborted_attempts_charged"] else []
    return total([touch(entry) for entry in charged], delta)[0]
