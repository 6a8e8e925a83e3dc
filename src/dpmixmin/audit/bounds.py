"""Lower bounds on epsilon from a test of whether a unit is in the data, at a stated confidence.

The mechanism ran ``without`` times on D and ``with_canary`` times on D + one unit, independently; a test fixed
beforehand (``attacks.py``: chosen on other runs) read each output. A false positive reads "with" where the unit is
out, a false negative "without" where it is in. Both counts are binomial. Clopper-Pearson gives upper ends for the two
rates that hold TOGETHER with the stated confidence, each with half of what is left, whatever the rates are; so every
bound here errs with probability at most 1 - confidence, under its own condition on the mechanism:

* :func:`dp_bound`: none. Of any mechanism it bounds the epsilon that it can have at ``delta`` from below.
* :func:`gaussian_bound`: the mechanism claims to be mu-GDP for some mu, as every release is that is computed from
  full-batch Gaussian sums alone.
* :func:`tradeoff_bound`: it claims to have one of the curves of a family, as Poisson-sampled Gaussians do.

Outside its condition a family's bound may exceed the true epsilon at ``delta``: what it refutes is the claim.

Sources: Jagielski et al. 2006.07709 and the DP-MixMin paper's A.8 (the first bound), Nasr et al. 2302.07956 (the
Gaussian one, and the idea of the third), Dong et al. 1905.02383 (trade-off curves).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral

import numpy as np
from scipy.special import betainccinv, ndtri

from dpmixmin.audit.tradeoff import Tradeoff
from dpmixmin.privacy.gaussian import gaussian_epsilon

LEAST_P = 2.0**-40
"""Smallest p-value that is told apart, 9e-13: below, 1 - alpha has too few digits."""

LARGEST_THETA = 1024.0
"""Where searches in a family of curves end, upwards and (its inverse) downwards."""

LARGEST_EPSILON = 100.0
"""Where searches for an epsilon end: nobody asks whether it is more."""


@dataclass(frozen=True)
class Errors:
    """What a test got wrong, on runs that it was not chosen on.

    Attributes:
        false_positives: runs that read "with" in the world without the canary.
        without: runs in that world, >= 0; none bounds nothing.
        false_negatives: runs that read "without" in the world with it.
        with_canary: runs in that world, >= 0.

    Raises:
        ValueError: a count is not a whole number in its range.
    """

    false_positives: int
    without: int
    false_negatives: int
    with_canary: int

    def __post_init__(self):
        for errors, trials in (
            (self.false_positives, self.without),
            (self.false_negatives, self.with_canary),
        ):
            if not isinstance(errors, Integral) or not isinstance(trials, Integral) or not 0 <= errors <= trials:
                raise ValueError(f"errors must be whole numbers, at most one a run: got {errors} in {trials} runs")


def upper(errors: int, trials: int, tail: float) -> float:
    """Return the one-sided Clopper-Pearson upper end of a rate, in (0, 1].

    It is the rate at which ``errors`` or fewer have probability ``tail``: a true rate lies above it with probability
    at most ``tail``. 1 where all trials were errors, or none was made.

    Args:
        errors: in [0, trials].
        trials: >= 0.
        tail: in [0, 1].
    """
    if not 0 <= errors <= trials or not 0 <= tail <= 1:
        raise ValueError(f"needs errors in [0, trials] and a tail in [0, 1], got {errors}, {trials}, {tail}")
    return 1.0 if errors == trials else float(betainccinv(errors + 1, trials - errors, tail))


@lru_cache(maxsize=64)
def upper_ends(trials: int, tail: float) -> np.ndarray:
    """Return :func:`upper` of 0, 1, …, ``trials`` errors, shape (trials + 1,), ascending, read-only."""
    errors = np.arange(trials)
    ends = np.append(betainccinv(errors + 1, trials - errors, tail), 1.0)
    ends.flags.writeable = False
    return ends


def tail_of(confidence: float) -> float:
    """Return the share of error that each of the two rates gets; ``confidence`` is in [0, 1)."""
    if not 0 <= confidence < 1:
        raise ValueError(f"confidence must lie in [0, 1), got {confidence}")
    return (1 - confidence) / 2


def rates(errors: Errors, confidence: float = 0.95) -> tuple[float, float]:
    """Return upper ends of the false positive and the false negative rate that hold together with ``confidence``."""
    tail = tail_of(confidence)
    return (
        upper(errors.false_positives, errors.without, tail),
        upper(errors.false_negatives, errors.with_canary, tail),
    )


# -- bounds on epsilon ------------------------------------------------------------------------------------------------


def dp_epsilon(fpr: np.ndarray | float, fnr: np.ndarray | float, delta: float) -> np.ndarray:
    """Return the least epsilon >= 0 at ``delta`` of a mechanism that allows a test with these rates.

    Args:
        fpr: in (0, 1]; numbers or arrays of one shape.
        fnr: in (0, 1].
        delta: in [0, 1).
    """
    if not 0 <= delta < 1:
        raise ValueError(f"delta must lie in [0, 1), got {delta}")
    ratios = np.maximum(np.maximum(1 - fnr - delta, 0) / fpr, np.maximum(1 - fpr - delta, 0) / fnr)
    return np.log(np.maximum(ratios, 1.0))


def gaussian_shift(fpr: np.ndarray | float, fnr: np.ndarray | float) -> np.ndarray:
    """Return the mu of the normal laws N(0, 1) and N(mu, 1) that a test with these rates tells apart.

    Args:
        fpr: in (0, 1]; numbers or arrays of one shape.
        fnr: in (0, 1].

    Returns:
        At most 0 where the test does no better than guessing; -inf at a rate of 1.
    """
    return -ndtri(fpr) - ndtri(fnr)


def dp_bound(errors: Errors, delta: float, confidence: float = 0.95) -> float:
    """Return the lower bound on epsilon that holds for every mechanism.

    (epsilon, delta)-DP makes 1 - fnr <= e^epsilon fpr + delta, and the same with the rates exchanged (Jagielski et al.
    2006.07709; the DP-MixMin paper's A.8), so epsilon is at least ln((1 - fnr - delta) / fpr) and its mirror image.

    Args:
        errors: of a test that was fixed before these runs.
        delta: in [0, 1), the claim's.
        confidence: in [0, 1).

    Returns:
        >= 0, at most :func:`dp_ceiling`.
    """
    return float(dp_epsilon(*rates(errors, confidence), delta))


def gaussian_mu(errors: Errors, confidence: float = 0.95) -> float:
    """Return the lower bound on mu of a mechanism that is mu-GDP; see :func:`gaussian_bound` for when it holds."""
    return max(0.0, float(gaussian_shift(*rates(errors, confidence))))


def gaussian_bound(errors: Errors, delta: float, confidence: float = 0.95) -> float:
    """Return the epsilon at ``delta`` of the largest mu whose Gaussian trade-off the counts refute.

    Valid for a mechanism whose claim is that NO pair of neighbours can be told apart better than N(0, 1) from
    N(mu, 1), mu being sensitivity over noise (Dong et al. 1905.02383): sums over the full batch plus Gaussian noise,
    adaptively composed (mu^2 add up), and all that is computed from them. Then the true mu is at least
    Phi^-1(1 - fpr) - Phi^-1(fnr) (Nasr et al. 2302.07956), and its epsilon at least what is returned. NOT valid for
    Poisson-sampled steps, whose trade-off is no Gaussian's: there use :func:`tradeoff_bound`.

    Args:
        errors: of a test that was fixed before these runs.
        delta: in (0, 1).
        confidence: in [0, 1).

    Returns:
        >= 0, at most :func:`gaussian_ceiling`.
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie in (0, 1), got {delta}")
    return gaussian_epsilon(gaussian_mu(errors, confidence), delta)


def rejects(errors: Errors, tradeoff: Tradeoff, confidence: float = 0.95) -> bool:
    """Say whether the counts refute that no test, on any pair of neighbours, does better than a trade-off curve.

    A true claim is refuted with probability at most 1 - confidence: fnr >= f(fpr) for the true rates, and f falls, so
    an upper end of fnr below f at an upper end of fpr means that one of the two ends failed. The curve binds both
    directions of a pair, so the mirrored test counts too; they differ only where f is not its own inverse.

    Args:
        errors: of a test that was fixed before these runs.
        tradeoff: the claim.
        confidence: in [0, 1).
    """
    fpr, fnr = rates(errors, confidence)
    return bool(fnr < tradeoff.beta(fpr) or fpr < tradeoff.beta(fnr))


def tradeoff_bound(
    errors: Errors, family: Callable[[float], Tradeoff], delta: float, confidence: float = 0.95
) -> float:
    """Return the epsilon at ``delta`` of the largest theta whose trade-off curve the counts refute.

    Valid for a mechanism that claims one of the family's curves, its own theta unknown: Poisson-sampled Gaussian steps
    of known rate and number with noise scaled by 1 / theta (``tradeoff.scaled_family``), and all that is computed from
    them. The curves must fall as theta grows: then theta's own curve, and so every larger one, is not refuted, but
    with probability 1 - confidence. The idea is Nasr et al.'s (2302.07956), who invert the curve of DP-SGD.

    Args:
        errors: of a test that was fixed before these runs.
        family: theta > 0 to a curve; up to a second each, some ten are asked for.
        delta: in (0, 1).
        confidence: in [0, 1).

    Returns:
        Between 0 and LARGEST_EPSILON; theta is found within 1 %, downwards, in [1/1024, 1024].
    """
    if gaussian_mu(errors, confidence) == 0:
        return 0.0  # no better than guessing: within every curve

    def rejected(theta: float) -> bool:
        # A unit that may never be sampled hides behind a false negative rate that no noise level changes: few errors
        # then reject every theta, and curves of hardly any noise take minutes.
        return family(theta).epsilon(delta) <= LARGEST_EPSILON and rejects(errors, family(theta), confidence)

    theta = largest_theta(rejected)
    return family(theta).epsilon(delta) if theta else 0.0


def largest_theta(rejected: Callable[[float], bool]) -> float:
    """Return the largest rejected theta in [1/1024, 1024], within 1 % and itself rejected; 0 if none is.

    Args:
        rejected: true up to some theta, false above.
    """
    low = high = 1.0
    if rejected(1.0):
        while (high := 2 * low) <= LARGEST_THETA and rejected(high):
            low = high
        if high > LARGEST_THETA:
            return low
    else:
        while not rejected(low := high / 2):
            high = low
            if low <= 1 / LARGEST_THETA:
                return 0.0
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low


# -- what a bound can reach -------------------------------------------------------------------------------------------


def dp_ceiling(runs: int, delta: float, confidence: float = 0.95) -> float:
    """Return :func:`dp_bound` of no error in ``runs`` runs a world: 5.60 at 1000. A claim above it has no power."""
    return dp_bound(Errors(0, runs, 0, runs), delta, confidence)


def gaussian_ceiling(runs: int, delta: float, confidence: float = 0.95) -> float:
    """Return :func:`gaussian_bound` of no error in ``runs`` runs a world."""
    return gaussian_bound(Errors(0, runs, 0, runs), delta, confidence)


# -- one number for a gate --------------------------------------------------------------------------------------------


def p_value(errors: Errors, exceeds: Callable[[float], bool]) -> float:
    """Return the smallest 1 - confidence at which the counts refute a claim.

    It is a valid p-value wherever the refutation is valid at every confidence: under a true claim it is at most x with
    probability at most x.

    Args:
        errors: what ``exceeds`` is about; a world without runs refutes nothing.
        exceeds: whether the claim is refuted at a confidence; what is refuted at one is so at every smaller one. E.g.
            ``lambda confidence: dp_bound(errors, delta, confidence) > claim``.

    Returns:
        In [LEAST_P, 1], within 0.1 %, upwards.
    """
    if not errors.without or not errors.with_canary or not exceeds(0.0):
        return 1.0
    low, high = math.log(LEAST_P), 0.0
    if exceeds(1 - LEAST_P):
        return LEAST_P
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if exceeds(1 - math.exp(middle)) else (middle, high)
    # 1 - alpha is rounded: what was refuted is the confidence that it was rounded to.
    return 1 - (1 - math.exp(high))


def bonferroni(confidence: float, tests: int) -> float:
    """Return the confidence that each of ``tests`` bounds needs for all to hold together with ``confidence``."""
    if tests < 1:
        raise ValueError(f"needs at least one test, got {tests}")
    return 1 - (1 - confidence) / tests
