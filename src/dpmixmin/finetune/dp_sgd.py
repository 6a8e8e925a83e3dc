"""DP-SGD on Opacus' per-example gradients; sampler, clip, noise and divisor come from our spec (rules 1 to 6).

One step: an independent coin per unit; the gradient of each sampled record; the mean over a unit's records; clip to
C; sum; ONE noise draw; divide by the public expected batch; SGD. An empty batch still adds noise. A unit whose
gradient is not finite contributes zero. The physical batch changes speed and memory, nothing else.

Opacus' engine, loader and accountant are not used: they derive the rate and the divisor from the private size.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dpmixmin.models.networks import refuse_batch_statistics
from dpmixmin.privacy.mechanisms import ModelGaussian
from dpmixmin.privacy.noise import NoiseSource

_FLOAT32_MARGIN = 1 - 1e-5
"""Clipping aims this far inside C, so that float32 rounding of norms and sums cannot exceed it."""


class ClippedSum:
    """Sums of clipped unit gradients of a model, over sampled units.

    Args:
        model: gives one logit per record; trainable parameters are those with ``requires_grad``.
        features: float32 of shape (n, d).
        labels: float32 of shape (n,); NaN marks a record that contributes zero.
        unit_index: unit of each row, 0 .. units - 1, in non-decreasing order.
        units: number of units.
        physical_batch: records in memory at once (a unit's records stay together).
    """

    def __init__(
        self,
        model: nn.Module,
        features: np.ndarray,
        labels: np.ndarray,
        unit_index: np.ndarray,
        units: int,
        physical_batch: int = 512,
    ):
        from opacus.grad_sample import GradSampleModule

        refuse_batch_statistics(model)
        if len(unit_index) and (np.diff(unit_index) < 0).any():
            raise ValueError("rows must be in the order of their units")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.model = GradSampleModule(model, loss_reduction="sum")
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.size = sum(parameter.numel() for parameter in self.parameters)
        self.units = units
        self._x, self._y = torch.from_numpy(features), torch.from_numpy(labels)
        self._starts = np.searchsorted(unit_index, np.arange(units + 1))
        self._index = unit_index
        self._physical = physical_batch

    def __call__(self, batch: np.ndarray, clip: float) -> torch.Tensor:
        """Return the sum over sampled units of their clipped mean gradients, float64 of shape (size,).

        Args:
            batch: boolean of shape (units,).
            clip: clipping norm C.
        """
        total = torch.zeros(self.size, dtype=torch.float64)
        for chosen in self._chunks(np.flatnonzero(batch)):
            rows = np.concatenate([np.arange(self._starts[u], self._starts[u + 1]) for u in chosen])
            gradients = self._per_record(rows)
            counts = self._starts[chosen + 1] - self._starts[chosen]
            if (counts != 1).any():
                owner = torch.from_numpy(np.repeat(np.arange(len(chosen)), counts))
                summed = torch.zeros(len(chosen), self.size).index_add_(0, owner, gradients)
                gradients = summed / torch.from_numpy(counts)[:, None]
            # In float64 (a float32 norm of 400,000 coordinates is off by 1e-4), in blocks for the cache.
            for block in gradients.split(32):
                exact = block.double()
                norms = torch.linalg.vector_norm(exact, dim=1)
                # A unit whose gradient is not finite contributes zero. Multiplying by 0 would keep its NaN.
                exact[~torch.isfinite(norms)] = 0.0
                factors = torch.clamp(clip * _FLOAT32_MARGIN / norms.nan_to_num(0.0).clamp(min=1e-30), max=1.0)
                total += factors @ exact
        return total

    def _chunks(self, chosen: np.ndarray) -> Iterator[np.ndarray]:
        """Cut sampled units into groups of at most ``physical_batch`` records (a unit is never cut)."""
        sizes = self._starts[chosen + 1] - self._starts[chosen]
        chunk = (np.cumsum(sizes) - 1) // max(self._physical, int(sizes.max(initial=1)))
        for number in np.unique(chunk):
            yield chosen[chunk == number]

    def _per_record(self, rows: np.ndarray) -> torch.Tensor:
        """Return per-record gradients, float32 of shape (rows, size); zero for records without a label."""
        index = torch.from_numpy(rows)
        x, y = self._x[index], self._y[index]
        present = torch.isfinite(y)
        self.model.train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            targets = torch.where(present, y, 0.0)
            losses = binary_cross_entropy_with_logits(self.model(x).squeeze(1), targets, reduction="none")
            torch.where(present, losses, 0.0).sum().backward()
        flat = torch.cat([parameter.grad_sample.reshape(len(rows), -1) for parameter in self.parameters], dim=1)
        for parameter in self.parameters:
            parameter.grad_sample = None
            parameter.grad = None
        return flat

    def add(self, update: torch.Tensor) -> None:
        """Add a flat update to the trainable parameters."""
        offset = 0
        with torch.no_grad():
            for parameter in self.parameters:
                part = update[offset : offset + parameter.numel()]
                parameter += part.reshape(parameter.shape).to(parameter.dtype)
                offset += parameter.numel()


def fine_tune(sums: ClippedSum, spec: ModelGaussian, learning_rate: float, noise: NoiseSource) -> None:
    """Train the model behind ``sums`` in place: exactly ``spec.steps`` steps, then stop.

    Args:
        sums: the private part and the model.
        spec: sampler, clip, divisor, noise, steps.
        learning_rate: step size of SGD (post-processing).
        noise: source of all private randomness.
    """
    for step in range(spec.steps):
        total = sums(spec.sample(sums.units, noise), spec.clip).numpy()
        update = (total + spec.noise_for(sums.size, noise)) / spec.expected_batch
        sums.add(torch.from_numpy(-learning_rate * update))
        # By steps, never by time: how long a step takes depends on the number of units.
        if spec.steps >= 100 and (step + 1) % (spec.steps // 10) == 0:
            print(f"  step {step + 1}/{spec.steps}", file=sys.stderr, flush=True)
