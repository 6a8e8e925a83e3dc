"""DP-SGD on per-record gradients; sampler, clip, noise and divisor come from our spec (docs/rules.md, rules 1 to 6).

One step: an independent coin per unit; at most ``records_per_step`` of a unit's records, drawn anew
(``privacy/subsample.py``); the gradient of each; the mean over them; clip to C; sum; ONE noise draw; divide by the
public expected batch; SGD. An empty batch still adds noise. A unit whose gradient is not finite contributes zero. The
physical batch, padding that ``trim`` cuts, and how many processes share the work (``ranks.py``) change speed and
memory, nothing else. Neither does stopping: a run that is told to stop ends between two steps and is gone on from.

Opacus' engine, loader and accountant are not used: they derive the rate and the divisor from the private size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from dpmixmin import interrupt
from dpmixmin.models import networks
from dpmixmin.models.gradients import Loss, binary_cross_entropy, per_record_gradients
from dpmixmin.privacy.access import Progress
from dpmixmin.privacy.accounting import Composition
from dpmixmin.privacy.mechanisms import ModelGaussian
from dpmixmin.privacy.noise import NoiseSource
from dpmixmin.privacy.subsample import SECRET_BYTES, chosen
from dpmixmin.progress import Steps
from dpmixmin.ranks import Ranks

_FLOAT32_MARGIN = 1 - 1e-5
"""Clipping aims this far inside C, so that float32 rounding of norms and sums cannot exceed it."""


Trim = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Cuts what no record of a physical batch needs: ``trim(features, labels)`` of the same records."""


