"""Learners of mixture weights: private entropic descent, and the non-private optimum.

``algorithm1`` is the paper's Algorithm 1 (DP-MixMin paper, section 4.2) except that it divides by the PUBLIC expected
batch. ``centred`` removes each gradient's mean over sources before clipping, noises ALL k coordinates, and averages
the second half of the iterates (post-processing): the same mechanism at the same price, with less noise where it
matters. ``responsibilities`` is private expectation maximisation: the released sums have sensitivity 1 without any
clipping; ahead of the others at large epsilon, behind ``centred`` at small.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpmixmin.mixing.objective import UnitGradients
from dpmixmin.privacy.mechanisms import GridGaussian
from dpmixmin.privacy.noise import NoiseSource


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
    p: np.ndarray,
    spec: GridGaussian,
    learning_rate: float,
    noise: NoiseSource,
    units: tuple[int, np.ndarray] | None = None,
) -> Learned:
    """Run a private learner by its name in the config.

    Args:
        learner: centred, algorithm1 or responsibilities.
        p: source probabilities of the private records, shape (n, k).
        spec: see :func:`learn_private`.
        learning_rate: see :func:`learn_private`.
        noise: see :func:`learn_private`.
        units: number of units and each row's unit index, or None when every row is its own unit.
    """
    gradients = UnitGradients.of(p, centred=learner == "centred", units=units)
    return learn_private(gradients, spec, learning_rate, noise, average=learner != "algorithm1")


def learn_private(
    gradients: UnitGradients, spec: GridGaussian, learning_rate: float, noise: NoiseSource, *, average: bool
) -> Learned:
    """Run T private steps: entropic descent, or expectation maximisation where the spec releases responsibilities.

    The released quantities are the T noisy sums; everything after them is post-processing.

    Args:
        gradients: the private table.
        spec: sampler, clip, divisor and noise.
        learning_rate: step size eta of entropic descent, or the over-relaxation of expectation maximisation.
        noise: source of all private randomness.
        average: return the mean of the second half of the iterates instead of the last.
    """
    steps = {"gradients": _entropic_descent, "responsibilities": _expectation_maximisation}[spec.statistic]
    iterates = np.asarray(steps(gradients, spec, learning_rate, noise))
    final = iterates[1 + spec.steps // 2 :].mean(axis=0) if average and spec.steps > 1 else iterates[-1]
    return Learned(final / final.sum(), iterates)


def _entropic_descent(gradients: UnitGradients, spec: GridGaussian, learning_rate: float, noise: NoiseSource) -> list:
    """Return the iterates of noisy entropic descent."""
    k = gradients.p.shape[1]
    log_weights = np.zeros(k)
    trajectory = [np.full(k, 1 / k)]
    for _ in range(spec.steps):
        batch = spec.sample(gradients.count, noise)
        gradient = spec.release_sum(gradients.clipped(trajectory[-1], spec.clip)[batch], noise) / spec.expected_batch
        log_weights = log_weights - learning_rate * gradient
        log_weights -= log_weights.max()
        trajectory.append(_softmax(log_weights))
    return trajectory


def _expectation_maximisation(
    gradients: UnitGradients, spec: GridGaussian, relaxation: float, noise: NoiseSource
) -> list:
    """Return the iterates of noisy, over-relaxed expectation maximisation."""
    k = gradients.p.shape[1]
    trajectory, total = [np.full(k, 1 / k)], 0.0
    for step in range(1, spec.steps + 1):
        batch = spec.sample(gradients.count, noise)
        mean = spec.release_sum(gradients.responsibilities(trajectory[-1])[batch], noise) / spec.expected_batch
        # The coordinates add up to (present units) / (nominal units) plus noise; their running mean corrects a
        # nominal number that is off, which the projection could not: it would move the fixed point.
        total += mean.sum()
        mean = mean / max(total / step, 0.1)
        trajectory.append(_to_simplex(trajectory[-1] + relaxation * (mean - trajectory[-1])))
    return trajectory


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


def learn_nonprivate(p: np.ndarray, *, steps: int = 2000, tolerance: float = 1e-9) -> Learned:
    """Minimise the objective without privacy (MixMin), by expectation maximisation, which needs no step size.

    Each update multiplies lambda_i by the mean over records of p_i / (p . lambda): it never increases the loss and
    converges to the optimum of this convex problem.
    """
    # A record that every source finds impossible has no optimum to offer.
    p = p[np.isfinite(p).all(axis=1) & (p > 0).any(axis=1)]
    k = p.shape[1]
    weights = np.full(k, 1 / k)
    trajectory = [weights]
    for _ in range(steps if len(p) else 0):
        inner = np.maximum(p @ weights, np.finfo(float).tiny)
        updated = weights * (p / inner[:, None]).mean(axis=0)
        updated /= updated.sum()
        change = np.abs(updated - weights).sum()
        weights = updated
        trajectory.append(weights)
        if change < tolerance:
            break
    return Learned(weights, np.asarray(trajectory))


def uniform(k: int) -> Learned:
    """Return equal weights."""
    weights = np.full(k, 1 / k)
    return Learned(weights, weights[None])


def closeness(weights: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Return cosine similarity and L1 distance of two weight vectors."""
    cosine = weights @ reference / (np.linalg.norm(weights) * np.linalg.norm(reference))
    return {"cosine": float(cosine), "l1": float(np.abs(weights - reference).sum())}


def _softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()
