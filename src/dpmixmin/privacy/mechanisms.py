"""One immutable spec per mechanism run: sampler, clip, divisor, noise and accounting come from the same object.

A spec holds public parameters only, so two neighbouring datasets give byte-identical specs, and nobody can account
for a sampler that was not used. One step of a Gaussian mechanism is

    sample units -> clip each unit's vector to C -> sum -> add noise ONCE -> divide by the PUBLIC expected batch.

Guarantee: for neighbours in one unit, one step is a Poisson-subsampled (or full-batch) Gaussian mechanism whose
sensitivity follows from the adjacency (:attr:`MechanismSpec.sensitivity`), and T adaptive steps compose;
:meth:`MechanismSpec.events` is what the accountant sees.

| class | vectors | add/remove, zero-out | replace-one | used by |
|---|---|---|---|---|
| GridGaussian | clipped to C, on an integer grid | C | 2 C | mixture weights |
| ResponsibilityGaussian | on the simplex, on an integer grid | 1 | sqrt 2 | mixture weights (`responsibilities`) |
| ModelGaussian | clipped to C, floating point | C | 2 C | DP-SGD |

Selection mechanisms are in selection.py.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

from dpmixmin.privacy.accounting import Composition, calibrate
from dpmixmin.privacy.events import ADD_REMOVE, ADJACENCIES, REPLACE_ONE, GaussianEvent, to_json
from dpmixmin.privacy.noise import LOG2_TV_PER_DRAW, NoiseSource

GRID_BITS = 20
"""The integer grid of the mixture release is C / 2**20."""


class Spec(ABC):
    """What every mechanism's spec has; all are frozen dataclasses with the fields below.

    Attributes:
        nominal_units: public number of units of the part(s); never counted from data.
        epsilon: the target that the noise was calibrated to, for this release together with ``alongside``.
        delta: the target's failure probability.
        unit: what is protected.
        adjacency: what neighbours are: add_remove, replace_one (the public id is kept) or zero_out.
        alongside: events of the chain's earlier releases on the same units, which the target covers too (sequential
            composition); empty when the parts are disjoint.
    """

    nominal_units: float
    epsilon: float
    delta: float
    unit: str
    adjacency: str
    alongside: tuple

    @abstractmethod
    def events(self) -> tuple:
        """Return what the accountant composes for this release (see events.py)."""

    def spent(self) -> float:
        """Return the epsilon spent at this spec's delta and adjacency, ``alongside`` included.

        Raises:
            ValueError: it is above the target (a spec that was not built by ``for_target``).
        """
        epsilon = Composition((*self.alongside, *self.events()), adjacency=self.adjacency).epsilon(self.delta)
        if epsilon > self.epsilon:
            raise ValueError(f"spec spends epsilon {epsilon:g}, above its target {self.epsilon:g}")
        return epsilon

    def describe(self) -> dict:
        """Return the parameters as plain JSON types, with the class's name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["alongside"] = [to_json(event) for event in self.alongside]
        return {"mechanism": type(self).__name__, **{key: _plain(value) for key, value in values.items()}}

    def digest(self) -> str:
        """Return a short hash of :meth:`describe`."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()[:16]

    def total_variation(self, dimensions: int) -> float:
        """Return the distance of the run's randomness from its ideal law, to be added to delta."""
        return 0.0

    def _check(self) -> None:
        if self.adjacency not in ADJACENCIES:
            raise ValueError(f"adjacency must be one of {', '.join(ADJACENCIES)}")


