"""Laws of the privacy loss of single steps, rounded pessimistically onto a grid.

A law is the distribution of log(P(x) / Q(x)) for x drawn from P, where P and Q are the worst pair of output
distributions for two neighbours. Losses between two grid points are split over both so that P and Q keep their mass
("connect the dots", Doroshenko et al. 2207.04380): the result dominates the true law, and is the best that does.

The laws of one unit are dp-accounting's. Those of a group of units are computed here in the same way, because
dp-accounting's own (a search per grid point) take minutes where these take seconds. So are laws for lower bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import logsumexp, ndtr
from scipy.stats import binom

MAX_POINTS = 1 << 21
"""Largest law of one step."""

TAIL = 10.0
"""Outputs further out than this many standard deviations count as infinite loss: probability 8e-24."""


@dataclass(frozen=True)
class Step:
    """Law of the privacy loss of one step, in one direction (the unit removed, or added), and how often it happens.

    Attributes:
        lowest: the smallest loss, in grid points.
        probabilities: float64 of shape (n,), >= 0, of the losses lowest, lowest + 1, ….
        infinite: probability of an infinite loss.
        steps: number of steps.
        lowered: what is to be subtracted from every loss; for lower bounds only.
    """

    lowest: int
    probabilities: np.ndarray
    infinite: float
    steps: int
    lowered: float = 0.0


def _check_points(noise_multiplier: float, rate: float, shift: float, grid: float) -> None:
    """Refuse a law that dp-accounting would need too many points for; it keeps losses within ten deviations."""
    largest = shift * (shift / 2 + TAIL * noise_multiplier) / noise_multiplier**2
    if not largest + math.log(rate) < MAX_POINTS * grid:
        raise MemoryError(f"one step's privacy loss reaches {largest:.3g} on a grid of {grid:.3g}")


def _directions(build: Callable[[], Any], steps: int) -> tuple[Step, Step]:
    """Take dp-accounting's two probability mass functions apart (it is pinned: these are private names of its).

    Raises:
        ArithmeticError: it found its own numbers to be inconsistent.
    """
    try:
        distribution = build()
    except ValueError as error:
        raise ArithmeticError(str(error)) from error
    removed = distribution._pmf_remove.to_dense_pmf()
    added = removed if distribution._symmetric else distribution._pmf_add.to_dense_pmf()
    first = Step(removed._lower_loss, removed._probs, removed._infinity_mass, steps)
    return first, first if added is removed else Step(added._lower_loss, added._probs, added._infinity_mass, steps)


@lru_cache(maxsize=32)
def gaussian_step(noise_multiplier: float, rate: float, steps: int, replace: bool, grid: float) -> tuple[Step, Step]:
    """Return the laws of a Poisson-sampled Gaussian step for one unit, removed and added (or replaced).

    Args:
        noise_multiplier: noise standard deviation over the add/remove sensitivity.
        rate: Poisson rate in (0, 1].
        steps: number of steps.
        replace: for replace-one neighbours, twice the sensitivity apart.
        grid: distance of two losses.
    """
    from dp_accounting.pld import privacy_loss_distribution
    from dp_accounting.privacy_accountant import NeighboringRelation

    _check_points(noise_multiplier, rate, 1, grid)
    relation = NeighboringRelation.REPLACE_ONE if replace else NeighboringRelation.ADD_OR_REMOVE_ONE
    return _directions(
        lambda: privacy_loss_distribution.from_gaussian_mechanism(
            noise_multiplier,
            sampling_prob=rate,
            value_discretization_interval=grid,
            neighboring_relation=relation,
        ),
        steps,
    )


@dataclass(frozen=True)
class _Pair:
    """Two mixtures of N(shift, s²), P and Q, whose log ratio ("loss") increases in x.

    Attributes:
        deviation: s.
        upper: weights and shifts of P.
        lower: weights and shifts of Q.
    """

    deviation: float
    upper: tuple[np.ndarray, np.ndarray]
    lower: tuple[np.ndarray, np.ndarray]

    @property
    def ends(self) -> tuple[float, float]:
        """Outputs beyond which both have no more mass than TAIL says."""
        shifts = np.append(self.upper[1], self.lower[1])
        return shifts.min() - TAIL * self.deviation, shifts.max() + TAIL * self.deviation

    def loss(self, x: np.ndarray) -> np.ndarray:
        """Return log P(x) / Q(x)."""

        def log_density(weights: np.ndarray, shifts: np.ndarray) -> np.ndarray:
            with np.errstate(divide="ignore"):
                logs = np.log(weights)[:, None]
            return logsumexp(logs + shifts[:, None] * (x - shifts[:, None] / 2) / self.deviation**2, axis=0)

        return log_density(*self.upper) - log_density(*self.lower)

    def levels(self, grid: float) -> tuple[int, int]:
        """Return the smallest and largest loss between the ends, rounded outwards, in grid points."""
        low, high = self.loss(np.array(self.ends))
        return math.floor(low / grid), math.ceil(high / grid)

    def masses(self, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the mass of P and of Q between the outputs where the loss takes neighbouring values (or the ends)."""
        low, high = (np.full(losses.shape, end) for end in self.ends)
        for _ in range(50):  # all searched for at once
            middle = (low + high) / 2
            below = self.loss(middle) < losses
            low, high = np.where(below, middle, low), np.where(below, high, middle)

        def between(weights: np.ndarray, shifts: np.ndarray) -> np.ndarray:
            total = np.zeros(losses.size - 1)
            for weight, shift in zip(weights, shifts, strict=True):
                x = (high - shift) / self.deviation
                # From the smaller tail, so that small masses keep their digits.
                total += weight * np.where(x[:-1] > 0, ndtr(-x[:-1]) - ndtr(-x[1:]), ndtr(x[1:]) - ndtr(x[:-1]))
            return total

        return between(*self.upper), between(*self.lower)


