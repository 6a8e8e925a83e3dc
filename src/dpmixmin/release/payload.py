"""Checking the files that a bundle carries beside its statement: settings, weights, model, metrics.

They are outputs, so their values cannot be derived; what can be checked is that each is what it says it is.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dpmixmin.config import Config
from dpmixmin.errors import UserError
from dpmixmin.privacy.statement import TUNING
from dpmixmin.release.derive import chain_cells, has_private_mixture

SIMPLEX = 1e-6
"""How far the sum of weights may be from 1."""

CLOSE = 1e-9
"""How far a derived weight may be from the stated one."""


def settings(files: dict[str, bytes], config: Config) -> dict[str, dict[str, Any]]:
    """Return the settings files by name (``mixture``, ``finetune``)."""
    names = ("mixture", "finetune") if has_private_mixture(config) else ("finetune",)
    found = {name: _json(files, f"settings_{name}.json") for name in names}
    for name, values in found.items():
        if not isinstance(values, dict) or "choice" not in values or values.get("chosen_by") not in TUNING:
            raise UserError(f"settings_{name}.json: needs `choice` and `chosen_by`, one of {', '.join(TUNING)}")
    return found


def check(files: dict[str, bytes], config: Config) -> Iterator[str]:
    """Yield one line for each kind of file that is sound.

    Raises:
        UserError: names the file and what is wrong with it.
    """
    cells = chain_cells(config)
    wanted = {"statement.json", "statement.md", "statement.schema.json", "SHA256SUMS", "settings_finetune.json"}
    wanted |= {"model.safetensors"}
    wanted |= {"weights.json", "trajectory.parquet", "settings_mixture.json"} if has_private_mixture(config) else set()
    wanted |= {"metrics.json"} if "evaluation" in cells else set()
    for name in sorted(wanted ^ set(files)):
        raise UserError(f"{name}: " + ("missing from the bundle" if name in wanted else "must not be in this bundle"))
    yield "the files are those that such a chain releases"
    looks: dict[str, Callable[[dict[str, bytes], Config], str]] = {
        "weights.json": _weights,
        "model.safetensors": _model,
        "metrics.json": _metrics,
    }
    for name, look in looks.items():
        if name in wanted:
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


def _weights(files: dict[str, bytes], config: Config) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    cell, axes = chain_cells(config)["mixture"], list(config.axes)
    found = _json(files, "weights.json")
    stated = {key: found.get(key) for key in ("task", "method", "epsilon", "seed")}
    wanted = {"task": cell.task, "method": cell.method, "epsilon": cell.epsilon, "seed": cell.seed}
    if stated != wanted or list(found.get("weights", {})) != axes:
        raise UserError(
            f"weights.json: stated {stated}, derived {wanted}, with one weight for each of {len(axes)} axes"
        )
    _on_simplex("weights.json", np.array([list(found["weights"].values())], dtype=np.float64))
    try:
        table = pq.ParquetFile(io.BytesIO(files["trajectory.parquet"])).read()
        rows = np.stack([table[name].to_numpy() for name in axes], axis=1)
    except (pa.ArrowException, KeyError, TypeError):
        raise UserError("trajectory.parquet: not a readable table with one column for each axis") from None
    _on_simplex("trajectory.parquet", rows)
    weights = np.array(list(found["weights"].values()))
    derived = _final(rows, config)
    if not np.allclose(weights, derived, rtol=CLOSE, atol=CLOSE):
        raise UserError(f"weights.json: stated {weights.tolist()}, derived from the trajectory {derived.tolist()}")
    return f"the {len(axes)} mixture weights lie on the simplex and follow from their {len(rows)} iterates"


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


def _metrics(files: dict[str, bytes], config: Config) -> str:
    metrics, limits = _json(files, "metrics.json"), {"loss": config.evaluation.loss_bound, "accuracy": 1.0, "auc": 1.0}
    if set(metrics) != set(limits):
        raise UserError(f"metrics.json: has {sorted(metrics)}, must have {sorted(limits)}")
    for name, limit in limits.items():
        value, error = metrics[name]["value"], metrics[name]["noise_standard_error"]
        if not (0 <= value <= limit and 0 <= error < np.inf):
            raise UserError(f"metrics.json: {name}: stated {value} ± {error}, must lie in [0, {limit:g}]")
    return "the charged metrics lie in their ranges, each with the standard error of its noise"
