"""Measuring a model on sensitive records for a price: loss, accuracy and AUC from one noisy vector.

Each unit contributes one vector of three blocks, each of norm at most 1:

    clipped loss / bound  |  share of records classified correctly  |  histogram of (label, predicted probability)

averaged over the unit's records and divided by sqrt 3, so its norm is at most 1 whatever the data. The noisy sum over
units is released ONCE by a full-batch ``GridGaussian``; everything here after it is post-processing.
"""

from __future__ import annotations

import math

import numpy as np

BLOCKS = 3


def unit_vectors(
    logits: np.ndarray, labels: np.ndarray, units: tuple[int, np.ndarray], bound: float, bins: int
) -> np.ndarray:
    """Return each unit's contribution: float64 of shape (units, 2 + 2 * bins), norms at most 1.

    Args:
        logits: one per record, shape (n,).
        labels: 1, 0 or NaN (contributes zero), shape (n,).
        units: number of units and each record's unit index.
        bound: a record's loss is clipped to this.
        bins: bins of the predicted probability.
    """
    usable = np.isfinite(logits) & np.isfinite(labels)
    z, y = np.where(usable, logits, 0.0).astype(np.float64), np.where(usable, labels, 0.0)
    losses = np.logaddexp(0.0, np.where(y == 1, -z, z))
    rows = np.zeros((len(z), 2 + 2 * bins))
    rows[:, 0] = np.minimum(losses, bound) / bound
    rows[:, 1] = (z > 0) == (y == 1)
    place = np.minimum((bins / (1 + np.exp(-np.clip(z, -700, 700)))).astype(int), bins - 1)
    rows[np.arange(len(z)), 2 + bins * (y == 1) + place] = 1.0
    rows[~usable] = 0.0
    count, index = units
    total = np.zeros((count, rows.shape[1]))
    np.add.at(total, index, rows)
    # Divided by all records of the unit, so that one without a label only makes the vector shorter.
    return total / np.maximum(np.bincount(index, minlength=count), 1)[:, None] / math.sqrt(BLOCKS)


def metrics(released: np.ndarray, noise_std: float, bound: float, draws: int = 2000) -> dict[str, dict[str, float]]:
    """Return loss, accuracy and AUC with the standard error that the noise causes.

    Args:
        released: the noisy sum of :func:`unit_vectors`.
        noise_std: deviation of its noise, a public number.
        bound: as in :func:`unit_vectors`.
        draws: simulated noise vectors (public randomness) behind the standard errors.
    """
    values = _estimate(released[None], bound)
    generator = np.random.default_rng(0)
    spread = _estimate(released + generator.normal(0, noise_std, (draws, len(released))), bound)
    return {
        name: {"value": float(values[name][0]), "noise_standard_error": float(np.std(spread[name]))} for name in values
    }


def _estimate(sums: np.ndarray, bound: float) -> dict[str, np.ndarray]:
    """Return the metrics of noisy sums of shape (m, 2 + 2 * bins)."""
    sums = sums * math.sqrt(BLOCKS)
    bins = (sums.shape[1] - 2) // 2
    negative, positive = sums[:, 2 : 2 + bins], sums[:, 2 + bins :]
    units = np.maximum(negative.sum(axis=1) + positive.sum(axis=1), 1.0)
    negative, positive = np.maximum(negative, 0), np.maximum(positive, 0)
    below = np.cumsum(negative, axis=1) - negative / 2
    pairs = positive.sum(axis=1) * negative.sum(axis=1)
    auc = np.where(pairs > 0, (positive * below).sum(axis=1) / np.maximum(pairs, 1e-300), 0.5)
    return {
        "loss": np.clip(sums[:, 0] / units, 0, 1) * bound,
        "accuracy": np.clip(sums[:, 1] / units, 0, 1),
        "auc": auc,
    }
