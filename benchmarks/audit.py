"""How much 2,000 runs of a mixture learner in each of two worlds cost, against a loop over the learner.

    OMP_NUM_THREADS=1 python benchmarks/audit.py

* Two worlds: 4,000 runs of 100 steps (n = 8,970 records, k = 14 sources, full batch) on two threads, noise, canary and
  the comparison with the shipped learner included.
* The loop: 5 runs of the shipped learner, EXTRAPOLATED to 4,000.
* A whole audit: four worlds, the search for canaries, the controls and the statistics.

The ratio, of CPU seconds, is what to look at; seconds depend on the machine and on who else uses it.
"""

from __future__ import annotations

import time

import numpy as np

from dpmixmin.audit.canaries import Learner, max_clip
from dpmixmin.audit.mixture import audit_mixture
from dpmixmin.audit.trajectories import simulate
from dpmixmin.mixing.learners import learn
from dpmixmin.mixing.objective import SourceTable
from dpmixmin.privacy.mechanisms import GridGaussian
from dpmixmin.privacy.noise import NoiseSource

N, K, STEPS, RUNS, LOOPED, WORKERS = 8970, 14, 100, 2000, 5, 2


def timed(work) -> tuple[float, float]:
    """Return wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def main(rate: float) -> None:
    table = SourceTable.of_labels(np.random.default_rng(0).uniform(0.01, 1, (N, K)))
    spec = GridGaussian.for_target(epsilon=1.0, delta=1e-5, clip=8.0, steps=STEPS, sampling_rate=rate, nominal_units=N)
    mechanism = Learner("centred", spec, 1.0)
    canary = max_clip(mechanism, table)
    gradients, noise = mechanism.prepare(table), NoiseSource()

    def loop() -> None:
        for _ in range(LOOPED):
            learn("centred", table, spec, 1.0, noise)

    wall, cpu = timed(lambda: simulate(mechanism, gradients, [canary], RUNS, noise, workers=WORKERS))
    looped = timed(loop)[1] * 2 * RUNS / LOOPED
    print(f"q={rate:g}: two worlds of {RUNS} runs, {STEPS} steps, n={N}, k={K}: {wall:.1f} s ({cpu:.1f} s of CPU)")
    print(
        f"  a loop over the learner, extrapolated from {LOOPED} runs: {looped:.0f} s of CPU, ratio {looped / cpu:.0f}"
    )
    wall, cpu = timed(
        lambda: audit_mixture(table, spec, "centred", 1.0, runs=RUNS, seed=0, noise=noise, workers=WORKERS)
    )
    print(f"  a whole audit, four worlds and controls: {wall:.1f} s ({cpu:.1f} s of CPU)")


if __name__ == "__main__":
    main(1.0)
    main(0.1)
