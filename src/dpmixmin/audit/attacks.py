"""Choosing an attack on one half of the runs, and counting its errors on the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpmixmin.audit.bounds import Errors, dp_epsilons, gaussian_mus, uppers

Scores = dict[str, tuple[np.ndarray, np.ndarray]]
"""Statistic to its values in the two worlds, without and with the canary; each of shape (runs,)."""


@dataclass(frozen=True)
class Attack:
    """A test: says "with" where a statistic is above (or below) a threshold.

    Attributes:
        statistic: its name.
        threshold: compared with the statistic.
        above_means_with: whether above the threshold means "with".
    """

    statistic: str
    threshold: float
    above_means_with: bool


def choose(select: Scores, delta: float, objective: str = "dp") -> Attack:
    """Return the attack with the largest bound on the SELECT half.

    Bounds at single thresholds are noisy, and the largest of many is large by chance: it is the mean over a twentieth
    of all thresholds that is maximised. Of a tight mechanism at epsilon 1 that raises the median bound on the other
    half from 0.06 to 0.10, and never matters where an attack is clearly right.

    Args:
        select: the half that chooses.
        delta: of the bound.
        objective: dp or gaussian, the bound that is maximised.
    """
    best, found = -np.inf, None
    for name, (without, with_canary) in select.items():
        for above in (True, False):
            sign = 1 if above else -1
            thresholds, fpr, fnr = _errors(sign * without, sign * with_canary)
            values = _smoothed(_bounds(fpr, fnr, len(without), len(with_canary), delta, objective))
            place = int(values.argmax())
            if values[place] > best:
                best, found = values[place], Attack(name, float(sign * thresholds[place]), above)
    return found


def count(attack: Attack, evaluate: Scores) -> Errors:
    """Return the errors of an attack on the EVAL half."""
    without, with_canary = evaluate[attack.statistic]
    sign = 1 if attack.above_means_with else -1
    threshold = sign * attack.threshold
    positives = int((sign * without > threshold).sum())
    negatives = int((sign * with_canary <= threshold).sum())
    return Errors(positives, len(without), negatives, len(with_canary))


def curve(without: np.ndarray, with_canary: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return false positive and false negative rates at every threshold, for a figure."""
    _, fpr, fnr = _errors(without, with_canary)
    return fpr / len(without), fnr / len(with_canary)


def _errors(without: np.ndarray, with_canary: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return thresholds between distinct values, and the false positives and negatives at each."""
    values = np.unique(np.concatenate([without, with_canary]))
    thresholds = np.concatenate([[values[0] - 1], (values[:-1] + values[1:]) / 2, [values[-1] + 1]])
    positives = len(without) - np.searchsorted(np.sort(without), thresholds, side="right")
    negatives = np.searchsorted(np.sort(with_canary), thresholds, side="right")
    return thresholds, positives, negatives


def _bounds(positives, negatives, without: int, with_canary: int, delta: float, objective: str) -> np.ndarray:
    """Return the 95 % bound at each threshold; of a Gaussian mu, of which epsilon is a monotone function."""
    fpr, fnr = uppers(positives, without, 0.025), uppers(negatives, with_canary, 0.025)
    return gaussian_mus(fpr, fnr) if objective == "gaussian" else dp_epsilons(fpr, fnr, delta)


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Return the running mean over a twentieth of the values; thresholds at which nothing is shown count as -5."""
    width = max(1, len(values) // 20)
    left = (width - 1) // 2
    padded = np.pad(np.maximum(values, -5.0), (left, width - 1 - left), mode="edge")
    sums = np.cumsum(np.concatenate([[0.0], padded]))
    return (sums[width:] - sums[:-width]) / width
