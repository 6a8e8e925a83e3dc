"""One immutable spec per mechanism run: sampler, clip, divisor, noise and accounting come from the same object.

A spec holds public parameters only, so two neighbouring datasets give byte-identical specs, and nobody can account
for a sampler that was not used. One step of either mechanism is

    sample units -> clip each unit's vector to C -> sum -> add noise ONCE -> divide by the PUBLIC expected batch.

Guarantee (both classes): for neighbours that differ in one unit, added or removed, one step is a Poisson-subsampled
(or full-batch) Gaussian mechanism of sensitivity C, and T adaptive steps compose; :meth:`MechanismSpec.event` is what
the accountant sees.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

import numpy as np

from dpmixmin.privacy.accounting import Composition, Event, calibrate
from dpmixmin.privacy.noise import LOG2_TV_PER_DRAW, NoiseSource

GRID_BITS = 20
"""The integer grid of the mixture release is C / 2**20."""


@dataclass(frozen=True)
class MechanismSpec:
    """Public parameters of T steps of a sampled Gaussian mechanism on clipped unit vectors.

    Attributes:
        clip: clipping norm C > 0 of one unit's vector.
        noise_multiplier: noise standard deviation divided by C.
        steps: T.
        sampling_rate: probability q of each unit to enter a step, by its own coin; 1 is full batch.
        nominal_units: public number of units of the part(s); never counted from data.
        epsilon: the target that the noise was calibrated to.
        delta: the target's failure probability.
        unit: what is protected.
        adjacency: always add/remove of one unit.
    """

    clip: float
    noise_multiplier: float
    steps: int
    sampling_rate: float
    nominal_units: float
    epsilon: float
    delta: float
    unit: str = "record"
    adjacency: str = "add_remove"

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
    ):
        """Build a spec whose spent epsilon is at or below the target."""
        sigma = calibrate(epsilon, delta, sampling_rate, steps)
        return cls(clip, sigma, steps, sampling_rate, nominal_units, epsilon, delta, unit)

    @property
    def expected_batch(self) -> float:
        """The public divisor: q times the nominal number of units."""
        return self.sampling_rate * self.nominal_units

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on a sum, in the vector's own units."""
        return self.noise_multiplier * self.clip

    def event(self) -> Event:
        """Return what the accountant composes."""
        return Event(self.noise_multiplier, self.sampling_rate, self.steps)

    def spent(self) -> float:
        """Return the epsilon spent at this spec's delta.

        Raises:
            ValueError: it is above the target (a spec that was not built by :meth:`for_target`).
        """
        epsilon = Composition([self.event()]).epsilon(self.delta)
        if epsilon > self.epsilon:
            raise ValueError(f"spec spends epsilon {epsilon:g}, above its target {self.epsilon:g}")
        return epsilon

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

    def describe(self) -> dict:
        """Return the parameters as plain JSON types, with the class's name."""
        return {"mechanism": type(self).__name__, **asdict(self)}

    def digest(self) -> str:
        """Return a short hash of :meth:`describe`."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class GridGaussian(MechanismSpec):
    """The k-dimensional release on an integer grid (rule 15), for the mixture weights.

    Each unit's clipped vector is rounded TOWARD ZERO onto multiples of C / 2**20, summed exactly in int64, and
    ROUND(N(0, (sigma C)**2) / grid) is added to every coordinate. That is the continuous Gaussian mechanism on the
    rounded vectors followed by rounding, so its accounting holds; the sampler's total variation (2**-130 a draw) is
    added to delta, times 1 + e^epsilon.
    """

    grid_bits: int = GRID_BITS

    def __post_init__(self):
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
        scale = self.noise_multiplier * 2**self.grid_bits
        return (total + noise.rounded_gaussian(scale, total.shape[0])) * self.grid

    def total_variation(self, dimensions: int) -> float:
        """Return the sampler's total variation over the whole run, to be added to delta."""
        return self.steps * dimensions * 2.0**LOG2_TV_PER_DRAW


@dataclass(frozen=True)
class ModelGaussian(MechanismSpec):
    """The model-sized release of DP-SGD: float64 noise from the source, on float sums."""

    def noise_for(self, size: int, noise: NoiseSource) -> np.ndarray:
        """Return one step's noise for a flat sum of ``size`` coordinates, float64."""
        return noise.gaussian(self.noise_std, size)
