"""Measuring a study: every model and mixture of one task, on its test part. What all kinds of models share.

Uncharged, so its output goes to ``study/`` and is never released: ``metrics.parquet``, one row per number.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from dpmixmin import artifacts, provenance
from dpmixmin.cells import Cell, cells_of, mixture_cell
from dpmixmin.config import Config
from dpmixmin.data import split
from dpmixmin.data.fetch import say
from dpmixmin.mixing.learners import closeness
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import Ledger, Study

COLUMNS = {"experiment": pa.string(), "task": pa.string(), "method": pa.string(), "learner": pa.string(),
           "mechanism": pa.string(), "epsilon": pa.float64(), "seed": pa.int64(), "stage": pa.string(),
           "metric": pa.string(), "value": pa.float64()}  # fmt: skip


def cells_for(config: Config, task: str) -> list[Cell]:
    """Return the cells that the task's evaluation reads: its own, and those that serve every task."""
    return [cell for cell in cells_of(config) if cell.task in ("", task)]


def measure(config: Config, task: str, stage: str, model_values: Callable[[Cell, object], dict[str, float]]) -> None:
    """Measure every cell of one task and write the table.

    Args:
        config: the experiment.
        task: sensitive task.
        stage: name of the stage, for its code.
        model_values: gives the metrics of a model cell on the records of its seed's test part.
    """
    paths = Paths(config.experiment)
    cells = cells_for(config, task)
    parents = [artifacts.parent(cell.folder(paths)) for cell in cells]
    rows: list[dict] = []
    ledger = Ledger.of(config)
    with ledger.open(("test",), Study(f"test metrics of {task}")) as access:
        parents += [access.parent(paths.records())]
        tests = {}
        for seed in config.seeds:
            wanted = split.partition(ledger.keys, config.private, seed)
            tests[seed] = split.open_part(access, paths, wanted, seed)
            parents.append(access.parent(paths.split(seed)))
    for cell in cells:
        if cell.stage == "mixture":
            rows += _mixture_rows(config, paths, cell, task)
            continue
        values = model_values(cell, tests[cell.seed])
        rows += [_row(config, cell, task, cell.seed, metric, value) for metric, value in values.items()]
        if cell.stage == "finetuned":
            guarantee = artifacts.read_json(f"{cell.folder(paths)}/privacy.json")["guarantee"]
            if guarantee is not None:
                rows.append(_row(config, cell, task, cell.seed, "epsilon_spent", guarantee["epsilon"]))
    manifest = artifacts.manifest(
        "evaluate",
        config=config.shown("evaluate", task),
        code=provenance.code_digest(stage),
        parents=parents,
        cell={"task": task},
    )
    table = pa.Table.from_pylist(rows, schema=pa.schema(COLUMNS))
    artifacts.publish(paths.metrics(task), {"metrics.parquet": artifacts.parquet_bytes(table)}, manifest)
    say(f"{task}: {len(rows)} measurements")


def _mixture_rows(config: Config, paths: Paths, cell: Cell, task: str) -> list[dict]:
    """Compare a mixture with the non-private one of the same task and seed; public ones once a seed."""
    weights = _weights(paths, cell)
    rows = []
    for seed in config.seeds if cell.seed is None else (cell.seed,):
        values = {f"weight_{name}": value for name, value in weights.items()}
        if "mixmin" in config.methods:
            reference = _weights(paths, mixture_cell(config, task, "mixmin", None, seed))
            pair = (np.array(list(one.values())) for one in (weights, {name: reference[name] for name in weights}))
            values = {**closeness(*pair), **values}
        rows += [_row(config, cell, task, seed, metric, value) for metric, value in values.items()]
    return rows


def _weights(paths: Paths, cell: Cell) -> dict[str, float]:
    return artifacts.read_json(f"{cell.folder(paths)}/weights.json")["weights"]


def _row(config: Config, cell: Cell, task: str, seed: int | None, metric: str, value: float) -> dict:
    return {
        "experiment": config.experiment,
        "task": task,
        "method": cell.method,
        "learner": cell.learner,
        "mechanism": cell.mechanism,
        "epsilon": cell.epsilon,
        "seed": seed,
        "stage": cell.stage,
        "metric": metric,
        "value": float(value),
    }
