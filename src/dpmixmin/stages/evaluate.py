"""Measure on the test part: study only, not for release.

Reads: every model and mixture of one task, the sensitive table and the splits (test part). Writes:
``study/metrics/task=…/metrics.parquet``, one row per number: AUC before and after fine-tuning, cosine and L1 of
mixture weights to the non-private ones, the weights themselves, the epsilon spent.
"""

from __future__ import annotations

import torch

from dpmixmin.cells import Cell
from dpmixmin.config import Config
from dpmixmin.data.records import Records
from dpmixmin.measuring import measure
from dpmixmin.metrics import auc
from dpmixmin.models import networks
from dpmixmin.paths import Paths


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--task", required=True, help="sensitive task")


def run(config: Config, args) -> None:
    """Measure every cell of one task."""
    torch.set_num_threads(config.threads)
    paths = Paths(config.experiment)

    def values(cell: Cell, records: Records) -> dict[str, float]:
        model = networks.build(config.inputs, records.features.shape[1], config.pretrain, 1, 0)
        networks.load_state(model, cell.folder(paths))
        logits = networks.predict(model, torch.from_numpy(records.features))[:, 0].numpy()
        return {"auc": auc(records.label(config.tasks[args.task]), logits)}

    measure(config, args.task, "evaluate", values)
