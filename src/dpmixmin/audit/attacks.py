"""A test of which world a run came from: one score of the run, a threshold, and the side that means "with".

Statistic, threshold and side are all chosen on the SELECT half of the runs, by the bound that they give there, and
errors are counted on the EVAL half. The choice may thus be as greedy as it likes: the bounds of ``bounds.py`` hold for
a test that was fixed before the runs that are counted, and need no correction for the tests that were tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dpmixmin.audit.bounds import Errors, dp_epsilon, gaussian_shift, tail_of, upper_ends

Worlds = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Statistic to its scores (without the canary, with it), shapes (runs,) each; numbers, infinite ones too, not NaN."""

OBJECTIVES = ("dp", "gaussian")

CONFIDENCE = 0.999
"""Of the bound that the choice maximises. At 0.95, the best of a thousand thresholds is where chance was kindest: with
1000 runs a world of a Gaussian of epsilon 1, the 95 % bound on the EVAL half then has a median of 0.05, and of 0.10
with these wider ends. Larger still gains little, and loses where the canary shows in a few runs only."""


@dataclass(frozen=True)
class Attack:
    """Reads "with" exactly where ``(score > threshold) == above_means_with``.

    Attributes:
        statistic: name of the score.
        threshold: a number, between two scores of the SELECT half wherever float64 has one.
        above_means_with: the side.
    """

    statistic: str
    threshold: float
    above_means_with: bool


def choose(select: Worlds, delta: float, objective: str = "dp") -> Attack:
    """Return the best of all statistics, thresholds and sides on the SELECT half.

    Ties, as where no test shows any epsilon, go to the test of largest Gaussian mu, then to the first.

    Args:
        select: at least one statistic.
        delta: of the ``dp`` objective, in [0, 1).
        objective: the bound to maximise at CONFIDENCE: ``dp`` or ``gaussian``.

    Raises:
        ValueError: no statistic, an unknown objective, scores of another shape, or a NaN.
    """
    if not select or objective not in OBJECTIVES:
        raise ValueError(f"needs a statistic and one of the objectives {', '.join(OBJECTIVES)}, got {objective!r}")
    candidates = [_best(name, *_checked(*scores), delta, objective) for name, scores in select.items()]
    return max(candidates, key=lambda candidate: candidate[:2])[2]


def count(attack: Attack, evaluate: Worlds) -> Errors:
    """Return what the attack gets wrong on the EVAL half.

    Raises:
        KeyError: the attack's statistic is not among the scores.
        ValueError: scores of another shape, or a NaN.
    """
    without, with_canary = _checked(*evaluate[attack.statistic])
    positives = [
        int(np.count_nonzero((scores > attack.threshold) == attack.above_means_with))
        for scores in (without, with_canary)
    ]
    return Errors(positives[0], without.size, with_canary.size - positives[1], with_canary.size)


def curve(without: np.ndarray, with_canary: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the error rates of every test "with means a score above the threshold", for a figure.

    Args:
        without: scores of the world without the canary, shape (runs,), at least one.
        with_canary: scores of the other world, shape (runs,), at least one.

    Returns:
        (fpr, fnr): one entry for each set of runs that a threshold cuts off, from (0, 1), nothing, to (1, 0), all.
    """
    without, with_canary = _checked(without, with_canary)
    values = np.unique(np.concatenate([without, with_canary]))[::-1]
    positives, negatives = _above(without, values), with_canary.size - _above(with_canary, values)
    fpr, fnr = positives / without.size, negatives / with_canary.size
    return np.append(fpr, 1.0), np.append(fnr, 0.0)


# -- how --------------------------------------------------------------------------------------------------------------


def _checked(without: np.ndarray, with_canary: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    worlds = np.asarray(without, dtype=np.float64), np.asarray(with_canary, dtype=np.float64)
    if any(scores.ndim != 1 or np.isnan(scores).any() for scores in worlds):
        raise ValueError("scores must be of shape (runs,) and not NaN")
    return worlds


def _above(scores: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return how many scores lie above each value, strictly."""
    return scores.size - np.searchsorted(np.sort(scores), values, side="right")


def _best(
    name: str, without: np.ndarray, with_canary: np.ndarray, delta: float, objective: str
) -> tuple[float, float, Attack]:
    """Return (value of the objective, mu, attack) of the best threshold and side of one statistic."""
    # Cutting just above each distinct score makes every possible test, equal scores staying together; the last cuts
    # off nothing. A test that reads "with" always is the other side of that one.
    values = np.unique(np.concatenate([without, with_canary]))
    if not values.size:
        values = np.zeros(1)
    above = _above(without, values), _above(with_canary, values)
    # Sides as rows: above means with, below means with.
    positives = np.stack([above[0], without.size - above[0]])
    negatives = np.stack([with_canary.size - above[1], above[1]])
    tail = tail_of(CONFIDENCE)
    fpr, fnr = upper_ends(without.size, tail)[positives], upper_ends(with_canary.size, tail)[negatives]
    shift = gaussian_shift(fpr, fnr)
    value = shift if objective == "gaussian" else dp_epsilon(fpr, fnr, delta)
    side, cut = np.unravel_index(np.argmax(np.where(value == value.max(), shift, -np.inf)), shift.shape)
    attack = Attack(name, _between(values, int(cut)), above_means_with=bool(side == 0))
    return float(value[side, cut]), float(shift[side, cut]), attack


def _between(values: np.ndarray, cut: int) -> float:
    """Return a threshold that ``values[cut]`` does not exceed and ``values[cut + 1]`` does."""
    low = float(values[cut])
    if cut + 1 == len(values):
        return low
    high = float(values[cut + 1])
    middle = low / 2 + high / 2
    # Not between them where they are neighbouring floats, or infinite.
    return middle if low <= middle < high else low
