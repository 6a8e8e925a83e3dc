"""Measure a fine-tuned language model on the test part, for a price.

Reads: the fine-tuned model, the sensitive table and the split (test part). Writes, per cell, ``metrics.json`` (loss:
mean over users of their loss per token; perplexity_user: exp of it; each with the standard error of its noise),
``released.json``, ``privacy.json``, ``manifest.json`` in ``released/``.
Spends: one ledger entry on the test part, disjoint from the others: at the chain's epsilon the total stays the same.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from dpmixmin import evaluation
from dpmixmin.cells import Cell
from dpmixmin.config import Config
from dpmixmin.data.text_records import TextRecords
from dpmixmin.measuring_charged import measure
from dpmixmin.models import language
from dpmixmin.text_sections import Text


def add_arguments(parser) -> None:
    """Nothing to add: a deployment has one model."""


def run(config: Config, args) -> None:
    """Measure every evaluation cell."""
    torch.set_num_threads(config.threads)

    def unit_vectors(cell: Cell, folder: str, records: TextRecords) -> np.ndarray:
        scores = by_unit(language.load(folder), records, config.text)
        return evaluation.text_vectors(scores, records.units(), config.evaluation.loss_bound)

    measure(config, "text_evaluate_private", ("text_records", "split"), unit_vectors)


def by_unit(model, records: TextRecords, text: Text) -> list[np.ndarray]:
    """Return every record's token log-probabilities, computed unit by unit.

    In a common batch, a record's last bits could depend on who else is there, and that would reach the integer grid.

    Args:
        model: GPT-2.
        records: in the order of (unit, record).
        text: how long records are read.
    """
    count, index = records.units()
    starts, scores = np.searchsorted(index, np.arange(count + 1)), []
    for start, stop in pairwise(starts):
        tokens = records.tokens[start:stop]
        scores += language.token_logprobs(
            model, tokens, text.context, text.stride or text.context // 2, text.long_records
        )
    return scores
