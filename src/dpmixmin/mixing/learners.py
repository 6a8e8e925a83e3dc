"""Learners of mixture weights: private entropic descent, and the non-private optimum.

``algorithm1`` is the paper's Algorithm 1 (DP-MixMin paper, section 4.2) except that it divides by the PUBLIC expected
batch. ``centred`` removes each gradient's mean over sources before clipping, noises ALL k coordinates, and averages
the second half of the iterates (post-processing): the same mechanism at the same price, with less noise where it
matters. ``responsibilities`` is private expectation maximisation: the released sums have sensitivity 1 without any
clipping; ahead of the others at large epsilon, behind ``centred`` at small. On the sequence objective it weighs every
record alike, whatever its length.

With units of several records these are the paper's Algorithm 2: a step uses at most ``records_per_step`` (G_ULS) of a
unit's records, drawn anew (``privacy/subsample.py``), and clips the unit's mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpmixmin.mixing.objective import SourceTable, UnitGradients
from dpmixmin.privacy.mechanisms import GridGaussian
from dpmixmin.privacy.noise import NoiseSource
from dpmixmin.privacy.subsample import SECRET_BYTES


@dataclass(frozen=True)
class Learned:
    """The output of a learner.

    Attributes:
        weights: on the simplex, shape (k,).
        trajectory: the iterates, shape (T + 1, k), starting at uniform.
    """

    weights: np.ndarray
    trajectory: np.ndarray


def learn(
    learner: str,
    table: SourceTable,
    spec: GridGaussian,
    learning_rate: float,
    noise: NoiseSource,
    records_per_step: int | None = None,
) -> Learned:
    """Run a private learner by its name in the config.

    Args:
        learner: centred, algorithm1 or responsibilities.
        table: the private records.
        spec: see :func:`learn_private`.
        learning_rate: see :func:`learn_private`.
        noise: see :func:`learn_private`.
        records_per_step: see :func:`learn_private`.
    """
    gradients = UnitGradients.of(table, centred=learner == "centred")
    average = learner != "algorithm1"
    return learn_private(gradients, spec, learning_rate, noise, average=average, records_per_step=records_per_step)


def learn_private(
    gradients: UnitGradients,
    spec: GridGaussian,
    learning_rate: float,
    noise: NoiseSource,
    *,
    average: bool,
    records_per_step: int | None = None,
) -> Learned:
    """Run T private steps: entropic descent, or expectation maximisation where the spec releases responsibilities.

    The released quantities are the T noisy sums; everything after them is post-processing.

    Args:
        gradients: the private table.
        spec: sampler, clip, divisor and noise.
        learning_rate: step size eta of entropic descent, or the over-relaxation of expectation maximisation.
        noise: source of all private randomness.
        average: return the mean of the second half of the iterates instead of the last.
        records_per_step: at most this many of a unit's records enter a step (G_ULS); None: all. The table's records
            need names.
    """
    steps = {"gradients": _entropic_descent, "responsibilities": _expectation_maximisation}[spec.statistic]
    iterates = np.asarray(steps(gradients, spec, learning_rate, noise, records_per_step))
    final = iterates[1 + spec.steps // 2 :].mean(axis=0) if average and spec.steps > 1 else iterates[-1]
    return Learned(final / final.sum(), iterates)


def _entropic_descent(
    gradients: UnitGradients, spec: GridGaussian, learning_rate: float, noise: NoiseSource, limit: int | None
) -> list:
    """Return the iterates of noisy entropic descent."""
    k = gradients.table.k
    log_weights = np.zeros(k)
    trajectory = [np.full(k, 1 / k)]
    for _ in range(spec.steps):
        present = _subset(gradients.table, limit, noise)
        batch = spec.sample(gradients.count, noise)
        vectors = gradients.clipped(trajectory[-1], spec.clip, present)[batch]
        gradient = spec.release_sum(vectors, noise) / spec.expected_batch
        log_weights = log_weights - learning_rate * gradient
        log_weights -= log_weights.max()
        trajectory.append(_softmax(log_weights))
    return trajectory


def _expectation_maximisation(
    gradients: UnitGradients, spec: GridGaussian, relaxation: float, noise: NoiseSource, limit: int | None
) -> list:
    """Return the iterates of noisy, over-relaxed expectation maximisation."""
    k = gradients.table.k
    trajectory, total = [np.full(k, 1 / k)], 0.0
    for step in range(1, spec.steps + 1):
        present = _subset(gradients.table, limit, noise)
        batch = spec.sample(gradients.count, noise)
        vectors = gradients.responsibilities(trajectory[-1], present)[batch]
        mean = spec.release_sum(vectors, noise) / spec.expected_batch
        # The coordinates add up to (present units) / (nominal units) plus noise; their running mean corrects a
        # nominal number that is off, which the projection could not: it would move the fixed point.
        total += mean.sum()
        mean = mean / max(total / step, 0.1)
        trajectory.append(_to_simplex(trajectory[-1] + relaxation * (mean - trajectory[-1])))
    return trajectory


def _subset(table: SourceTable, limit: int | None, noise: NoiseSource) -> np.ndarray | None:
    """Draw the records of one step; the secret is drawn although no unit may be above the limit."""
    return None if limit is None else table.subset(noise.random_bytes(SECRET_BYTES), limit)


def _to_simplex(point: np.ndarray) -> np.ndarray:
    """Return the nearest point of the simplex that gives every source a hundredth of a percent.

    A source at exactly 0 would never come back: its responsibilities are 0 from then on.
    """
    floor = 1e-4
    k = len(point)
    shifted = np.sort(point - floor)[::-1]
    excess = (np.cumsum(shifted) - (1 - k * floor)) / np.arange(1, k + 1)
    threshold = excess[np.flatnonzero(shifted > excess)[-1]]
    return np.maximum(point - floor - threshold, 0.0) + floor


def learn_nonprivate(table: SourceTable, *, steps: int = 2000, tolerance: float = 1e-9) -> Learned:
    """Minimise the objective without privacy (MixMin), by expectation maximisation, which needs no step size.

    Each update multiplies lambda_i by the weighted mean over rows of p_i / (p . lambda): it never increases the loss
    and converges to the optimum of this convex problem. The rows' weights are those of ``objective.mean_loss``.
    """
    p, share = table.likelihood()
    weights = np.full(table.k, 1 / table.k)
    trajectory = [weights]
    for _ in range(steps if len(share) else 0):
        inner = np.maximum(weights @ p, np.finfo(float).tiny)
        updated = weights * (p @ (share / inner))
        updated /= updated.sum()
        change = np.abs(updated - weights).sum()
        weights = updated
        trajectory.append(weights)
        if change < tolerance:
            break
    return Learned(weights, np.asarray(trajectory))


def uniform(k: int) -> Learned:
    """Return equal weights."""
    return proportional(np.ones(k))


def proportional(sizes: np.ndarray) -> Learned:
    """Return weights in proportion to the sources' PUBLIC sizes, at least 0 and not all 0, shape (k,)."""
    weights = np.asarray(sizes, dtype=np.float64)
    weights = weights / weights.sum()
    return Learned(weights, weights[None])


def closeness(weights: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Return cosine similarity and L1 distance of two weight vectors."""
    cosine = weights @ reference / (np.linalg.norm(weights) * np.linalg.norm(reference))
    return {"cosine": float(cosine), "l1": float(np.abs(weights - reference).sum())}


def _softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()
