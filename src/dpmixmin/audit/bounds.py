"""Lower bounds on epsilon from the errors of a test between two worlds: D, and D with one unit more.

The test says "with" or "without". Its two error rates are known up to Clopper-Pearson limits that hold TOGETHER with
the stated confidence, so everything that is derived from one pair of limits holds with it too. The counts must come
from runs that did not choose the test. Sources: Jagielski et al. 2006.07709 and the DP-MixMin paper, A.8 (the bound
for any mechanism); Nasr et al. 2302.07956 and Dong et al. 1905.02383 (bounds by a trade-off curve).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv, ndtri

from dpmixmin.audit.tradeoff import Tradeoff
from dpmixmin.privacy.gaussian import gaussian_epsilon

SMALLEST_ALPHA = 1e-12
"""P-values are not told apart below this."""


@dataclass(frozen=True)
class Errors:
    """Counts of a test's errors.

    Attributes:
        false_positives: runs without the canary of which the test said "with".
        without: runs without the canary.
        false_negatives: runs with the canary of which it said "without".
        with_canary: runs with the canary.
    """

    false_positives: int
    without: int
    false_negatives: int
    with_canary: int

    def __post_init__(self):
        for errors, runs in ((self.false_positives, self.without), (self.false_negatives, self.with_canary)):
            if not 0 <= errors <= runs or runs < 1:
                raise ValueError("errors must be between 0 and the runs, and each world needs a run")


def uppers(errors: np.ndarray, trials: int, tail: float) -> np.ndarray:
    """Return Clopper-Pearson upper ends: the rates that give so few errors with probability ``tail``.

    Args:
        errors: counts, any shape.
        trials: at least 1.
        tail: in (0, 1).
    """
    found = betaincinv(errors + 1.0, np.maximum(trials - np.asarray(errors), 1), 1 - tail)
    return np.where(np.asarray(errors) >= trials, 1.0, found)


def upper(errors: int, trials: int, tail: float) -> float:
    """Return one of :func:`uppers`."""
    return float(uppers(errors, trials, tail))


def dp_epsilons(fpr: np.ndarray, fnr: np.ndarray, delta: float) -> np.ndarray:
    """Return the epsilon that two error rates imply for any mechanism, -inf where they imply nothing.

    (epsilon, delta)-DP asks 1 - FNR <= e^epsilon FPR + delta, and the same with the rates exchanged.
    """
    with np.errstate(divide="ignore"):
        one = np.log(np.maximum(1 - fnr - delta, 0.0) / fpr)
        return np.maximum(one, np.log(np.maximum(1 - fpr - delta, 0.0) / fnr))


def gaussian_mus(fpr: np.ndarray, fnr: np.ndarray) -> np.ndarray:
    """Return the mu of the Gaussian trade-off on which two error rates lie, -inf where a rate is 1."""
    return -ndtri(fpr) - ndtri(fnr)


def rates(errors: Errors, confidence: float = 0.95) -> tuple[float, float]:
    """Return upper ends of the false positive and the false negative rate that hold together."""
    tail = (1 - confidence) / 2
    return (
        upper(errors.false_positives, errors.without, tail),
        upper(errors.false_negatives, errors.with_canary, tail),
    )


def dp_bound(errors: Errors, delta: float, confidence: float = 0.95) -> float:
    """Return the lower bound on epsilon for whatever mechanism made the scores (see :func:`dp_epsilons`)."""
    return max(0.0, float(dp_epsilons(*rates(errors, confidence), delta)))


def gaussian_mu(errors: Errors, confidence: float = 0.95) -> float:
    """Return a lower bound on mu, valid where the worst pair of neighbours has a Gaussian's trade-off."""
    return max(0.0, float(gaussian_mus(*rates(errors, confidence))))


def gaussian_bound(errors: Errors, delta: float, confidence: float = 0.95) -> float:
    """Return :func:`gaussian_mu` as epsilon at ``delta``.

    Valid where the mechanism is post-processing of a Gaussian: every pair of neighbours has at least the trade-off of
    some mu, as full-batch releases have. Not valid for sampled ones: use :func:`tradeoff_bound`.
    """
    return gaussian_epsilon(gaussian_mu(errors, confidence), delta)


def rejects(errors: Errors, tradeoff: Tradeoff, confidence: float = 0.95) -> bool:
    """Say whether the claim that no test beats ``tradeoff`` is refuted.

    Args:
        errors: the counts.
        tradeoff: of both orders of the two worlds, as (epsilon, delta) curves of an adjacency are.
        confidence: of the refutation.
    """
    fpr, fnr = rates(errors, confidence)
    return bool(fnr < tradeoff.beta(fpr) or fpr < tradeoff.beta(fnr))


def tradeoff_bound(
    errors: Errors, family: Callable[[float], Tradeoff], delta: float, confidence: float = 0.95
) -> float:
    """Return the epsilon of the largest member of a family that is refuted.

    Args:
        errors: the counts.
        family: curves that fall as theta > 0 grows (``tradeoff.scaled_family``); valid for its mechanisms only.
        delta: where epsilon is stated.
        confidence: of the bound.
    """
    low, high = 0.0, 1.0
    while rejects(errors, family(high), confidence) and high < 1024:
        low, high = high, 2 * high
    if high >= 1024:
        return math.inf
    while high - low > 0.01 * high and high > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if rejects(errors, family(middle), confidence) else (low, middle)
    return family(low).epsilon(delta) if low else 0.0


def dp_ceiling(runs: int, delta: float, confidence: float = 0.95) -> float:
    """Return :func:`dp_bound` of a test without errors: 5.60 at 1000 runs a world."""
    return dp_bound(Errors(0, runs, 0, runs), delta, confidence)


def gaussian_ceiling(runs: int, delta: float, confidence: float = 0.95) -> float:
    """Return :func:`gaussian_bound` of a test without errors."""
    return gaussian_bound(Errors(0, runs, 0, runs), delta, confidence)


def bonferroni(confidence: float, tests: int) -> float:
    """Return the confidence of each of several tests that together have ``confidence``."""
    return 1 - (1 - confidence) / tests


def p_value(errors: Errors, exceeds: Callable[[float], bool]) -> float:
    """Return the smallest alpha at which a claim is refuted with confidence 1 - alpha; 1 if it never is.

    Args:
        errors: the counts (for the signature's sake: ``exceeds`` knows them).
        exceeds: says whether the claim is refuted at a confidence; once it is not, it is not at any higher one.
    """
    low, high = math.log(SMALLEST_ALPHA), 0.0
    if exceeds(1 - SMALLEST_ALPHA):
        return SMALLEST_ALPHA
    if not exceeds(1 - 0.999999):
        return 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if exceeds(1 - math.exp(middle)) else (middle, high)
    return math.exp(high)
