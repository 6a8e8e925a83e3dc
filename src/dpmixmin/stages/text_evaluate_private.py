"""Measure a fine-tuned language model on the test part, for a price.

Reads: the fine-tuned model, the sensitive table and the split (test part). Writes, per cell, ``metrics.json`` (loss:
mean over users of their loss per token; perplexity_user: exp of it; each with the standard error of its noise),
``released.json``, ``privacy.json``, ``manifest.json`` in ``released/``.
Spends: one ledger entry on the test part, disjoint from the others: at the chain's epsilon the total stays the same.
"""

from __future__ import annotations

import numpy as np
import torch

from dpmixmin import evaluation
from dpmixmin.cells import Cell
from dpmixmin.config import Config
from dpmixmin.data import corpora
from dpmixmin.data.text_records import TextRecords
from dpmixmin.measuring_charged import measure
from dpmixmin.models.language import load
from dpmixmin.models.scoring import score_by_unit
from dpmixmin.paths import Paths


def add_arguments(parser) -> None:
    """Nothing to add: a deployment has one model."""


def run(config: Config, args) -> None:
    """Measure every evaluation cell."""
    torch.set_num_threads(config.threads)

    def unit_vectors(cell: Cell, folder: str, records: TextRecords) -> np.ndarray:
        corpora.check_tokenizer(Paths(config.experiment), folder)
        scores = score_by_unit(load(folder), records, config.text)
        return evaluation.text_vectors(scores, records.units(), config.evaluation.loss_bound)

    measure(config, "text_evaluate_private", ("text_records", "split"), unit_vectors)
