"""Choosing privately: among public candidates by private scores, or among private trials by noisy scores (rule 9).

* :class:`NoisyMax` chooses one of m PUBLIC candidates (checkpoints of a released run, public settings) by a sum of
  bounded per-unit scores: pure epsilon-DP, sampled exactly in integer arithmetic.
* :class:`RepeatAndSelect` runs a private trial a secret random number of times and releases the best output by a
  NOISY score (Papernot & Steinke, arXiv 2110.03620). A trial whose score is exact would release that score for free,
  so only :class:`NoisyScore` is accepted.

Adjacency: adding a unit moves every candidate's quality by something in [0, bound], so the range of the difference is
at most ``bound``; replacing one moves it within [-bound, bound], twice that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from dpmixmin.privacy.accounting import Composition
from dpmixmin.privacy.events import ADD_REMOVE, REPLACE_ONE, PureEvent, RepeatSelectEvent
from dpmixmin.privacy.mechanisms import GRID_BITS, GridGaussian, MechanismSpec, Spec
from dpmixmin.privacy.noise import NoiseSource

RULES = ("permute_and_flip", "exponential")


@dataclass(frozen=True)
class NoisyMax(Spec):
    """Choose one of m public candidates by the sum over units of scores in [0, bound].

    ``permute_and_flip`` (McKenna & Sheldon 2020) is report-noisy-max with exponential noise (Ding et al., arXiv
    2105.07260) and never worse than the exponential mechanism; ``exponential`` is that mechanism. With
    P(accept j) = exp(-epsilon (q* - q_j) / sensitivity) both are epsilon-DP for neighbours whose qualities differ by
    a vector of that range: B under add/remove, 2 B under replace-one. Scores are rounded down onto a grid of
    bound / 2**20 and summed in integers, and every coin is exact, so no floating point touches the probabilities.

    Attributes:
        candidates: number m of public candidates.
        bound: largest score B > 0 of a unit; scores are clipped to [0, B].
        rule: one of :data:`RULES`.
        epsilon: pure epsilon under ``adjacency``; delta is 0 and stands here for the chain's target only.
    """

    candidates: int
    bound: float
    epsilon: float
    delta: float
    nominal_units: float
    rule: str = "permute_and_flip"
    unit: str = "record"
    adjacency: str = ADD_REMOVE
    alongside: tuple = ()

    def __post_init__(self):
        self._check()
        if self.candidates < 1 or not self.bound > 0 or not self.epsilon > 0 or self.rule not in RULES:
            raise ValueError(f"NoisyMax needs candidates >= 1, bound > 0, epsilon > 0 and a rule of {RULES}")

    @property
    def sensitivity(self) -> float:
        """Range of the change of the qualities, in grid units."""
        return float(2**GRID_BITS) * (2.0 if self.adjacency == REPLACE_ONE else 1.0)

    def events(self) -> tuple[PureEvent, ...]:
        """Return the accounting entry."""
        if self.adjacency == REPLACE_ONE:
            return (PureEvent(self.epsilon / 2, self.epsilon),)
        return (PureEvent(self.epsilon, 2 * self.epsilon),)

    def qualities(self, scores: np.ndarray) -> np.ndarray:
        """Return each candidate's quality: the exact sum of rounded-down unit scores.

        Args:
            scores: float64 of shape (units, candidates); a row that is not finite counts as zero (rule 6).

        Returns:
            int64 of shape (candidates,), in grid units.
        """
        finite = np.isfinite(scores).all(axis=1, keepdims=True)
        clipped = np.clip(np.where(finite, scores, 0.0), 0.0, self.bound)
        integers = np.floor(clipped / self.bound * 2**GRID_BITS).astype(np.int64)
        return np.minimum(integers, 2**GRID_BITS).sum(axis=0, dtype=np.int64)

    def release(self, scores: np.ndarray, noise: NoiseSource) -> int:
        """Release the index of the chosen candidate.

        Args:
            scores: as in :meth:`qualities`; with no units every candidate is equally likely.
            noise: source of the coins.
        """
        gaps = self.qualities(scores)
        gaps = [int(gap) for gap in gaps.max() - gaps]
        rate = Fraction(self.epsilon) / int(self.sensitivity)
        while True:
            # Permute-and-flip visits a random permutation; the exponential mechanism draws with replacement.
            order = (
                noise.shuffled(self.candidates) if self.rule == RULES[0] else [noise.integer_below(self.candidates)]
            )
            for j in order:
                exponent = rate * gaps[j]
                if noise.bernoulli_exp(exponent.numerator, exponent.denominator):
                    return int(j)


class NoisyScore(float):
    """A score that a mechanism released; made by :func:`noisy_score` alone."""


def noisy_score(spec: GridGaussian, scores: np.ndarray, noise: NoiseSource) -> NoisyScore:
    """Release the mean of unit scores.

    Args:
        spec: one full-batch step; its clip bounds the absolute value of a unit's score.
        scores: float64 of shape (units,); clipped here to [-clip, clip], not finite counts as zero.
        noise: source of the noise.
    """
    values = np.clip(np.where(np.isfinite(scores), scores, 0.0), -spec.clip, spec.clip)[:, None]
    return NoisyScore(spec.release_sum(values, noise)[0] / spec.expected_batch)


@dataclass(frozen=True)
class RepeatAndSelect(Spec):
    """Run a private trial K times, K secret and random, and release the output with the best noisy score.

    Attributes:
        base: specs of everything one trial releases: training, then its score. Candidates may differ in
            post-processing (step size) and clip, never in what the accountant sees.
        candidates: number of public candidates; each trial draws one uniformly.
        mean: mean of K, as in ``RepeatSelectEvent``.
        shape: law of K: infinity is Poisson, 1 geometric, 0 logarithmic, between them negative binomial.
        delta_share: part of delta that turns the Renyi bound into (epsilon, delta_share).
    """

    base: tuple[MechanismSpec, ...]
    candidates: int
    mean: float
    shape: float
    delta_share: float
    nominal_units: float
    epsilon: float
    delta: float
    unit: str = "record"
    adjacency: str = ADD_REMOVE
    alongside: tuple = ()

    def __post_init__(self):
        self._check()
        if not self.base or self.candidates < 1:
            raise ValueError("RepeatAndSelect needs the specs of one trial and at least one candidate")
        if any((spec.unit, spec.adjacency) != (self.unit, self.adjacency) for spec in self.base):
            raise ValueError("a trial's specs must protect the same unit under the same adjacency as the selection")
        self.events()

    @classmethod
    def for_target(cls, *, epsilon: float, delta: float, base: Callable[[float], tuple[MechanismSpec, ...]], **values):
        """Build a spec whose spent epsilon is at or below the target and within 0.1 % of the least noise.

        Args:
            epsilon: target.
            delta: target.
            base: returns one trial's specs, given a factor that multiplies all their noise.
            values: the other fields; ``delta_share`` defaults to half of delta.
        """
        values.setdefault("delta_share", delta / 2)

        def spec(factor: float):
            return cls(base=base(factor), epsilon=epsilon, delta=delta, **values)

        def fits(factor: float) -> bool:
            made = spec(factor)
            events = (*made.alongside, *made.events())
            return Composition(events, adjacency=made.adjacency).epsilon(delta) <= epsilon

        low = high = 1.0
        while not fits(high):
            low, high = high, 2 * high
            if high > 2**40:
                raise ValueError("no amount of noise meets this target: raise epsilon, or lower the mean of K")
        while low == high or fits(low):
            high, low = low, low / 2
            if low < 2**-40:
                break
        while high / low > 1.001:
            middle = (low * high) ** 0.5
            low, high = (low, middle) if fits(middle) else (middle, high)
        return spec(high)

    def events(self) -> tuple[RepeatSelectEvent, ...]:
        """Return the accounting entry."""
        base = tuple(event for spec in self.base for event in spec.events())
        return (RepeatSelectEvent(base, self.mean, self.shape, self.delta_share),)

    def release(self, trial: Callable[[int], tuple[Any, NoisyScore]], noise: NoiseSource) -> tuple[Any, NoisyScore]:
        """Run the trials and return the best output with its score; (None, minus infinity) where K is 0.

        Args:
            trial: runs one candidate, given its index, under :attr:`base`; everything that it returns is private
                until this method has chosen.
            noise: source of K and of the candidates.

        Raises:
            TypeError: a trial returned a score that no mechanism released.
        """
        best: tuple[Any, NoisyScore] = (None, NoisyScore("-inf"))
        for _ in range(noise.repetitions(self.mean, self.shape)):
            output, score = trial(noise.integer_below(self.candidates))
            if not isinstance(score, NoisyScore):
                raise TypeError("RepeatAndSelect compares noisy scores only: an exact score would leak for free")
            if score > best[1]:
                best = (output, score)
        return best
