"""Checking the files that a bundle carries beside its statement: settings, weights, model, metrics.

Settings must be those that the config declares, or candidates of its public search. The weights must follow from
their iterates, and the metrics from the noisy sum. Iterates, model and noisy sum are outputs: their values cannot be
derived; what can be checked is that they are of the form that a release has. What a language model brings along is
checked in language_model.py.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from dpmixmin import evaluation
from dpmixmin.config import Config
from dpmixmin.errors import UserError
from dpmixmin.privacy.mechanisms import GridGaussian
from dpmixmin.release import language_model
from dpmixmin.release.derive import chain_cells, has_private_mixture, mixed
from dpmixmin.release.language_model import Look
from dpmixmin.tuning import chosen_by

SIMPLEX = 1e-6
"""How far the sum of weights may be from 1."""

CLOSE = 1e-9
"""How far a derived weight or metric may be from the stated one."""


def settings(files: dict[str, bytes], config: Config) -> dict[str, dict[str, Any]]:
    """Return the settings files by name (``mixture``, ``finetune``).

    Raises:
        UserError: a file is missing, or its settings are not what the config declares or searches.
    """
    names = ("mixture", "finetune") if has_private_mixture(config) else ("finetune",)
    found = {name: _json(files, f"settings_{name}.json") for name in names}
    for name, values in found.items():
        if not isinstance(values, dict) or not {"choice", "chosen_by"} <= set(values):
            raise UserError(f"settings_{name}.json: needs `choice` and `chosen_by`")
        _check_choice(name, values, config)
    return found


def _check_choice(name: str, values: dict[str, Any], config: Config) -> None:
    file, declared = f"settings_{name}.json", getattr(config, name).settings
    how = chosen_by(config, declared is not None)
    if values["chosen_by"] != how:
        raise UserError(f"{file}: chosen_by: stated {values['chosen_by']!r}, derived from the config {how!r}")
    choice = values["choice"]
    if declared is not None:
        if choice != declared.model_dump():
            raise UserError(f"{file}: choice: stated {choice}, derived from {name}.settings {declared.model_dump()}")
        return
    grid = getattr(config.tune, name)
    keys = ("clip", "steps", "learning_rate") + (("batch",) if name == "finetune" else ())
    candidates = {key: getattr(grid, key) for key in keys}
    if name == "mixture" and config.mixture.learner == "responsibilities":
        candidates["clip"] = (1.0,)
    kept = name == "finetune" and choice is None  # "do not fine-tune" is a candidate too
    searched = isinstance(choice, dict) and set(choice) == set(keys)
    if not kept and not (searched and all(choice[key] in candidates[key] for key in keys)):
        raise UserError(f"{file}: choice: stated {choice}, which is no candidate of tune.{name} in the config")


def check(
    files: dict[str, bytes], statement: dict[str, Any], config: Config, measured: GridGaussian | None
) -> Iterator[str]:
    """Yield one line for each kind of file that is sound.

    Args:
        files: of the bundle.
        statement: whose other sections were found sound.
        config: in the statement.
        measured: the mechanism of the charged evaluation, if there was one.

    Raises:
        UserError: names the file and what is wrong with it.
    """
    wanted = {"statement.json", "statement.md", "statement.schema.json", "SHA256SUMS", "settings_finetune.json"}
    looks: dict[str, Look] = language_model.looks(statement) if config.text else {"model.safetensors": _model}
    if has_private_mixture(config):
        looks["weights.json"] = partial(_weights, mixed(config, statement["data"].get("left_out", [])))
        wanted |= {"trajectory.parquet", "settings_mixture.json"}
    if measured is not None:
        looks["released.json"] = partial(_released, measured)
        looks["metrics.json"] = partial(_metrics, measured)
    wanted |= set(looks)
    for name in sorted(wanted ^ set(files)):
        raise UserError(f"{name}: " + ("missing from the bundle" if name in wanted else "must not be in this bundle"))
    yield "the files are those that such a chain releases"
    for name, look in looks.items():
        try:
            line = look(files, config)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{name}: not of the form that a release has ({type(error).__name__})") from None
        yield line


def _json(files: dict[str, bytes], name: str) -> Any:
    if name not in files:
        raise UserError(f"{name}: missing from the bundle")
    try:
        return json.loads(files[name])
    except ValueError:
        raise UserError(f"{name}: not valid JSON") from None


def _weights(names: tuple[str, ...], files: dict[str, bytes], config: Config) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    cell, found = chain_cells(config)["mixture"], _json(files, "weights.json")
    wanted = {"task": cell.task, "method": cell.method, "epsilon": cell.epsilon, "seed": cell.seed}
    if config.text:
        wanted |= {"objective": config.mixture.objective, "tokenizer": language_model.tokenizer_hash(files)}
    stated = {key: found.get(key) for key in wanted}
    if stated != wanted or list(found.get("weights", {})) != list(names):
        raise UserError(
            f"weights.json: stated {stated}, derived {wanted}, with one weight for each of {', '.join(names)}"
        )
    _on_simplex("weights.json", np.array([list(found["weights"].values())], dtype=np.float64))
    try:
        table = pq.ParquetFile(io.BytesIO(files["trajectory.parquet"])).read()
        rows = np.stack([table[name].to_numpy() for name in names], axis=1)
    except (pa.ArrowException, KeyError, TypeError):
        raise UserError("trajectory.parquet: not a readable table with one column for each source") from None
    _on_simplex("trajectory.parquet", rows)
    weights = np.array(list(found["weights"].values()))
    derived = _final(rows, config)
    if not np.allclose(weights, derived, rtol=CLOSE, atol=CLOSE):
        raise UserError(f"weights.json: stated {weights.tolist()}, derived from the trajectory {derived.tolist()}")
    return f"the {len(names)} mixture weights lie on the simplex and follow from their {len(rows)} iterates"


def _final(rows: np.ndarray, config: Config) -> np.ndarray:
    """Return what a learner makes of its iterates: the last, or the mean of their second half."""
    steps = len(rows) - 1
    average = config.mixture.learner != "algorithm1" and steps > 1
    final = rows[1 + steps // 2 :].mean(axis=0) if average else rows[-1]
    return final / final.sum()


def _on_simplex(name: str, rows: np.ndarray) -> None:
    sums = rows.sum(axis=1)
    if not (np.isfinite(rows).all() and (rows >= 0).all() and (np.abs(sums - 1) <= SIMPLEX).all()):
        worst = sums[np.argmax(np.abs(sums - 1))] if len(sums) else 0.0
        raise UserError(f"{name}: weights must not be negative and must add up to 1; derived a sum of {worst:g}")


def _model(files: dict[str, bytes], config: Config) -> str:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(files["model.safetensors"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"model.safetensors: not readable ({type(error).__name__})") from None
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise UserError(f"model.safetensors: {name} holds values that are not finite")
    if not tensors:
        raise UserError("model.safetensors: holds no parameters")
    return f"the model's {sum(tensor.size for tensor in tensors.values())} parameters are readable and finite"


def _released(measured: GridGaussian, files: dict[str, bytes], config: Config) -> str:
    """The noisy sum behind the metrics: its noise is that of the ledger's entry."""
    found, length = _json(files, "released.json"), evaluation.dimension(config)
    sums = np.array(found["noisy_sum"], dtype=np.float64)
    if set(found) != {"noisy_sum", "noise_std"} or sums.shape != (length,) or not np.isfinite(sums).all():
        raise UserError(f"released.json: must have `noise_std`, and `noisy_sum` of {length} finite numbers")
    if not math.isclose(found["noise_std"], measured.noise_std, rel_tol=CLOSE):
        raise UserError(f"released.json: noise_std: stated {found['noise_std']!r}, derived {measured.noise_std!r}")
    return f"the noise of the evaluation's {length} sums is that of its mechanism"


def _metrics(measured: GridGaussian, files: dict[str, bytes], config: Config) -> str:
    stated, sums = _json(files, "metrics.json"), np.array(_json(files, "released.json")["noisy_sum"], np.float64)
    derived = evaluation.metrics_of(config, sums, measured.noise_std)
    if {name: set(each) for name, each in stated.items()} != {name: set(each) for name, each in derived.items()}:
        raise UserError(f"metrics.json: must have {', '.join(derived)}, each with its noise_standard_error")
    for name, each in derived.items():
        for key, value in each.items():
            if not math.isclose(stated[name][key], value, rel_tol=CLOSE, abs_tol=CLOSE):
                raise UserError(
                    f"metrics.json: {name}.{key}: stated {stated[name][key]!r}, derived from released.json {value!r}"
                )
    return "the charged metrics and their standard errors follow from the noisy sums"
