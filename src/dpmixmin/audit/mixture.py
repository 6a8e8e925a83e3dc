"""The audit of the mixture weights: a canary is told from its absence by what many runs release (DP-MixMin, A.8).

Two worlds, half of whose runs choose the attack (SELECT) and half of which count its errors (EVAL). Statistics:

* ``likelihood_ratio``: of all T noisy sums. By Neyman and Pearson nothing is stronger against a mechanism that is
  what it claims to be; the adversary of the proof sees that much.
* ``discriminant``: Fisher's linear discriminant on the logarithms of the released weights, fitted on SELECT.
* ``loss``: the canary's loss at the released weights. This one and the last see the weights only.

Each canary has a control, the same runs without noise: an attack that sees nothing there proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dpmixmin.audit.canaries import Canary, Learner, choose
from dpmixmin.audit.trajectories import WITHOUT, Runs, simulate
from dpmixmin.mixing.objective import SourceTable
from dpmixmin.privacy.mechanisms import GridGaussian
from dpmixmin.privacy.noise import NoiseSource

STATISTICS = ("likelihood_ratio", "discriminant", "loss")

Worlds = dict[str, tuple[np.ndarray, np.ndarray]]
"""Statistic to its scores in worlds ``without`` and ``with``."""


@dataclass(frozen=True)
class MixtureAudit:
    """Scores of every run.

    Attributes:
        runs: of each world.
        worlds: (canary, noise) to the scores of all runs, each float64 of shape (runs,).
    """

    runs: int
    worlds: dict[tuple[str, bool], Worlds]

    @property
    def canaries(self) -> tuple[str, ...]:
        """Names of the canaries."""
        return tuple(dict.fromkeys(canary for canary, _ in self.worlds))

    def select(self, canary: str, noise: bool) -> Worlds:
        """Return the scores that choose an attack, as ``attacks.choose`` takes them.

        Args:
            canary: its name.
            noise: False for the control.
        """
        return self._part(canary, noise, slice(0, self.runs // 2))

    def evaluate(self, canary: str, noise: bool) -> Worlds:
        """Return the scores that count, as ``attacks.count`` takes them; see :meth:`select`."""
        return self._part(canary, noise, slice(self.runs // 2, None))

    def _part(self, canary: str, noise: bool, part: slice) -> Worlds:
        found = self.worlds[canary, noise].items()
        return {statistic: (without[part], with_[part]) for statistic, (without, with_) in found}

    @property
    def scores(self) -> pa.Table:
        """All scores: canary, noise, world, half (select or eval), run, and one float64 column a statistic."""
        run = np.arange(self.runs)
        half = np.where(run < self.runs // 2, "select", "eval")
        parts = []
        for (canary, noise), found in self.worlds.items():
            for index, world in enumerate((WITHOUT, "with")):
                columns = {
                    "canary": np.full(self.runs, canary),
                    "noise": np.full(self.runs, noise),
                    "world": np.full(self.runs, world),
                    "half": half,
                    "run": run,
                }
                parts.append(pa.table(columns | {statistic: both[index] for statistic, both in found.items()}))
        return pa.concat_tables(parts)


def audit_mixture(
    table: SourceTable,
    spec: GridGaussian,
    learner: str,
    learning_rate: float,
    *,
    runs: int = 2000,
    seed: int,
    noise: NoiseSource,
    records_per_step: int | None = None,
    workers: int = 1,
) -> MixtureAudit:
    """Run a mixture learner many times with and without each canary, with and without noise.

    All worlds without a canary are one: its runs are shared by the canaries.

    Args:
        table: real units; two of them become canaries (``canaries.py``).
        spec: what the mechanism claims, and does.
        learner: centred, algorithm1 or responsibilities.
        learning_rate: see ``learn_private``.
        runs: of each world, at least 2.
        seed: public seed of the natural canary.
        noise: source of coins, secrets and noise.
        records_per_step: most records of a unit that enter a step, or None.
        workers: threads.

    Raises:
        TwinDiffers: the runs are not what the shipped learner does.
    """
    mechanism = Learner(learner, spec, learning_rate, records_per_step)
    dataset, canaries = choose(mechanism, table, seed, noise)
    others = mechanism.prepare(dataset)
    noisy = simulate(mechanism, others, canaries, runs, noise, workers=workers)
    # Without noise and coins all runs of a world are one.
    needed = 1 if spec.sampling_rate == 1 else runs
    control = simulate(mechanism, others, canaries, needed, noise, silent=True, workers=workers)
    worlds = {(canary.name, True): _scores(noisy, canary) for canary in canaries}
    for canary in canaries:
        found = _scores(control, canary)
        worlds[canary.name, False] = {
            name: tuple(np.resize(each, runs) for each in both) for name, both in found.items()
        }
    return MixtureAudit(runs, worlds)


def _scores(runs: Runs, canary: Canary) -> Worlds:
    """Return every statistic of one canary."""
    without, with_ = runs.weights[WITHOUT], runs.weights[canary.name]
    ratios = runs.ratios[canary.name, WITHOUT], runs.ratios[canary.name, canary.name]
    losses = canary.losses(without), canary.losses(with_)
    return dict(zip(STATISTICS, (ratios, _discriminant(without, with_), losses), strict=True))


def _discriminant(without: np.ndarray, with_: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores along Fisher's direction between two worlds' log-weights, fitted on their first halves."""
    logs = [np.log(np.maximum(weights, np.finfo(float).tiny)) for weights in (without, with_)]
    fitted = [values[: max(1, len(values) // 2)] for values in logs]
    centred = np.concatenate([values - values.mean(axis=0) for values in fitted])
    scatter = centred.T @ centred / len(centred)
    # The weights add up to 1, so the scatter is singular, and zero where nothing is random: a small ridge.
    ridge = 1e-6 * np.trace(scatter) / len(scatter) or 1.0
    direction = np.linalg.solve(
        scatter + ridge * np.eye(len(scatter)), fitted[1].mean(axis=0) - fitted[0].mean(axis=0)
    )
    return logs[0] @ direction, logs[1] @ direction