def _plain(value):
    if isinstance(value, Spec):
        return value.describe()
    if value == math.inf:
        return "inf"  # JSON has no infinity
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class MechanismSpec(Spec):
    """Public parameters of T steps of a sampled Gaussian mechanism on clipped unit vectors.

    Attributes:
        clip: clipping norm C > 0 of one unit's vector.
        noise_multiplier: noise standard deviation divided by C.
        steps: T.
        sampling_rate: probability q of each unit to enter a step, by its own coin; 1 is full batch.
        nominal_units: see :class:`Spec`, as for the fields that follow.
        epsilon: target.
        delta: target.
        unit: what is protected.
        adjacency: what neighbours are.
        alongside: earlier events that the target covers.
    """

    clip: float
    noise_multiplier: float
    steps: int
    sampling_rate: float
    nominal_units: float
    epsilon: float
    delta: float
    unit: str = "record"
    adjacency: str = ADD_REMOVE
    alongside: tuple = ()

    replace_factor: ClassVar[float] = 2.0
    """Replace-one sensitivity over add/remove sensitivity: two vectors of norm C are at most 2 C apart."""

    def __post_init__(self):
        self._check()
        self.events()  # the events check noise multiplier, rate and steps

    @classmethod
    def for_target(
        cls,
        *,
        epsilon: float,
        delta: float,
        clip: float,
        steps: int,
        sampling_rate: float,
        nominal_units: float,
        unit: str = "record",
        adjacency: str = ADD_REMOVE,
        alongside: tuple = (),
    ):
        """Build a spec whose spent epsilon is at or below the target.

        Raises:
            ValueError: ``alongside`` spends the whole target already.
        """
        sigma = calibrate(
            epsilon,
            delta,
            sampling_rate,
            steps,
            adjacency=adjacency,
            replace_factor=cls.replace_factor,
            alongside=alongside,
        )
        return cls(clip, sigma, steps, sampling_rate, nominal_units, epsilon, delta, unit, adjacency, alongside)

    @property
    def expected_batch(self) -> float:
        """The public divisor: q times the nominal number of units."""
        return self.sampling_rate * self.nominal_units

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on a sum, in the vector's own units."""
        return self.noise_multiplier * self.clip

    @property
    def sensitivity(self) -> float:
        """How far one unit can move a step's sum under this adjacency, in the vector's own units."""
        return self.clip * (self.replace_factor if self.adjacency == REPLACE_ONE else 1.0)

    def events(self) -> tuple[GaussianEvent, ...]:
        """Return the accounting entry: noise over the add/remove sensitivity C, rate, steps."""
        return (GaussianEvent(self.noise_multiplier, self.sampling_rate, self.steps, self.replace_factor),)

    def sample(self, count: int, noise: NoiseSource) -> np.ndarray:
        """Draw one step's batch: an independent coin per unit.

        Args:
            count: number of units present (private; never leaves the caller).
            noise: source of the coins.

        Returns:
            Boolean array of shape (count,); all True for a full batch.
        """
        if self.sampling_rate == 1:
            return np.ones(count, dtype=bool)
        return noise.coins(self.sampling_rate, count)


