"""The Gaussian mechanism in closed form (Balle & Wang 2018, Theorem 8; Dong et al. 2022 for mu).

A mu-Gaussian mechanism adds N(0, s²) noise to a value that moves by at most mu * s between neighbours. Its delta is

    delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu).

The inverses stand on the safe side of it: epsilon is rounded up and mu is rounded down.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy.special import erfcx, log_ndtr

PADDING = 1 + 1e-11
"""Covers the float64 error of :func:`gaussian_delta` in its inverses, which must not stand on the unsafe side."""


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return delta(epsilon) of a mu-Gaussian mechanism, to 1e-11 relative for mu in [1e-4, 100].

    Args:
        mu: sensitivity over noise standard deviation, >= 0; 0 releases nothing.
        epsilon: >= 0.
    """
    if mu <= 0:
        return 0.0
    near, far = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    if near > 0:
        # Where the first term is above a half there is nothing to cancel in the difference of log-probabilities.
        first = log_ndtr(near)
        return float(math.exp(first) * -math.expm1(min(epsilon + log_ndtr(far) - first, 0.0)))
    # Both terms share the factor exp(-near²/2): the difference of scaled complementary error functions has no
    # exponent of size epsilon/mu in it, so small mu keeps its digits.
    scaled = [erfcx(-x / math.sqrt(2)) for x in (near, far)]
    return float(0.5 * math.exp(-near * near / 2) * max(scaled[0] - scaled[1], 0.0))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon >= 0 with ``gaussian_delta(mu, epsilon) <= delta``, rounded up.

    Args:
        mu: >= 0.
        delta: in (0, 1]; at 0 the answer is infinite unless mu is 0.
    """
    if gaussian_delta(mu, 0.0) * PADDING <= delta:
        return 0.0
    if delta <= 0 or not math.isfinite(mu):
        return math.inf
    low, high = 0.0, 1.0
    while gaussian_delta(mu, high) * PADDING > delta:
        low, high = high, 2 * high
    return _bisect(lambda epsilon: gaussian_delta(mu, epsilon) * PADDING <= delta, low, high)[1]


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu whose Gaussian mechanism is (epsilon, delta)-DP, rounded down.

    Args:
        epsilon: >= 0.
        delta: in (0, 1).
    """
    low, high = 0.0, 1.0
    while gaussian_delta(high, epsilon) * PADDING <= delta:
        low, high = high, 2 * high
    return _bisect(lambda mu: gaussian_delta(mu, epsilon) * PADDING > delta, low, high)[0]


def _bisect(is_high: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Shrink [low, high] around the switch of a monotone predicate to two neighbouring floats."""
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if is_high(middle):
            high = middle
        else:
            low = middle
    return low, high