class ClippedSum:
    """Sums of clipped unit gradients of a model, over sampled units.

    A record is one row, or several (the windows of a long text): its gradient is then the weighted mean over its rows.

    Args:
        model: the network, on any one device; trainable parameters are those with ``requires_grad``.
        features: first argument of ``loss`` after the model, rows along the first axis, of any type (int64 tokens);
            by default float32 of shape (n, d).
        labels: its second, of any type (int64 lengths); by default float32 of shape (n,), where NaN marks a record
            that contributes zero.
        unit_index: unit of each row, 0 .. units - 1, in non-decreasing order.
        units: number of units.
        physical_batch: rows in memory at once. A unit with more is summed in pieces, and clipped when it is whole.
        loss: loss of each row (``models/gradients.py``); by default for a model of one logit.
        examples: at least two made-up, PUBLIC records ``(features, labels)`` for the check of the gradients; may be
            left out with the default loss.
        records_per_step: at most this many of a unit's records enter a step (G_ULS); None: all.
        names: of the records, uint64 of shape (records,), from ``subsample.names``; for ``records_per_step`` only.
        row_record: record of each row, 0 .. records - 1; by default every row is a record. A record without rows is
            not there.
        row_weight: weight of each row in its record's mean, float of shape (n,); those of a record add up to 1.
            Default: the rows of a record weigh the same.
        trim: cuts the padding of a physical batch; changes the gradients by rounding only.

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
        records_per_step: int | None = None,
        names: np.ndarray | None = None,
        row_record: np.ndarray | None = None,
        row_weight: np.ndarray | None = None,
        trim: Trim | None = None,
    ):
        if len(unit_index) and (np.diff(unit_index) < 0).any():
            raise ValueError("rows must be in the order of their units")
        if records_per_step is not None and names is None:
            raise ValueError("records without names cannot be subsampled")
        self.model = model
        self._gradients = per_record_gradients(model, loss, examples or _random_examples(features.shape[1]))
        self.parameters, self.size = self._gradients.parameters, self._gradients.size
        self.units, self.records_per_step = units, records_per_step
        self._device = self.parameters[0].device
        self._x, self._y = torch.from_numpy(features), torch.from_numpy(labels)
        self._physical, self._trim = physical_batch, trim
        self._unit = np.asarray(unit_index)
        rows = np.arange(len(features)) if row_record is None else row_record
        there, first, self._record, sizes = np.unique(rows, return_index=True, return_inverse=True, return_counts=True)
        self._record_unit = self._unit[first]
        if (self._record_unit[self._record] != self._unit).any():
            raise ValueError("a record belongs to one unit")
        self._names = None if names is None else names[there]
        self._weight = 1 / sizes[self._record] if row_weight is None else row_weight

    def __call__(self, batch: np.ndarray, clip: float, secret: bytes | None = None) -> torch.Tensor:
        """Return the sum over sampled units of their clipped mean gradients, float64 of shape (size,), on the CPU.

        Args:
            batch: boolean of shape (units,).
            clip: clipping norm C.
            secret: this step's ``SECRET_BYTES`` fresh bytes, which choose the records; for ``records_per_step`` only.
        """
        rows, weights = self._present(batch, secret)
        total = torch.zeros(self.size, dtype=torch.float64, device=self._device)
        for part in self._chunks(rows):
            gradients = self._unit_means(rows[part], weights[part])
            # In float64 (a float32 norm of 400,000 coordinates is off by 1e-4), in blocks for the cache.
            for block in gradients.split(32):
                exact = block.double()
                norms = torch.linalg.vector_norm(exact, dim=1)
                # A unit whose gradient is not finite contributes zero. Multiplying by 0 would keep its NaN.
                exact[~torch.isfinite(norms)] = 0.0
                factors = torch.clamp(clip * _FLOAT32_MARGIN / norms.nan_to_num(0.0).clamp(min=1e-30), max=1.0)
                total += factors @ exact
        return total.cpu()

    def _present(self, batch: np.ndarray, secret: bytes | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the records that enter a step, in order, and their weights in their unit's mean."""
        records = np.flatnonzero(batch[self._record_unit])
        if self.records_per_step is not None:
            if secret is None:
                raise ValueError("choosing records takes a secret of this step's own")
            names, unit = self._names[records], self._record_unit[records]
            records = records[chosen(secret, names, unit, self.records_per_step)]
        present = np.zeros(len(self._record_unit), dtype=bool)
        present[records] = True
        counts = np.bincount(self._record_unit[records], minlength=self.units)
        rows = np.flatnonzero(present[self._record])
        return rows, self._weight[rows] / counts[self._unit[rows]]

    def _chunks(self, rows: np.ndarray) -> Iterator[slice]:
        """Cut rows between units, into runs of at most ``physical_batch`` rows or of one larger unit."""
        unit = self._unit[rows]
        ends = np.r_[np.flatnonzero(unit[1:] != unit[:-1]) + 1, len(rows)]
        start = 0
        while start < len(rows):
            following = np.searchsorted(ends, start, side="right")
            fitting = np.searchsorted(ends, start + self._physical, side="right") - 1
            stop = int(ends[max(following, fitting)])
            yield slice(start, stop)
            start = stop

    def _unit_means(self, rows: np.ndarray, weights: np.ndarray) -> torch.Tensor:
        """Return the weighted sums over each unit's rows, shape (units among them, size)."""
        units, owner = np.unique(self._unit[rows], return_inverse=True)
        if len(units) == len(rows) and (weights == 1).all():
            return self._per_record(rows)
        total = self.parameters[0].new_zeros(len(units), self.size)
        for start in range(0, len(rows), self._physical):
            piece = slice(start, start + self._physical)
            gradients = self._per_record(rows[piece])
            factors = torch.from_numpy(weights[piece]).to(gradients)
            total.index_add_(0, torch.from_numpy(owner[piece]).to(self._device), gradients.mul_(factors[:, None]))
        return total

    def _per_record(self, rows: np.ndarray) -> torch.Tensor:
        """Return the gradients of rows alone, of shape (rows, size), in the model's precision."""
        index = torch.from_numpy(rows)
        batch = self._x[index], self._y[index]
        if self._trim is not None:
            batch = self._trim(*batch)
        return self._gradients(*(part.to(self._device) for part in batch))

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

    SIGTERM and the first Ctrl-C wait for the end of a step. The leader then saves the state and stops; the other ranks
    never stop by themselves: they find it gone.

    Args:
        sums: the private part and the model; with several processes, this rank's share of the part.
        spec: sampler, clip, divisor, noise, steps.
        learning_rate: step size of SGD (post-processing).
        noise: source of all private randomness; each rank has its own.
        ranks: the processes that train this model together; left out, this one alone.
        progress: of the leader: where the state is saved between steps, and gone on from (rule 23); left out, nowhere.

    Raises:
        UserError: the ranks start from different models, steps or settings, or draw the same noise.
        Interrupted: told to stop, or another rank is gone; the state after the last whole step is saved.
    """
    ranks = ranks or Ranks.single()
    done, state = _saved(ranks, progress)
    if state:
        networks.load_bytes(sums.model, state)
    if ranks.world > 1:
        ranks.check(same=_digest(sums, spec, learning_rate, done), different=noise.random_bytes(16))
    # A trial on public records charges nothing, and keeps no state: it has no epsilon to tell.
    epsilon = (lambda steps: _epsilon_of(spec, steps)) if progress else None
    with interrupt.held() as asked_to_stop:
        how_far = Steps(spec.steps, private=True, epsilon=epsilon, start=done)
        for step in range(done, spec.steps):
            # Drawn although no unit may be above the limit: the number of draws is public.
            secret = None if sums.records_per_step is None else noise.random_bytes(SECRET_BYTES)
            total = sums(spec.sample(sums.units, noise), spec.clip, secret).numpy()
            share = torch.from_numpy(spec.release_sum(total, noise, shares=ranks.world))
            try:
                released = ranks.sum(share)
            except interrupt.Interrupted:
                # A rank is gone in the middle of this step: the model is as the last whole one left it.
                if progress:
                    progress.save(step, lambda: networks.state_bytes(sums.model), now=True)
                raise
            sums.add(-learning_rate * released / spec.expected_batch)
            stop = ranks.leads and asked_to_stop()
            if progress:
                progress.save(step + 1, lambda: networks.state_bytes(sums.model), now=stop)
            how_far.at(step + 1)
            if stop:
                raise interrupt.Interrupted


def _saved(ranks: Ranks, progress: Progress | None) -> tuple[int, bytes]:
    """Return the leader's finished steps and the state after them, on every rank; without a state, 0 and nothing."""

    def load() -> bytes:
        found = progress.load() if progress else None
        return b"" if found is None else found[0].to_bytes(8, "big") + found[1]

    found = ranks.led(load)
    return int.from_bytes(found[:8], "big"), found[8:]


def _epsilon_of(spec: ModelGaussian, steps: int) -> float:
    """Return what the first steps of a spec amount to: of public parameters alone."""
    events = (replace(event, steps=steps) for event in spec.events())
    return Composition((*spec.alongside, *events), adjacency=spec.adjacency).epsilon(spec.delta)


def _random_examples(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return three public records, of both labels and of none."""
    features = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    return features, torch.tensor([0.0, 1.0, torch.nan])


def _digest(sums: ClippedSum, spec: ModelGaussian, learning_rate: float, done: int) -> bytes:
    """Return a hash of what every rank must agree on: settings, finished steps and weights."""
    settings = f"{spec.digest()} {learning_rate!r} {sums.records_per_step} {done}"
    digest = hashlib.sha256(settings.encode())
    for parameter in sums.model.parameters():
        digest.update(parameter.detach().cpu().double().numpy().tobytes())
    return digest.digest()