@dataclass(frozen=True)
class GridGaussian(MechanismSpec):
    """The k-dimensional release on an integer grid (rule 15); of clipped gradients, for the mixture.

    Each unit's clipped vector is rounded TOWARD ZERO onto multiples of C / 2**20, summed exactly in int64, and
    ROUND(N(0, (sigma C)**2) / grid) is added to every coordinate. That is the continuous Gaussian mechanism on the
    rounded vectors followed by rounding, so its accounting holds; the sampler's total variation (2**-130 a draw) is
    added to delta, times 1 + e^epsilon.
    """

    grid_bits: int = GRID_BITS

    statistic: ClassVar[str] = "gradients"
    """What a mixture learner sums under this spec."""

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.grid_bits <= 28:
            raise ValueError("grid_bits must be in [1, 28]: integer norms are checked in int64")

    @property
    def grid(self) -> float:
        """Distance of two grid points."""
        return self.clip / 2**self.grid_bits

    def to_grid(self, vectors: np.ndarray) -> np.ndarray:
        """Round clipped unit vectors toward zero onto the grid, in grid units.

        Args:
            vectors: float64 of shape (n, k); norms at most ``clip`` up to rounding. Rows with NaN or infinity count
                as zero (rule 6).

        Returns:
            int64 of shape (n, k) whose exact integer norm is at most 2**grid_bits.
        """
        finite = np.isfinite(vectors).all(axis=1, keepdims=True)
        integers = np.trunc(np.where(finite, vectors, 0.0) / self.grid)
        # A vector far above the clip (a caller's bug) must not overflow int64: the norm check below shrinks it.
        integers = np.clip(integers, -(2**self.grid_bits), 2**self.grid_bits).astype(np.int64)
        limit = 1 << (2 * self.grid_bits)
        while True:
            over = (integers * integers).sum(axis=1) > limit
            if not over.any():
                return integers
            # Too long by an ulp, or (a caller's bug) by far: scale, and lower every coordinate by a grid point.
            rows = integers[over]
            shrink = np.minimum(1.0, 2**self.grid_bits / np.linalg.norm(rows, axis=1, keepdims=True))
            scaled = np.trunc(rows * shrink).astype(np.int64)
            integers[over] = scaled - np.where(scaled == rows, np.sign(rows), 0)

    def release_sum(self, vectors: np.ndarray, noise: NoiseSource) -> np.ndarray:
        """Release the noisy sum of clipped unit vectors.

        Args:
            vectors: float64 of shape (n, k), already clipped to ``clip``; n may be 0.
            noise: source of the noise.

        Returns:
            float64 of shape (k,): a multiple of :attr:`grid` in every coordinate.
        """
        total = self.to_grid(vectors).sum(axis=0, dtype=np.int64)
        return self.add_noise(total, noise) * self.grid

    def add_noise(self, total: np.ndarray, noise: NoiseSource) -> np.ndarray:
        """Add a draw of its own to every coordinate of an exact sum; the only place where a release gets its noise.

        Args:
            total: int64 of shape (m,), in grid units: one sum, or for an audit those of many runs, end to end.
            noise: source of the noise.

        Returns:
            int64 of shape (m,), in grid units.
        """
        scale = self.noise_multiplier * 2**self.grid_bits
        return total + noise.rounded_gaussian(scale, total.shape[0])

    def total_variation(self, dimensions: int) -> float:
        """Return the sampler's total variation over the whole run, to be added to delta."""
        return self.steps * dimensions * 2.0**LOG2_TV_PER_DRAW


@dataclass(frozen=True)
class ResponsibilityGaussian(GridGaussian):
    """The sum of units' mean responsibilities r_i = lambda_i p_i / (p . lambda), without any clipping.

    A responsibility vector lies on the simplex, so its norm is at most 1, and two of them are at most sqrt 2 apart.
    """

    statistic: ClassVar[str] = "responsibilities"
    replace_factor: ClassVar[float] = math.sqrt(2.0)

    def __post_init__(self):
        super().__post_init__()
        if self.clip != 1.0:
            raise ValueError("responsibilities lie on the simplex: their clipping norm is 1")

    def to_grid(self, vectors: np.ndarray) -> np.ndarray:
        """Round toward zero onto the grid; a row that is not on the simplex (a caller's bug) counts as zero.

        On the simplex means: no negative coordinate, and a sum of at most 1 after rounding. Both together keep the
        replace-one distance at sqrt 2, which a norm of at most 1 alone would not.
        """
        integers = super().to_grid(vectors)
        outside = (integers < 0).any(axis=1) | (integers.sum(axis=1) > 2**self.grid_bits)
        integers[outside] = 0
        return integers


@dataclass(frozen=True)
class ModelGaussian(MechanismSpec):
    """The model-sized release of DP-SGD: float64 noise from the source, on float sums."""

    def release_sum(self, total: np.ndarray, noise: NoiseSource, *, shares: int = 1) -> np.ndarray:
        """Add one step's noise, or this process' share of it.

        Args:
            total: flat sum of clipped unit vectors, float64.
            noise: source of the noise.
            shares: number of processes whose independent shares add up to the noise (rule 24).

        Returns:
            float64 of the same shape.
        """
        return total + noise.gaussian(self.noise_std / math.sqrt(shares), total.shape[0])