@lru_cache(maxsize=8)
def group_step(noise_multiplier: float, rate: float, steps: int, members: int, grid: float) -> tuple[Step, Step]:
    """Return the laws of a Poisson-sampled Gaussian step for a group of units, removed and added.

    The number of members in a batch is binomial(members, rate), and each moves the sum by at most 1: the step is
    dominated by the pair of N(0, s²) and the mixture of N(i, s²) with binomial weights (Ganesh 2401.10294).
    """
    _check_points(noise_multiplier, rate, members, grid)
    shifts = np.arange(members + 1.0)
    pair = _Pair(noise_multiplier, (binom.pmf(shifts, members, rate), shifts), (np.ones(1), np.zeros(1)))
    lowest, highest = pair.levels(grid)
    losses = np.arange(lowest, highest + 1) * grid
    mixture, single = pair.masses(losses)
    removed = _connect(mixture, single, losses[:-1], grid)
    added = _connect(single[::-1], mixture[::-1], -losses[:0:-1], grid)  # the pair swapped: losses change their sign
    # Beyond the ends, at most this mass: an infinite loss at the upper end, the lowest loss at the lower one.
    tail = float(ndtr(-TAIL))
    removed[0] += tail
    added[0] += tail
    return Step(lowest, removed, tail, steps), Step(-highest, added, tail, steps)


def _connect(upper: np.ndarray, lower: np.ndarray, losses: np.ndarray, grid: float) -> np.ndarray:
    """Split the mass of each bin of losses over its two ends, so that both distributions keep their mass.

    Args:
        upper: mass of P in each bin, shape (n,).
        lower: mass of Q in each bin, shape (n,).
        losses: lower end of each bin, shape (n,), one ``grid`` apart.
        grid: width of the bins.

    Returns:
        Probabilities at the n + 1 ends.
    """
    with np.errstate(divide="ignore", over="ignore"):
        scaled = np.exp(np.log(lower) + losses)
    raised = np.clip((upper - scaled) / -math.expm1(-grid), 0.0, upper)
    return np.append(upper - raised, 0.0) + np.append(0.0, raised)


@lru_cache(maxsize=8)
def lower_step(noise_multiplier: float, rate: float, steps: int, replace: bool, grid: float) -> tuple[Step, Step]:
    """Return laws that the true ones of a Poisson-sampled Gaussian step dominate, for lower bounds.

    Reporting only the bin of losses that an output falls into is post-processing, so it loses privacy never faster.
    With bins centered on grid points, the loss of a bin is its grid point up to second order; all losses are lowered
    by the largest deviation (:attr:`Step.lowered`). Bins of next to no mass are left out.
    """
    _check_points(noise_multiplier, rate, 2.0 if replace else 1.0, grid)
    weights, shifts = np.array([1 - rate, rate]), np.array([0.0, 1.0])
    other = (weights, -shifts) if replace else (np.ones(1), np.zeros(1))
    pair = _Pair(noise_multiplier, (weights, shifts), other)
    lowest, highest = pair.levels(grid)
    losses = np.arange(lowest, highest + 1) * grid
    upper, lower = pair.masses(np.append(losses - grid / 2, losses[-1] + grid / 2))
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.log(upper) - np.log(lower)
    counted = np.minimum(upper, lower) > 1e-290
    removed, added = counted & (upper > 1e-25), counted & (lower > 1e-25)
    return (
        Step(lowest, np.where(removed, upper, 0.0), 0.0, steps, float((losses - found)[removed].max())),
        Step(-highest, np.where(added, lower, 0.0)[::-1], 0.0, steps, float((found - losses)[added].max())),
    )


def parameter_step(epsilon: float, delta: float, steps: int, grid: float) -> tuple[Step, Step]:
    """Return the laws that dominate every (epsilon, delta)-DP mechanism, rounded up to the grid."""
    from dp_accounting.pld import privacy_loss_distribution
    from dp_accounting.pld.common import DifferentialPrivacyParameters

    parameters = DifferentialPrivacyParameters(epsilon, delta)
    return _directions(lambda: privacy_loss_distribution.from_privacy_parameters(parameters, grid), steps)
