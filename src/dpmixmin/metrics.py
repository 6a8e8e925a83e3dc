"""Scores of a model's outputs. No torch."""

from __future__ import annotations

import numpy as np


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the area under the ROC curve: the chance that a positive outscores a negative, ties counting half.

    Args:
        labels: 1 or 0, shape (n,); rows with NaN in either argument are left out.
        scores: shape (n,).

    Returns:
        In [0, 1]; 0.5 where one class is missing.
    """
    from scipy.stats import rankdata

    usable = np.isfinite(labels) & np.isfinite(scores)
    y, ranks = labels[usable] == 1, rankdata(scores[usable])
    positives, negatives = int(y.sum()), int((~y).sum())
    if not positives or not negatives:
        return 0.5
    return float((ranks[y].sum() - positives * (positives + 1) / 2) / (positives * negatives))
