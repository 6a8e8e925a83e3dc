"""DP-SGD on per-record gradients; sampler, clip, noise and divisor come from our spec (docs/rules.md, rules 1 to 6).

One step: an independent coin per unit; the gradient of each sampled record; the mean over a unit's records; clip to
C; sum; ONE noise draw; divide by the public expected batch; SGD. An empty batch still adds noise. A unit whose
gradient is not finite contributes zero. The physical batch, and how many processes share the work (``ranks.py``),
change speed and memory, nothing else.

Opacus' engine, loader and accountant are not used: they derive the rate and the divisor from the private size.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from dpmixmin.finetune.ranks import Ranks
from dpmixmin.models import networks
from dpmixmin.models.gradients import Loss, binary_cross_entropy, per_record_gradients
from dpmixmin.privacy.access import Progress
from dpmixmin.privacy.mechanisms import ModelGaussian
from dpmixmin.privacy.noise import NoiseSource

_FLOAT32_MARGIN = 1 - 1e-5
"""Clipping aims this far inside C, so that float32 rounding of norms and sums cannot exceed it."""


class ClippedSum:
    """Sums of clipped unit gradients of a model, over sampled units.

    Args:
        model: the network, on any one device; trainable parameters are those with ``requires_grad``.
        features: first argument of ``loss`` after the model, records along the first axis; by default float32 of
            shape (n, d).
        labels: its second; by default float32 of shape (n,), where NaN marks a record that contributes zero.
        unit_index: unit of each row, 0 .. units - 1, in non-decreasing order.
        units: number of units.
        physical_batch: records in memory at once (a unit's records stay together).
        loss: loss of each record (``models/gradients.py``); by default for a model of one logit.
        examples: at least two made-up, PUBLIC records ``(features, labels)`` for the check of the gradients; may be
            left out with the default loss.

    Raises:
        UserError: the model's per-record gradients cannot be computed; names the layer or parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        features: np.ndarray,
        labels: np.ndarray,
        unit_index: np.ndarray,
        units: int,
        physical_batch: int = 512,
        *,
        loss: Loss = binary_cross_entropy,
        examples: tuple[torch.Tensor, torch.Tensor] | None = None,
    ):
        if len(unit_index) and (np.diff(unit_index) < 0).any():
            raise ValueError("rows must be in the order of their units")
        self.model = model
        self._gradients = per_record_gradients(model, loss, examples or _random_examples(features.shape[1]))
        self.parameters, self.size = self._gradients.parameters, self._gradients.size
        self.units = units
        self._device = self.parameters[0].device
        self._x, self._y = torch.from_numpy(features), torch.from_numpy(labels)
        self._starts = np.searchsorted(unit_index, np.arange(units + 1))
        self._physical = physical_batch

    def __call__(self, batch: np.ndarray, clip: float) -> torch.Tensor:
        """Return the sum over sampled units of their clipped mean gradients, float64 of shape (size,), on the CPU.

        Args:
            batch: boolean of shape (units,).
            clip: clipping norm C.
        """
        total = torch.zeros(self.size, dtype=torch.float64, device=self._device)
        for chosen in self._chunks(np.flatnonzero(batch)):
            rows = np.concatenate([np.arange(self._starts[u], self._starts[u + 1]) for u in chosen])
            gradients = self._per_record(rows)
            counts = self._starts[chosen + 1] - self._starts[chosen]
            if (counts != 1).any():
                owner = torch.from_numpy(np.repeat(np.arange(len(chosen)), counts)).to(self._device)
                summed = gradients.new_zeros(len(chosen), self.size).index_add_(0, owner, gradients)
                gradients = summed / torch.from_numpy(counts).to(self._device)[:, None]
            # In float64 (a float32 norm of 400,000 coordinates is off by 1e-4), in blocks for the cache.
            for block in gradients.split(32):
                exact = block.double()
                norms = torch.linalg.vector_norm(exact, dim=1)
                # A unit whose gradient is not finite contributes zero. Multiplying by 0 would keep its NaN.
                exact[~torch.isfinite(norms)] = 0.0
                factors = torch.clamp(clip * _FLOAT32_MARGIN / norms.nan_to_num(0.0).clamp(min=1e-30), max=1.0)
                total += factors @ exact
        return total.cpu()

    def _chunks(self, chosen: np.ndarray) -> Iterator[np.ndarray]:
        """Cut sampled units into groups of at most ``physical_batch`` records (a unit is never cut)."""
        sizes = self._starts[chosen + 1] - self._starts[chosen]
        chunk = (np.cumsum(sizes) - 1) // max(self._physical, int(sizes.max(initial=1)))
        for number in np.unique(chunk):
            yield chosen[chunk == number]

    def _per_record(self, rows: np.ndarray) -> torch.Tensor:
        """Return per-record gradients of shape (rows, size), in the model's precision."""
        index = torch.from_numpy(rows)
        return self._gradients(self._x[index].to(self._device), self._y[index].to(self._device))

    def add(self, update: torch.Tensor) -> None:
        """Add a flat update to the trainable parameters."""
        offset = 0
        with torch.no_grad():
            for parameter in self.parameters:
                part = update[offset : offset + parameter.numel()]
                parameter += part.reshape(parameter.shape).to(parameter)
                offset += parameter.numel()


def fine_tune(
    sums: ClippedSum,
    spec: ModelGaussian,
    learning_rate: float,
    noise: NoiseSource,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> None:
    """Train the model behind ``sums`` in place: exactly ``spec.steps`` steps, then stop.

    Args:
        sums: the private part and the model; with several processes, this rank's share of the part.
        spec: sampler, clip, divisor, noise, steps.
        learning_rate: step size of SGD (post-processing).
        noise: source of all private randomness; each rank has its own.
        ranks: the processes that train this model together; left out, this one alone.
        progress: where the state is saved between steps, and gone on from (rule 23); left out, nowhere.

    Raises:
        UserError: the ranks start from different models or settings, or draw the same noise.
    """
    ranks = ranks or Ranks.single()
    saved = progress.load() if progress else None
    if saved is not None:
        networks.load_bytes(sums.model, saved[1])
    if ranks.world > 1:
        ranks.check(same=_digest(sums, spec, learning_rate), different=noise.random_bytes(16))
    for step in range(saved[0] if saved else 0, spec.steps):
        total = sums(spec.sample(sums.units, noise), spec.clip).numpy()
        released = ranks.sum(torch.from_numpy(spec.release_sum(total, noise, shares=ranks.world)))
        sums.add(-learning_rate * released / spec.expected_batch)
        if progress and ranks.rank == 0:
            progress.save(step + 1, lambda: networks.state_bytes(sums.model))
        # By steps, never by time: how long a step takes depends on the number of units.
        if ranks.rank == 0 and spec.steps >= 100 and (step + 1) % (spec.steps // 10) == 0:
            print(f"  step {step + 1}/{spec.steps}", file=sys.stderr, flush=True)


def _random_examples(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return three public records, of both labels and of none."""
    features = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    return features, torch.tensor([0.0, 1.0, torch.nan])


def _digest(sums: ClippedSum, spec: ModelGaussian, learning_rate: float) -> bytes:
    """Return a hash of what every rank must agree on: settings and weights."""
    digest = hashlib.sha256(f"{spec.digest()} {learning_rate!r}".encode())
    for parameter in sums.model.parameters():
        digest.update(parameter.detach().cpu().double().numpy().tobytes())
    return digest.digest()
