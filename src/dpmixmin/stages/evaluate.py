"""Measure on the test part: study only, not for release.

Reads: every model and mixture of one task, the sensitive table and the splits (test part). Writes:
``study/metrics/task=…/metrics.parquet``, one row per number: AUC before and after fine-tuning, cosine and L1 of
mixture weights to the non-private ones, the weights themselves, the epsilon spent.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from dpmixmin import artifacts, provenance
from dpmixmin.cells import Cell, cells_of, mixture_cell
from dpmixmin.config import Config
from dpmixmin.data import split
from dpmixmin.data.fetch import say
from dpmixmin.data.records import Records
from dpmixmin.metrics import auc
from dpmixmin.mixing.learners import closeness
from dpmixmin.models import networks
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import Ledger, Study

COLUMNS = {"experiment": pa.string(), "task": pa.string(), "method": pa.string(), "learner": pa.string(),
           "mechanism": pa.string(), "epsilon": pa.float64(), "seed": pa.int64(), "stage": pa.string(),
           "metric": pa.string(), "value": pa.float64()}  # fmt: skip


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--task", required=True, help="sensitive task")


def cells_for(config: Config, task: str) -> list[Cell]:
    """Return the cells that the task's evaluation reads: its own, and those that serve every task."""
    return [cell for cell in cells_of(config) if cell.task in ("", task)]


def run(config: Config, args) -> None:
    """Measure every cell of one task."""
    torch.set_num_threads(config.threads)
    paths, task = Paths(config.experiment), args.task
    cells = cells_for(config, task)
    parents = [artifacts.parent(cell.folder(paths)) for cell in cells]
    rows: list[dict] = []
    ledger = Ledger.of(config)
    with ledger.open(("test",), Study(f"test metrics of {task}")) as access:
        parents += [access.parent(paths.records())]
        tests = {}
        for seed in config.seeds:
            records = split.open_part(access, paths, split.partition(ledger.keys, config.private, seed), seed)
            tests[seed] = (records, records.label(config.tasks[task]))
            parents.append(access.parent(paths.split(seed)))
    for cell in cells:
        if cell.stage == "mixture":
            rows += _mixture_rows(config, paths, cell, task)
            continue
        row = _row(config, cell, task, cell.seed, "auc", _model_auc(config, paths, cell, *tests[cell.seed]))
        rows.append(row)
        if cell.stage == "finetuned":
            guarantee = artifacts.read_json(f"{cell.folder(paths)}/privacy.json")["guarantee"]
            if guarantee is not None:
                rows.append(_row(config, cell, task, cell.seed, "epsilon_spent", guarantee["epsilon"]))
    manifest = artifacts.manifest(
        "evaluate",
        config=config.shown("evaluate", task),
        code=provenance.code_digest("evaluate"),
        parents=parents,
        cell={"task": task},
    )
    table = pa.Table.from_pylist(rows, schema=pa.schema(COLUMNS))
    artifacts.publish(paths.metrics(task), {"metrics.parquet": artifacts.parquet_bytes(table)}, manifest)
    say(f"{task}: {len(rows)} measurements")


def _mixture_rows(config: Config, paths: Paths, cell: Cell, task: str) -> list[dict]:
    """Compare a mixture with the non-private one of the same task and seed; uniform once a seed."""
    weights = _weights(config, paths, cell)
    rows = []
    for seed in config.seeds if cell.seed is None else (cell.seed,):
        values = {f"weight_{name}": float(value) for name, value in zip(config.axes, weights, strict=True)}
        if "mixmin" in config.methods:
            reference = mixture_cell(config, task, "mixmin", None, seed)
            values = {**closeness(weights, _weights(config, paths, reference)), **values}
        rows += [_row(config, cell, task, seed, metric, value) for metric, value in values.items()]
    return rows


def _weights(config: Config, paths: Paths, cell: Cell) -> np.ndarray:
    named = artifacts.read_json(f"{cell.folder(paths)}/weights.json")["weights"]
    return np.array([named[name] for name in config.axes])


def _model_auc(config: Config, paths: Paths, cell: Cell, records: Records, labels: np.ndarray) -> float:
    model = networks.build(config.inputs, records.features.shape[1], config.pretrain, 1, 0)
    networks.load_state(model, cell.folder(paths))
    logits = networks.predict(model, torch.from_numpy(records.features))[:, 0].numpy()
    return auc(labels, logits)


def _row(config: Config, cell: Cell, task: str, seed: int, metric: str, value: float) -> dict:
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
