"""Choosing and writing fine-tuning settings, whatever the models are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dpmixmin import artifacts, provenance
from dpmixmin.config import Config
from dpmixmin.data.fetch import say
from dpmixmin.paths import Paths
from dpmixmin.tuning import chosen_by

KEYS = {"learning_rate": pa.float64(), "steps": pa.int64(), "batch": pa.int64(), "clip": pa.float64()}
"""What a candidate is made of; all empty is `do not fine-tune`."""


def row(method: str, candidate: dict | None, task: str, **score: float) -> dict:
    """Return one row of the curve; ``candidate`` None is `do not fine-tune`."""
    return {"method": method, **(candidate or dict.fromkeys(KEYS)), "standin_task": task, **score}


def write(config: Config, method: str, stage: str, rows: Sequence[dict], metric: str, parents: Sequence[dict]) -> None:
    """Write one method's choice with its curve; without rows, what the config declares.

    Args:
        config: the experiment.
        method: whose settings these are.
        stage: name of the stage, for its code.
        rows: from :func:`row`.
        metric: auc (the largest mean is chosen) or perplexity (the smallest mean logarithm).
        parents: of the artefact.
    """
    declared = config.finetune.settings is not None
    choice = config.finetune.settings.model_dump() if declared else _best(rows, metric)
    say(f"{method}: " + ("do not fine-tune" if choice is None else str(choice)))
    settings = {
        "chosen_by": chosen_by(config, declared=declared),
        "method": method,
        "choice": choice,
        "epsilon": config.tune.epsilon,
        "note": "choice null means: do not fine-tune; release the pretrained model",
    }
    columns = {"method": pa.string(), **KEYS, "standin_task": pa.string(), metric: pa.float64()}
    manifest = artifacts.manifest(
        "tune_finetune",
        config=config.shown("tune_finetune"),
        code=provenance.code_digest(stage),
        parents=list(parents),
        cell={"method": method},
        seed=config.tune.seed,
    )
    curve = artifacts.parquet_bytes(pa.Table.from_pylist(list(rows), schema=pa.schema(columns)))
    files = {"settings.json": artifacts.json_bytes(settings), "curve.parquet": curve}
    artifacts.publish(Paths(config.experiment).finetune_settings(method), files, manifest)


def _best(rows: Sequence[dict], metric: str) -> dict | None:
    """Return the best candidate on average over stand-in tasks; None is `do not fine-tune`."""
    scores: dict[tuple, list[float]] = {}
    for one in rows:
        value = one[metric] if metric == "auc" else -np.log(one[metric])
        scores.setdefault(tuple(one[key] for key in KEYS), []).append(float(value))
    best = max(scores, key=lambda candidate: float(np.nan_to_num(np.mean(scores[candidate]), nan=-np.inf)))
    return None if best[0] is None else dict(zip(KEYS, best, strict=True))
