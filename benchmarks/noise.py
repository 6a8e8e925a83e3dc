"""How much model-sized noise costs, as ratios against its peers in the same run.

    python benchmarks/noise.py

* ``NoiseSource.gaussian`` against one draw per coordinate of torch's seeded generator (float32, what Opacus adds, and
  float64), and against the plain way to the same law: bytes from the operating system through the inverse CDF.
* Its share of a DP-SGD step of the demo's network.

Prints medians over repetitions on one thread; the ratios are what to look at, the milliseconds depend on the machine.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings

import numpy as np
import torch
from scipy.special import ndtri

from dpmixmin.config import Inputs, Network
from dpmixmin.finetune.dp_sgd import ClippedSum, fine_tune
from dpmixmin.models.networks import build
from dpmixmin.privacy.mechanisms import ModelGaussian
from dpmixmin.privacy.noise import NoiseSource

warnings.simplefilter("ignore")
torch.set_num_threads(1)


def median_ms(draw, repetitions: int) -> float:
    draw()
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        draw()
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def by_inverse_cdf(size: int) -> np.ndarray:
    """Four draws a coordinate, halved, all of them from the operating system and scipy's inverse CDF."""
    raw = np.frombuffer(os.urandom(32 * size), dtype="<u8")
    uniforms = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return ndtri(uniforms).reshape(4, size).sum(axis=0) / 2


def draws(size: int, repetitions: int) -> None:
    source = NoiseSource()
    ours = median_ms(lambda: source.gaussian(1.0, size), repetitions)
    peers = {
        "torch.randn float32": lambda: torch.randn(size),
        "torch.randn float64": lambda: torch.randn(size, dtype=torch.float64),
        "operating system + inverse CDF": lambda: by_inverse_cdf(size),
    }
    print(f"{size:,} Gaussians: ours {ours:.2f} ms")
    for name, peer in peers.items():
        theirs = median_ms(peer, repetitions)
        print(f"  {name}: {theirs:.2f} ms, ratio {ours / theirs:.2f}")


def share_of_a_step(batch: int) -> None:
    generator, n = np.random.default_rng(0), 8 * batch
    x = generator.normal(size=(n, 196)).astype(np.float32)
    y = (generator.uniform(size=n) < 0.5).astype(np.float32)
    sums = ClippedSum(build(Inputs(shape=(1, 14, 14)), 196, Network(), 1, 0), x, y, np.arange(n), n)
    spec = ModelGaussian(1.0, 3.9, 1, 1 / 8, n, 1.0, 1e-5)
    step = median_ms(lambda: fine_tune(sums, spec, 0.1, NoiseSource()), 40)
    noise = median_ms(lambda: NoiseSource().gaussian(1.0, sums.size), 100)
    share = f"{step:.1f} ms, its noise {noise:.2f} ms ({noise / step:.1%})"
    print(f"DP-SGD step, batch {batch}, {sums.size:,} parameters: {share}")


if __name__ == "__main__":
    draws(1_000, 500)
    draws(100_000, 100)
    draws(2_000_000, 5)
    share_of_a_step(250)
