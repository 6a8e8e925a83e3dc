"""What an audit would have shown of a mechanism whose true epsilon is known: its detection power.

A bound below a claim means something only if a worse mechanism would have given a bound above it. The mechanism
audited in thought is exactly mu-Gaussian: a run's score is N(0, 1) without the canary and N(mu, 1) with it, which is
what the likelihood ratio of a full-batch Gaussian gives for a canary at the clip. A test at a threshold t has error
rates Phi(-t) and Phi(t - mu), and the two counts of errors are independent and binomial, so for a given threshold
every probability here is a finite sum. Two thresholds are offered:

* the one that ``attacks.choose`` finds on a SELECT half of as many runs, which is what an audit does: the sum is
  averaged over SELECTIONS simulated SELECT halves, with a public seed;
* the best one, known to nobody: exact, and what no choice can surpass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from scipy.special import bdtr, gammaln, ndtr, ndtri, xlog1py, xlogy

from dpmixmin.audit import attacks
from dpmixmin.audit.bounds import LARGEST_EPSILON, dp_ceiling, gaussian_ceiling, tail_of, upper_ends
from dpmixmin.audit.tradeoff import Tradeoff
from dpmixmin.privacy.gaussian import gaussian_epsilon, gaussian_mu

CEILINGS = {"dp": dp_ceiling, "gaussian": gaussian_ceiling}
"""The bounds whose power is known, with what each can reach."""

SELECTIONS = 200
"""SELECT halves simulated. A probability of detection near 0.8 is then known within 0.04 (95 %)."""

NEGLIGIBLE = 1e-17
"""Probability of a count below which it is left out of a sum."""


def detection_probability(
    true_epsilon: float,
    claim: float,
    runs: int,
    delta: float,
    bound: str,
    confidence: float = 0.95,
    *,
    best_threshold: bool = False,
) -> float:
    """Return the probability that the bound exceeds the claim.

    Args:
        true_epsilon: of the Gaussian mechanism, at ``delta``; >= 0.
        claim: epsilon claimed at ``delta``; >= 0.
        runs: EVAL runs a world, and as many SELECT runs; >= 1.
        delta: in (0, 1).
        bound: ``dp`` or ``gaussian``.
        confidence: of the bound, in [0, 1).
        best_threshold: at the threshold of largest probability, instead of one that is chosen on SELECT runs.

    Raises:
        ValueError: an unknown bound.
    """
    return _detection(gaussian_mu(true_epsilon, delta), claim, runs, delta, bound, confidence, best_threshold)


@lru_cache(maxsize=256)
def detectable_epsilon(
    claim: float,
    runs: int,
    delta: float,
    bound: str,
    confidence: float = 0.95,
    power: float = 0.8,
    *,
    best_threshold: bool = False,
) -> float | None:
    """Return the smallest true epsilon at ``delta`` whose bound exceeds the claim with probability ``power``.

    Args:
        claim: see :func:`detection_probability`, as for all that is not explained here.
        runs: EVAL runs a world.
        delta: in (0, 1).
        bound: ``dp`` or ``gaussian``.
        confidence: of the bound.
        power: in (0, 1).
        best_threshold: instead of a chosen one.

    Returns:
        Epsilon within 0.2 %, upwards; None where even an attack without errors does not exceed the claim.
    """
    if claim >= _ceiling(runs, delta, bound, confidence):
        return None

    def detected(mu: float) -> bool:
        return _detection(mu, claim, runs, delta, bound, confidence, best_threshold) >= power

    low, high = 0.0, 1.0
    while not detected(high):
        low, high = high, 2 * high
    while high - low > 5e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if detected(middle) else (middle, high)
    return gaussian_epsilon(high, delta)


def detectable_in_family(
    family: Callable[[float], Tradeoff], runs: int, delta: float, confidence: float = 0.95, power: float = 0.8
) -> float | None:
    """Return the smallest true epsilon of a family at which its claim, ``family(1)``, is refuted often enough.

    For mechanisms that are no Gaussian: the attack in thought reaches the true trade-off curve at its best threshold.

    Args:
        family: theta >= 1 to a curve (``tradeoff.scaled_family``); they fall as theta grows.
        runs: EVAL runs a world.
        delta: where epsilon is stated.
        confidence: of the refutation.
        power: in (0, 1).

    Returns:
        Epsilon at ``delta``, of a theta within 2 %, upwards; None where even an attack without errors refutes nothing,
        or no epsilon up to LARGEST_EPSILON is caught so often.
    """
    ends = upper_ends(runs, tail_of(confidence))
    allowed = np.searchsorted(ends, family(1.0).beta(ends)) - 1
    allowed = allowed[allowed >= 0]
    if not allowed.size:
        return None
    fpr = np.geomspace(1e-3 / runs, 0.5, 200)

    def detected(theta: float) -> bool:
        return float(_exceeding(fpr, np.maximum(family(theta).beta(fpr), 1e-12), runs, allowed).max()) >= power

    low, high = 1.0, 2.0
    while not detected(high):
        low, high = high, 2 * high
        if family(high).epsilon(delta) > LARGEST_EPSILON:
            return None
    while high > 1.02 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if detected(middle) else (middle, high)
    return family(high).epsilon(delta)


def median_bound(
    true_epsilon: float,
    runs: int,
    delta: float,
    bound: str,
    confidence: float = 0.95,
    *,
    best_threshold: bool = False,
) -> float:
    """Return the median over audits of the bound, within 1e-3, downwards.

    Args:
        true_epsilon: see :func:`detection_probability`, as for all that is not explained here.
        runs: EVAL runs a world.
        delta: in (0, 1).
        bound: ``dp`` or ``gaussian``.
        confidence: of the bound.
        best_threshold: the largest of the medians at fixed thresholds.
    """
    mu = gaussian_mu(true_epsilon, delta)
    # The largest claim that half of the audits exceed.
    low, high = 0.0, _ceiling(runs, delta, bound, confidence)
    while high - low > 1e-3:
        middle = (low + high) / 2
        exceeded = _detection(mu, middle, runs, delta, bound, confidence, best_threshold) >= 0.5
        low, high = (middle, high) if exceeded else (low, middle)
    return low


# -- how --------------------------------------------------------------------------------------------------------------


def _ceiling(runs: int, delta: float, bound: str, confidence: float) -> float:
    if bound not in CEILINGS:
        raise ValueError(f"unknown bound {bound!r}; known: {', '.join(CEILINGS)}")
    return CEILINGS[bound](runs, delta, confidence)


def _detection(
    mu: float, claim: float, runs: int, delta: float, bound: str, confidence: float, best_threshold: bool
) -> float:
    """Return :func:`detection_probability` of a mu-Gaussian mechanism."""
    if claim >= _ceiling(runs, delta, bound, confidence):
        return 0.0
    # A bound exceeds the claim exactly if the two upper ends lie below the claim's trade-off curve.
    claimed = Tradeoff.pure(claim, delta) if bound == "dp" else Tradeoff.gaussian(gaussian_mu(claim, delta))
    ends = upper_ends(runs, tail_of(confidence))
    # The most false negatives beside 0, 1, … false positives; it falls, and below 0 these are too many.
    allowed = np.searchsorted(ends, claimed.beta(ends)) - 1
    allowed = allowed[allowed >= 0]
    if best_threshold:
        return _best(mu, runs, allowed)
    return float(_exceeding(*_chosen_rates(mu, runs, delta, bound), runs, allowed).mean())


def _best(mu: float, runs: int, allowed: np.ndarray) -> float:
    """Return the largest probability of few enough errors at any threshold; see :func:`_exceeding`."""
    # Mechanism and curves are symmetric, so thresholds with fewer false positives than negatives are enough; below a
    # false positive in 1000 audits a lower rate of them gains nothing.
    low, high = mu / 2, max(mu / 2, float(-ndtri(1e-3 / runs)))
    best = 0.0
    for points in (65, 33):
        thresholds = np.linspace(low, high, points)
        found = _exceeding(ndtr(-thresholds), ndtr(thresholds - mu), runs, allowed)
        best = max(best, float(found.max()))
        step, peak = (high - low) / (points - 1), thresholds[np.argmax(found)]
        low, high = max(low, peak - step), min(high, peak + step)
    return best


@lru_cache(maxsize=256)
def _chosen_rates(mu: float, runs: int, delta: float, objective: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the true error rates (fpr, fnr) of tests chosen on SELECTIONS simulated SELECT halves, one each."""
    # The same normal numbers for every mu, so that a search over mu sees little of their chance.
    generator = np.random.default_rng(0)
    fpr, fnr = np.empty(SELECTIONS), np.empty(SELECTIONS)
    for i in range(SELECTIONS):
        without, with_canary = generator.standard_normal((2, runs))
        attack = attacks.choose({"score": (without, with_canary + mu)}, delta, objective)
        side = 1 if attack.above_means_with else -1
        fpr[i], fnr[i] = ndtr(-side * attack.threshold), ndtr(side * (attack.threshold - mu))
    return fpr, fnr


def _exceeding(fpr: np.ndarray, fnr: np.ndarray, runs: int, allowed: np.ndarray) -> np.ndarray:
    """Return the probability that a test makes few enough errors, shape (n,).

    Args:
        fpr: true rates of n tests, shape (n,).
        fnr: the same.
        runs: in each world.
        allowed: false negatives allowed beside 0, 1, … false positives; more false positives are too many.
    """
    positives = np.arange(allowed.size)
    ways = gammaln(runs + 1) - gammaln(positives + 1) - gammaln(runs - positives + 1)
    weights = np.exp(ways + xlogy(positives, fpr[:, None]) + xlog1py(runs - positives, -fpr[:, None]))
    test, column = np.nonzero(weights > NEGLIGIBLE)
    terms = weights[test, column] * bdtr(allowed[column], runs, fnr[test])
    return np.minimum(np.bincount(test, weights=terms, minlength=fpr.size), 1.0)
