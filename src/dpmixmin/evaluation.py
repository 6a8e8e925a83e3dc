"""Measuring a model on sensitive records for a price: its metrics from one noisy vector.

Each unit contributes one vector of blocks of norm at most 1. Of labels three, averaged over the unit's records:

    clipped loss / bound  |  share of records classified correctly  |  histogram of (label, predicted probability)

Of texts two, of all the unit's tokens together:

    clipped mean loss per token / bound  |  1, for being there

Divided by the root of the number of blocks, its norm is at most 1 whatever the data. The noisy sum over units is
released ONCE by a full-batch ``GridGaussian``; everything here after it is post-processing. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from dpmixmin.config import Config

BLOCKS, TEXT_BLOCKS = 3, 2

Metrics = dict[str, dict[str, float]]
"""Name of a metric to its ``value`` and the ``noise_standard_error``."""


def dimension(config: Config) -> int:
    """Return the number of coordinates of a unit's vector."""
    return TEXT_BLOCKS if config.text else 2 + 2 * config.evaluation.bins


def metrics_of(config: Config, released: np.ndarray, noise_std: float) -> Metrics:
    """Return the metrics of a deployment's model from the noisy sum: :func:`metrics` or :func:`text_metrics`."""
    return (text_metrics if config.text else metrics)(released, noise_std, config.evaluation.loss_bound)


# -- labels -----------------------------------------------------------------------------------------------------


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


def metrics(released: np.ndarray, noise_std: float, bound: float, draws: int = 2000) -> Metrics:
    """Return loss, accuracy and AUC with the standard error that the noise causes.

    Args:
        released: the noisy sum of :func:`unit_vectors`.
        noise_std: deviation of its noise, a public number.
        bound: as in :func:`unit_vectors`.
        draws: simulated noise vectors (public randomness) behind the standard errors.
    """
    return _with_errors(_estimate, released, noise_std, bound, draws)


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


# -- texts ------------------------------------------------------------------------------------------------------


def text_vectors(scores: Sequence[np.ndarray], units: tuple[int, np.ndarray], bound: float) -> np.ndarray:
    """Return each unit's contribution: float64 of shape (units, 2), norms at most 1.

    A unit without a token, or with a value that is not finite, contributes zero (rule 6): it is not counted.

    Args:
        scores: log-probabilities of each record's tokens, in nats.
        units: number of units and each record's unit index.
        bound: a unit's mean loss per token is clipped to [0, bound].
    """
    count, index = units
    finite = np.array([np.isfinite(values).all() for values in scores], dtype=bool)
    # A loss that is not finite is not even added up: the warning would tell of it.
    losses = [-np.sum(values, dtype=np.float64) if ok else 0.0 for values, ok in zip(scores, finite, strict=True)]
    loss, tokens = np.zeros(count), np.zeros(count)
    np.add.at(loss, index, losses)
    np.add.at(tokens, index, [len(values) for values in scores])
    usable = tokens > 0
    usable[index[~finite]] = False
    rows = np.zeros((count, TEXT_BLOCKS))
    # In [-1, 1] and not in [0, 1]: twice the signal under the same noise.
    rows[usable, 0] = 2 * np.clip(loss[usable] / tokens[usable], 0, bound) / bound - 1
    rows[usable, 1] = 1.0
    return rows / math.sqrt(TEXT_BLOCKS)


def text_metrics(released: np.ndarray, noise_std: float, bound: float, draws: int = 2000) -> Metrics:
    """Return the mean over units of the loss per token, and exp of it, with the standard errors that the noise causes.

    The law of ``perplexity_user`` is skewed; its standard error is the deviation of simulated values all the same.

    Args:
        released: the noisy sum of :func:`text_vectors`.
        noise_std: deviation of its noise, a public number.
        bound: as in :func:`text_vectors`; no loss above it can be measured.
        draws: simulated noise vectors (public randomness) behind the standard errors.
    """
    return _with_errors(_text_estimate, released, noise_std, bound, draws)


def _text_estimate(sums: np.ndarray, bound: float) -> dict[str, np.ndarray]:
    """Return the metrics of noisy sums of shape (m, 2)."""
    sums = sums * math.sqrt(TEXT_BLOCKS)
    mean = np.clip(sums[:, 0] / np.maximum(sums[:, 1], 1.0), -1, 1)
    loss = (mean + 1) / 2 * bound
    return {"loss": loss, "perplexity_user": np.exp(loss)}


# -- both -------------------------------------------------------------------------------------------------------


def _with_errors(
    estimate: Callable[[np.ndarray, float], dict[str, np.ndarray]],
    released: np.ndarray,
    noise_std: float,
    bound: float,
    draws: int,
) -> Metrics:
    """Return what is estimated from a noisy sum, and how far as much noise again moves each of it."""
    values = estimate(released[None], bound)
    noise = np.random.default_rng(0).normal(0, noise_std, (draws, len(released)))
    spread = estimate(released + noise, bound)
    return {
        name: {"value": float(values[name][0]), "noise_standard_error": float(np.std(spread[name]))} for name in values
    }
