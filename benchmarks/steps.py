"""How much the two mechanisms cost, as ratios against the peer in the same run.

    python benchmarks/steps.py

* Mixture: one private step in closed form (two passes over the n-by-k table, grid rounding and noise included) against
  per-example gradients by ``torch.func.vmap``, clipped and summed, without any noise.
* DP-SGD: one step of ours (sampling, per-example gradients, clipping, noise from the operating system) against a plain
  SGD step on the same model and batch size, and against Opacus' own optimizer with its noise.

Prints medians over repetitions; the ratios are what to look at, the milliseconds depend on the machine.
"""

from __future__ import annotations

import statistics
import time
import warnings

import numpy as np
import torch

from dpmixmin.finetune.dp_sgd import ClippedSum, fine_tune
from dpmixmin.mixing.learners import learn_private
from dpmixmin.mixing.objective import SourceTable, UnitGradients
from dpmixmin.models.networks import build
from dpmixmin.privacy.mechanisms import GridGaussian, ModelGaussian
from dpmixmin.privacy.noise import NoiseSource
from dpmixmin.sections import Inputs, Network

warnings.simplefilter("ignore")
torch.set_num_threads(1)
GENERATOR = np.random.default_rng(0)


def median_ms(step, repetitions: int) -> float:
    step()
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def mixture(n: int, k: int) -> None:
    p = GENERATOR.uniform(0.01, 1, (n, k))
    gradients = UnitGradients.of(SourceTable.of_labels(p), centred=True)
    spec = GridGaussian(8.0, 26.4, 1, 1.0, n, 1.0, 1e-5)
    ours = median_ms(lambda: learn_private(gradients, spec, 1.0, NoiseSource(), average=True), 200)
    table, weights = torch.from_numpy(p), torch.full((k,), 1 / k, dtype=torch.float64)
    per_record = torch.func.vmap(torch.func.grad(lambda lam, row: -torch.log(row @ lam)), in_dims=(None, 0))

    def peer() -> None:
        g = per_record(weights, table)
        g = g - g.mean(dim=1, keepdim=True)
        (g * torch.clamp(8.0 / g.norm(dim=1, keepdim=True), max=1.0)).sum(dim=0)

    theirs = median_ms(peer, 200)
    print(
        f"mixture step, n={n}, k={k}: ours {ours:.2f} ms, vmap without noise {theirs:.2f} ms, "
        f"ratio {ours / theirs:.2f}"
    )


def dp_sgd(batch: int) -> None:
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    inputs, network, n = Inputs(shape=(1, 14, 14)), Network(), 8 * batch
    x = GENERATOR.normal(size=(n, 196)).astype(np.float32)
    y = (GENERATOR.uniform(size=n) < 0.5).astype(np.float32)
    tx, ty = torch.from_numpy(x), torch.from_numpy(y)
    loss = torch.nn.functional.binary_cross_entropy_with_logits

    model = build(inputs, 196, network, 1, 0)
    sums = ClippedSum(model, x, y, np.arange(n), n)
    spec = ModelGaussian(1.0, 3.9, 1, 1 / 8, n, 1.0, 1e-5)
    ours = median_ms(lambda: fine_tune(sums, spec, 0.1, NoiseSource()), 40)

    plain = build(inputs, 196, network, 1, 0)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)

    def plain_step() -> None:
        sgd.zero_grad()
        loss(plain(tx[:batch])[:, 0], ty[:batch]).backward()
        sgd.step()

    base = median_ms(plain_step, 40)
    other = build(inputs, 196, network, 1, 0)
    private, optimizer, _ = PrivacyEngine().make_private(
        module=other,
        optimizer=torch.optim.SGD(other.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(tx, ty), batch_size=batch),
        noise_multiplier=3.9,
        max_grad_norm=1.0,
    )

    def opacus_step() -> None:
        optimizer.zero_grad()
        loss(private(tx[:batch])[:, 0], ty[:batch]).backward()
        optimizer.step()

    peer = median_ms(opacus_step, 40)
    print(
        f"DP-SGD step, batch {batch}: ours {ours:.1f} ms, plain SGD {base:.1f} ms (ratio {ours / base:.2f}), "
        f"Opacus with fixed batch and torch noise {peer:.1f} ms (ratio {ours / peer:.2f})"
    )


if __name__ == "__main__":
    mixture(800, 14)
    mixture(8970, 14)
    dp_sgd(250)
