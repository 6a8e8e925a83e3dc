"""Measure the fine-tuned model on the test part, for a price: what a deployment may know about its own model.

Reads: the fine-tuned model, the sensitive table and the split (test part). Writes, per cell, ``metrics.json`` (loss,
accuracy, AUC, each with the standard error of its noise), ``privacy.json``, ``manifest.json`` in ``released/``.
Spends: one ledger entry on the test part, disjoint from the others: at the chain's epsilon the total stays the same.
"""

from __future__ import annotations

import numpy as np
import torch

from dpmixmin import evaluation
from dpmixmin.cells import Cell
from dpmixmin.config import Config
from dpmixmin.data.records import Records
from dpmixmin.measuring_charged import measure
from dpmixmin.models import networks


def add_arguments(parser) -> None:
    """Nothing to add: a deployment has one model."""


def run(config: Config, args) -> None:
    """Measure every evaluation cell."""
    torch.set_num_threads(config.threads)
    options = config.evaluation

    def unit_vectors(cell: Cell, folder: str, records: Records) -> np.ndarray:
        model = networks.build(config.inputs, records.features.shape[1], config.pretrain, 1, 0)
        networks.load_state(model, folder)
        # One record at a time: in a batch, a record's last bits could depend on how many others there are.
        logits = networks.predict(model, torch.from_numpy(records.features), batch=1)[:, 0].numpy()
        labels = records.label(config.tasks[cell.task])
        return evaluation.unit_vectors(logits, labels, records.units(), options.loss_bound, options.bins)

    measure(config, "evaluate_private", ("records", "split"), unit_vectors)
