"""Training on PUBLIC data with binary cross-entropy on (soft) targets.

The label axes are the sources and they share their inputs, so drawing source i with probability lambda_i and then its
label is the same as the soft target ``sum_i lambda_i y_i``, with less variance. The proxy is
the same training with all axes as outputs: ``f_i`` is its i-th output (DP-MixMin paper, section 4.2).
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dpmixmin.sections import Network


def train_public(model: nn.Module, features: np.ndarray, targets: np.ndarray, settings: Network, seed: int) -> list:
    """Train in place with Adam; reproducible from the public seed.

    Args:
        model: gives logits.
        features: float32 of shape (n, d).
        targets: in [0, 1], float32 of shape (n, outputs).
        settings: steps, batch and learning rate.
        seed: public seed of the order of records.

    Returns:
        The loss at every step (public).
    """
    x = torch.from_numpy(np.ascontiguousarray(features))
    y = torch.from_numpy(np.ascontiguousarray(targets, dtype=np.float32))
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    losses, order, started = [], torch.empty(0, dtype=torch.long), time.monotonic()
    model.train()
    for step in range(settings.steps):
        if len(order) < min(settings.batch, len(x)):
            order = torch.cat([order, torch.randperm(len(x), generator=generator)])
        batch, order = order[: settings.batch], order[settings.batch :]
        optimiser.zero_grad(set_to_none=True)
        loss = binary_cross_entropy_with_logits(model(x[batch]), y[batch])
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
        if time.monotonic() - started > 10:
            started = time.monotonic()
            print(f"  step {step + 1}/{settings.steps}, public loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
    return losses


def soft_targets(axes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the mixture's soft target ``sum_i lambda_i y_i``.

    Args:
        axes: 0/1 of shape (n, k).
        weights: lambda, shape (k,).

    Returns:
        float32 of shape (n, 1).
    """
    return (axes @ np.asarray(weights)).astype(np.float32)[:, None]
