"""Membership inference on released models: how well a unit's loss tells whether it was trained on.

The attacks are the plain ones that need no model of their own, ``loss`` and ``likelihood_ratio`` (Yeom et al.
1709.01604; Carlini et al. 2112.03570 for why the true positive rate at a low false positive rate is shown beside the
AUC). They say what an outsider with the two models gets, which can be far less than what a guarantee has to cover: a
low AUC is no evidence for a claim, so nothing here is gated.

Members are units of the part that the model was fine-tuned on, others are units of a part that it never saw, and both
parts were drawn by the same keyed hash. All scores are numpy arrays, high where a unit looks like a member.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from dpmixmin.audit.bounds import upper
from dpmixmin.metrics import auc

RATES = (0.01, 0.001)
"""False positive rates at which the true positive rate is shown."""


@dataclass(frozen=True)
class Rate:
    """A true positive rate with its Clopper-Pearson interval.

    Attributes:
        value: share of the members above the threshold.
        low: lower end.
        high: upper end.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Membership:
    """What one score tells.

    Attributes:
        members: members with a finite score.
        others: others with one.
        auc: chance that a member outscores another, ties counting half; 0.5 where a side is empty.
        auc_low: lower end of its interval.
        auc_high: upper end.
        tpr: true positive rate at each of :data:`RATES`, None where there are too few others to see that rate, or no
            member. The threshold is the smallest with at most that share of THESE others above it; the interval takes
            it as given.
    """

    members: int
    others: int
    auc: float
    auc_low: float
    auc_high: float
    tpr: dict[float, Rate | None]


def statistics(released: np.ndarray, pretrained: np.ndarray) -> dict[str, np.ndarray]:
    """Return the scores of losses.

    Args:
        released: loss of each record or unit under the released model, shape (n,).
        pretrained: the same under the model before fine-tuning.

    Returns:
        ``loss``: minus the loss under the released model; ``likelihood_ratio``: how far fine-tuning lowered it.
    """
    return {"loss": -released, "likelihood_ratio": pretrained - released}


def by_unit(values: np.ndarray, units: tuple[int, np.ndarray]) -> np.ndarray:
    """Return each unit's mean over its records with a finite value, NaN where it has none.

    Args:
        values: of records, shape (n,).
        units: number of units and each record's unit index, as ``OfUnits.units`` gives them.
    """
    count, index = units
    usable = np.isfinite(values)
    sums = np.bincount(index[usable], values[usable], minlength=count)
    sizes = np.bincount(index[usable], minlength=count)
    return np.where(sizes > 0, sums / np.maximum(sizes, 1), np.nan)


def label_losses(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the cross-entropy of each record in nats, NaN where it has no label.

    Args:
        logits: of the positive class, shape (n,).
        labels: 1, 0 or NaN, shape (n,).
    """
    losses = np.logaddexp(0.0, np.where(labels == 1, -1.0, 1.0) * np.asarray(logits, dtype=np.float64))
    return np.where(np.isnan(labels), np.nan, losses)


def text_losses(scores: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean loss per token of each record in nats, NaN for a record without tokens.

    Args:
        scores: log-probabilities of each record's tokens (``models/scoring.py``).
    """
    return np.array([-part.mean(dtype=np.float64) if len(part) else np.nan for part in scores], dtype=np.float64)


def attack(
    members: dict[str, np.ndarray], others: dict[str, np.ndarray], confidence: float = 0.95
) -> dict[str, Membership]:
    """Measure every score.

    Args:
        members: score's name to values, from :func:`statistics`; values that are not finite are left out.
        others: the same names.
        confidence: of every interval, each alone.
    """
    return {name: _measured(members[name], others[name], confidence) for name in members}


def _measured(members: np.ndarray, others: np.ndarray, confidence: float) -> Membership:
    members, others = members[np.isfinite(members)], others[np.isfinite(others)]
    labels = np.concatenate([np.ones(len(members)), np.zeros(len(others))])
    area = auc(labels, np.concatenate([members, others]))
    tpr = {rate: _at(members, others, rate, confidence) for rate in RATES}
    return Membership(len(members), len(others), area, *auc_interval(members, others, confidence), tpr)


def _at(members: np.ndarray, others: np.ndarray, rate: float, confidence: float) -> Rate | None:
    """Return the true positive rate at a false positive rate."""
    allowed = int(len(others) * rate)
    if not allowed or not len(members):
        return None
    threshold = np.partition(others, len(others) - 1 - allowed)[len(others) - 1 - allowed]
    found, tail = int((members > threshold).sum()), (1 - confidence) / 2
    return Rate(
        found / len(members),
        1 - upper(len(members) - found, len(members), tail),
        upper(found, len(members), tail),
    )


def auc_interval(members: np.ndarray, others: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """Return an interval for the AUC: DeLong's variance (Biometrics 44, 1988, pages 837-845), on the logit scale.

    It assumes neither a law of the scores nor that both sides spread alike, but it is for large samples: near AUC 1
    its coverage falls below the nominal one. Where one side is above the other throughout, the variance is zero, and
    the end is the exact one for the independent pairs that the smaller side has: all of them agree.

    Args:
        members: scores, finite.
        others: scores, finite.
        confidence: two-sided.

    Returns:
        In [0, 1]; (0, 1) where a side has fewer than two scores.
    """
    from scipy.stats import rankdata

    m, n, tail = len(members), len(others), (1 - confidence) / 2
    if min(m, n) < 2:
        return 0.0, 1.0
    ranks = rankdata(np.concatenate([members, others]))
    # Share of the other side that each score beats.
    above = (ranks[:m] - rankdata(members)) / n
    below = 1 - (ranks[m:] - rankdata(others)) / m
    area = float(above.mean())
    if area in (0, 1):
        exact = tail ** (1 / min(m, n))
        return (exact, 1.0) if area else (0.0, 1 - exact)
    deviation = math.sqrt(above.var(ddof=1) / m + below.var(ddof=1) / n)
    reach = NormalDist().inv_cdf(1 - tail) * deviation / (area * (1 - area))
    ends = (math.log(area / (1 - area)) + sign * reach for sign in (-1, 1))
    low, high = (0.5 + 0.5 * math.tanh(end / 2) for end in ends)
    return low, high
