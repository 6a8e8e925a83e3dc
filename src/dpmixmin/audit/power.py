"""How much an audit of two worlds could have shown: computed for a mechanism that is EXACTLY a mu-Gaussian.

The attack in thought is the best there is: it sees the likelihood ratio, N(0, 1) without and N(mu, 1) with the canary,
and knows the best threshold (choosing it on half of the runs costs a little: simulated audits are within 0.05 of these
probabilities). The counts of its errors are two independent binomial variables, so the probability of every outcome is
exact.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.special import ndtr
from scipy.stats import binom

from dpmixmin.audit.bounds import dp_ceiling, dp_epsilons, gaussian_ceiling, gaussian_mus, uppers
from dpmixmin.privacy.gaussian import gaussian_epsilon, gaussian_mu

_NEGLIGIBLE = 1e-9
"""Outcomes in tails of this probability are left out."""

CEILINGS = {"dp": dp_ceiling, "gaussian": gaussian_ceiling}


def detection_probability(
    true_epsilon: float, claim: float, runs: int, delta: float, bound: str, confidence: float = 0.95
) -> float:
    """Return the probability that the bound exceeds the claim.

    Args:
        true_epsilon: of the mechanism, at ``delta``.
        claim: epsilon at ``delta``.
        runs: counted runs a world.
        delta: in (0, 1).
        bound: dp or gaussian.
        confidence: of the bound.
    """
    mu = gaussian_mu(true_epsilon, delta)
    return max(_exceeds(mu, threshold, claim, runs, delta, bound, confidence) for threshold in _thresholds(mu))


def detectable_epsilon(
    claim: float, runs: int, delta: float, bound: str, confidence: float = 0.95, power: float = 0.8
) -> float | None:
    """Return the smallest true epsilon that is found to exceed the claim with probability ``power``.

    Args:
        claim: see :func:`detection_probability`, as for what follows.
        runs: counted runs a world.
        delta: in (0, 1).
        bound: dp or gaussian.
        confidence: of the bound.
        power: in (0, 1).

    Returns:
        Epsilon at ``delta``, to 1 %; None where the claim is at or above the bound's ceiling: there is no power.
    """
    if claim >= CEILINGS[bound](runs, delta, confidence):
        return None
    low, high = gaussian_mu(claim, delta), 40.0
    if _best(high, claim, runs, delta, bound, confidence) < power:
        return None
    while high - low > 0.005 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _best(middle, claim, runs, delta, bound, confidence) >= power else (middle, high)
    return gaussian_epsilon(high, delta)


def median_bound(true_epsilon: float, runs: int, delta: float, bound: str, confidence: float = 0.95) -> float:
    """Return the median of the bound, at the threshold that makes it largest.

    Args:
        true_epsilon: of the mechanism, at ``delta``.
        runs: counted runs a world.
        delta: in (0, 1).
        bound: dp or gaussian.
        confidence: of the bound.
    """
    mu, found = gaussian_mu(true_epsilon, delta), 0.0
    for threshold in _thresholds(mu):
        values, weights = _outcomes(mu, threshold, runs, delta, bound, confidence)
        order = np.argsort(values)
        place = np.searchsorted(np.cumsum(weights[order]), 0.5 * weights.sum())
        found = max(found, float(values[order][place]))
    return gaussian_epsilon(found, delta) if bound == "gaussian" else found


def _best(mu: float, claim: float, runs: int, delta: float, bound: str, confidence: float) -> float:
    return max(_exceeds(mu, threshold, claim, runs, delta, bound, confidence) for threshold in _thresholds(mu))


def _thresholds(mu: float) -> np.ndarray:
    """Return thresholds from the middle of the two worlds outwards; the problem is symmetric."""
    return mu / 2 + np.linspace(0, 3, 31)


def _exceeds(
    mu: float, threshold: float, claim: float, runs: int, delta: float, bound: str, confidence: float
) -> float:
    values, weights = _outcomes(mu, threshold, runs, delta, bound, confidence)
    limit = gaussian_mu(claim, delta) if bound == "gaussian" else claim
    return float(weights[values > limit].sum())


@lru_cache(maxsize=512)
def _outcomes(
    mu: float, threshold: float, runs: int, delta: float, bound: str, confidence: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bound (mu, where it is a Gaussian's) of every outcome that matters, and its probability."""
    tail = (1 - confidence) / 2
    positives, p = _counts(runs, ndtr(-threshold))
    negatives, q = _counts(runs, ndtr(threshold - mu))
    fpr, fnr = uppers(positives, runs, tail)[:, None], uppers(negatives, runs, tail)[None]
    values = gaussian_mus(fpr, fnr) if bound == "gaussian" else dp_epsilons(fpr, fnr, delta)
    return np.maximum(values, 0.0).ravel(), (p[:, None] * q[None]).ravel()


def _counts(runs: int, rate: float) -> tuple[np.ndarray, np.ndarray]:
    low, high = binom.ppf((_NEGLIGIBLE, 1 - _NEGLIGIBLE), runs, rate)
    counts = np.arange(max(0, int(low)), int(high) + 1)
    return counts, binom.pmf(counts, runs, rate)
