"""Training on PUBLIC data with binary cross-entropy on (soft) targets.

The label axes are the sources and they share their inputs, so drawing source i with probability lambda_i and then its
label is the same as the soft target ``sum_i lambda_i y_i``, with less variance. The proxy is
the same training with all axes as outputs: ``f_i`` is its i-th output (DP-MixMin paper, section 4.2).
"""

from __future__ import annotations

import hashlib
import io
import sys

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dpmixmin.models.device import best
from dpmixmin.pretrain import loop
from dpmixmin.privacy.access import Progress
from dpmixmin.ranks import Ranks
from dpmixmin.sections import Network


def train_public(
    model: nn.Module,
    features: np.ndarray,
    targets: np.ndarray,
    settings: Network,
    seed: int,
    *,
    state: Progress | None = None,
    ranks: Ranks | None = None,
    private: bool = False,
) -> list[float]:
    """Train in place with Adam, on the GPU if there is one; reproducible from the public seed.

    Args:
        model: gives logits; on the CPU, and comes back there.
        features: float32 of shape (n, d).
        targets: in [0, 1], float32 of shape (n, outputs).
        settings: steps, batch and learning rate.
        seed: public seed of the order of records.
        state: where the state is kept from time to time and gone on from; the caller deletes it. A state of another
            run (settings, data or start differ) is not used. Left out, nowhere.
        ranks: the processes that train together; left out, this one alone.
        private: whether the targets were learned without privacy: then the public log has steps only (loop.py).

    Returns:
        The loss at every step (public).

    Raises:
        Interrupted: a signal came; the state is saved.
    """
    ranks = ranks or Ranks.single()
    training = _Training(model, features, targets, settings, seed, ranks, digested=state is not None)
    loop.run(training, state, ranks, lambda line: print(line, file=sys.stderr, flush=True), private=private)
    model.to("cpu")
    return training.losses


class _Training:
    """One training: what changes with its steps is in :meth:`state`."""

    def __init__(self, model, features, targets, settings, seed, ranks, *, digested):
        self.model, self.settings, self.ranks = model, settings, ranks
        self.x = np.ascontiguousarray(features)
        self.y = np.ascontiguousarray(targets, dtype=np.float32)
        # Hashing a large table takes a second, so it is done only where a state is kept.
        self.digest = self._digest(seed) if digested else ""
        self.steps, self.step = settings.steps, 0
        self.generator = torch.Generator().manual_seed(seed)
        self.order = torch.empty(0, dtype=torch.long)
        self.losses: list[float] = []
        self.device = best()
        model.to(self.device).train()
        self.parallel = loop.parallel(model, ranks)
        self.optimiser = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)

    def finished(self) -> bool:
        return self.step >= self.steps

    def advance(self) -> None:
        if len(self.order) < min(self.settings.batch, len(self.x)):
            self.order = torch.cat([self.order, torch.randperm(len(self.x), generator=self.generator)])
        batch, self.order = self.order[: self.settings.batch], self.order[self.settings.batch :]
        self.optimiser.zero_grad(set_to_none=True)
        parts = loop.slices(batch.numpy(), 1, self.ranks)
        self.losses.append(loop.backward(self.parallel, self._loss, parts, self.ranks))
        self.optimiser.step()
        self.step += 1

    def note(self) -> str:
        return f"public loss {self.losses[-1]:.4f}"

    def _loss(self, rows: np.ndarray) -> torch.Tensor:
        x, y = (torch.from_numpy(values[rows]).to(self.device) for values in (self.x, self.y))
        return binary_cross_entropy_with_logits(self.parallel(x), y)

    # -- the state ----------------------------------------------------------------------------------------------

    def state(self) -> bytes:
        out = io.BytesIO()
        parts = {
            "digest": self.digest,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "generator": self.generator.get_state(),
            # A copy of what is left, not a view of everything.
            "order": self.order.clone(),
            "losses": torch.tensor(self.losses, dtype=torch.float64),
        }
        torch.save(parts, out)
        return out.getvalue()

    def restore(self, state: bytes) -> bool:
        parts = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
        if parts["digest"] != self.digest:
            return False
        self.model.load_state_dict(parts["model"])
        self.optimiser.load_state_dict(parts["optimiser"])
        self.generator.set_state(parts["generator"])
        self.order, self.losses = parts["order"], parts["losses"].tolist()
        self.step = len(self.losses)
        return True

    def _digest(self, seed: int) -> str:
        """Return a hash of what decides the result: settings, seed, data, start."""
        found = hashlib.sha256(f"{self.settings.model_dump_json()} {seed} {self.x.shape} {self.y.shape}".encode())
        for values in (self.x, self.y, *(value.detach().cpu().numpy() for value in self.model.state_dict().values())):
            found.update(np.ascontiguousarray(values).tobytes())
        return found.hexdigest()


def soft_targets(axes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the mixture's soft target ``sum_i lambda_i y_i``.

    Args:
        axes: 0/1 of shape (n, k).
        weights: lambda, shape (k,).

    Returns:
        float32 of shape (n, 1).
    """
    return (axes @ np.asarray(weights)).astype(np.float32)[:, None]
