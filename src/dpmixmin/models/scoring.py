"""Scoring records with a language model, the way the config says how long ones are read."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from dpmixmin.models.device import best
from dpmixmin.models.language import token_logprobs
from dpmixmin.text_sections import Text

if TYPE_CHECKING:
    from dpmixmin.data.text_records import TextRecords


def score(model, sequences: list[np.ndarray], text: Text) -> list[np.ndarray]:
    """Return log p of every token of each sequence, float32; sequences share batches.

    Args:
        model: GPT-2.
        sequences: token ids.
        text: context, stride, windows or truncation.
    """
    stride = text.stride or max(1, text.context // 2)
    return token_logprobs(model.to(best()), sequences, text.context, stride, text.long_records)


def score_by_unit(model, records: TextRecords, text: Text) -> list[np.ndarray]:
    """Return the same for sensitive records, which share batches with their own unit's only.

    In a common batch a record's last bits could depend on who else is there, and that would reach the integer grid of
    a release.

    Args:
        model: GPT-2.
        records: in the order of (unit, record).
        text: as in :func:`score`.
    """
    count, index = records.units()
    edges, found = np.searchsorted(index, np.arange(count + 1)), []
    for start, stop in pairwise(edges):
        found += score(model, records.tokens[start:stop], text)
    return found
