"""Trade-off curves: what a privacy claim lets a test between two neighbouring datasets achieve.

A test of "the unit is in" has an error rate x where the unit is out, and another where it is in. A mechanism has the
trade-off curve f (Dong et al. 1905.02383) if no test on any pair of neighbours, in either direction, has a second
rate below f(x). It is (epsilon, delta)-DP for some pairs of numbers exactly if its curve lies on or above

    f(x) = max over the pairs of 0, 1 - delta - e^epsilon x, e^-epsilon (1 - delta - x).

An audit that observes rates below f refutes the claim. Fewer pairs give a lower f, so a claim on a finite grid of
epsilons is weaker than the accountant's, and refuting it refutes the accountant's too: the grid errs on the safe side.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from scipy.special import ndtr, ndtri

from dpmixmin.privacy.accounting import Composition
from dpmixmin.privacy.events import GaussianEvent
from dpmixmin.privacy.gaussian import gaussian_epsilon

POINTS = 96
"""Epsilons in the grid of a composition's curve."""

TAILS = (1e-10, 1e-8, 1e-6, 1e-4, 1e-2)
"""The grid ends at the epsilon of the first of these deltas at which the accountant has a finite one."""

LARGEST = 700.0
"""Largest epsilon of a grid; e^epsilon still is a float64."""


class Tradeoff:
    """The curve of a mechanism that is (epsilon, delta)-DP for each pair of a list.

    Args:
        epsilons: in [0, 700].
        deltas: of the same number, in [0, 1].
        exact: epsilon as a function of delta, where something better than the list is known.

    Raises:
        ValueError: the lists are empty or of different lengths, or a number is out of range.
    """

    def __init__(
        self, epsilons: Sequence[float], deltas: Sequence[float], exact: Callable[[float], float] | None = None
    ):
        epsilons, deltas = np.asarray(epsilons, dtype=np.float64), np.asarray(deltas, dtype=np.float64)
        if epsilons.ndim != 1 or epsilons.shape != deltas.shape or not epsilons.size:
            raise ValueError("a trade-off curve needs as many deltas as epsilons, and at least one of each")
        if not ((epsilons >= 0) & (epsilons <= LARGEST)).all() or not ((deltas >= 0) & (deltas <= 1)).all():
            raise ValueError(f"epsilons must lie in [0, {LARGEST:g}] and deltas in [0, 1]")
        order = np.argsort(epsilons, kind="stable")
        self._epsilons = epsilons[order]
        # What holds at an epsilon holds at every larger one.
        self._deltas = np.minimum.accumulate(deltas[order])
        self._exact = exact
        # As columns, against rows of rates.
        self._delta, self._grown = self._deltas[:, None], np.exp(self._epsilons)[:, None]

    @staticmethod
    def of(composition: Composition) -> Tradeoff:
        """Return the curve that the accountant claims for a composition, for its own neighbours.

        Exact for Gaussian mechanisms; else from the accountant's delta, which covers both directions of the pair, at
        POINTS epsilons.
        """
        if composition.mu is not None:
            return Tradeoff.gaussian(composition.mu)
        top = next((found for tail in TAILS if math.isfinite(found := composition.epsilon(tail))), LARGEST)
        epsilons = np.linspace(0.0, min(top, LARGEST), POINTS) if top else np.zeros(1)
        return Tradeoff(epsilons, [min(composition.delta(each), 1.0) for each in epsilons], composition.epsilon)

    @staticmethod
    def gaussian(mu: float) -> Tradeoff:
        """Return the curve of a mu-Gaussian mechanism in closed form, Phi(Phi^-1(1 - x) - mu), for mu >= 0."""
        return _Gaussian(mu)

    @staticmethod
    def pure(epsilon: float, delta: float = 0.0) -> Tradeoff:
        """Return the curve of a mechanism of which only this one pair is known."""
        return Tradeoff([epsilon], [delta])

    def beta(self, alpha):
        """Return f: the least rate of errors where the unit is in, of shape like ``alpha``.

        Args:
            alpha: rates of errors where the unit is out, in [0, 1]; a number or an array.
        """
        alpha = np.asarray(alpha, dtype=np.float64)
        rates = alpha.reshape(1, -1)
        near = 1 - self._delta - self._grown * rates
        far = (1 - self._delta - rates) / self._grown
        return np.maximum(np.maximum(near, far).max(axis=0), 0.0).reshape(alpha.shape)[()]

    def most(self, x):
        """Return 1 - f: the largest probability in one world of an event of probability ``x`` in [0, 1] in the other.

        Computed without the subtraction, so that small probabilities keep their digits.
        """
        x = np.asarray(x, dtype=np.float64)
        rates = x.reshape(1, -1)
        near = self._delta + self._grown * rates
        far = 1 - (1 - self._delta - rates) / self._grown
        return np.minimum(np.minimum(near, far).min(axis=0), 1.0).reshape(x.shape)[()]

    def inverse(self, r):
        """Return the least x in [0, 1] with ``most(x) >= r``, for r in [0, 1]; a number or an array."""
        r = np.asarray(r, dtype=np.float64)
        rates = r.reshape(1, -1)
        near = (rates - self._delta) / self._grown
        far = 1 - self._delta - self._grown * (1 - rates)
        return np.maximum(np.maximum(near, far).max(axis=0), 0.0).reshape(r.shape)[()]

    def epsilon(self, delta: float) -> float:
        """Return the epsilon of this claim at ``delta``; infinite where it has none.

        Between two pairs of the list, delta is at most their interpolation in e^epsilon, because it is convex in it.
        """
        if self._exact is not None:
            return float(self._exact(delta))
        meets = np.flatnonzero(self._deltas <= delta)
        if not meets.size:
            return math.inf
        right = int(meets[0])
        if right == 0:
            return float(self._epsilons[0])
        low, high = self._epsilons[right - 1], self._epsilons[right]
        share = (self._deltas[right - 1] - delta) / (self._deltas[right - 1] - self._deltas[right])
        return float(low + np.log1p(share * np.expm1(high - low)))


class _Gaussian(Tradeoff):
    """The curve of a mu-Gaussian mechanism in closed form."""

    def __init__(self, mu: float):
        if not mu >= 0:
            raise ValueError(f"mu must be at least 0, got {mu}")
        self.mu = float(mu)

    def beta(self, alpha):
        return ndtr(-ndtri(alpha) - self.mu)[()]

    def most(self, x):
        return ndtr(ndtri(x) + self.mu)[()]

    def inverse(self, r):
        return ndtr(ndtri(r) - self.mu)[()]

    def epsilon(self, delta: float) -> float:
        return gaussian_epsilon(self.mu, delta)


@lru_cache(maxsize=32)
def scaled_family(event: GaussianEvent) -> Callable[[float], Tradeoff]:
    """Return the curves of one mechanism with less or more noise than it declares.

    ``family(theta)`` is the curve (add/remove) of the event with its noise multiplier divided by theta > 0, sampling
    rate and number of steps unchanged: 1 is the claim itself, 2 a mechanism that adds half of its noise. Curves fall
    as theta grows. They are kept, because searches ask for the same theta again.
    """

    @lru_cache(maxsize=256)
    def family(theta: float) -> Tradeoff:
        scaled = dataclasses.replace(event, noise_multiplier=event.noise_multiplier / theta)
        return Tradeoff.of(Composition([scaled]))

    return family
