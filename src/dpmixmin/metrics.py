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


def perplexities(scores: list[np.ndarray], units: tuple[int, np.ndarray]) -> dict[str, float]:
    """Return the perplexity of a text's tokens, and the one that counts every unit alike.

    Args:
        scores: each record's token log-probabilities.
        units: number of units and each record's unit index.

    Returns:
        ``perplexity``: exp of the mean loss over all tokens. ``perplexity_user``: exp of the mean over units of the
        unit's mean loss per token. Units without a token are left out; NaN where none has one.
    """
    count, index = units
    loss = np.bincount(index, weights=[-float(part.sum(dtype=np.float64)) for part in scores], minlength=count)
    tokens = np.bincount(index, weights=[len(part) for part in scores], minlength=count)
    some = tokens > 0
    if not some.any():
        return {"perplexity": float("nan"), "perplexity_user": float("nan")}
    return {
        "perplexity": float(np.exp(loss.sum() / tokens.sum())),
        "perplexity_user": float(np.exp((loss[some] / tokens[some]).mean())),
    }
