"""Learners of mixture weights: private entropic descent, and the non-private optimum.

``algorithm1`` is the paper's Algorithm 1 (DP-MixMin paper, section 4.2) except that it divides by the PUBLIC expected
batch. ``centred`` removes each gradient's mean over sources before clipping, noises ALL k coordinates, and averages
the second half of the iterates (post-processing): the same mechanism at the same price, with less noise where it
matters.
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


def learn_private(
    gradients: UnitGradients, spec: GridGaussian, learning_rate: float, noise: NoiseSource, *, average: bool
) -> Learned:
    """Run T steps of noisy entropic descent.

    The released quantities are the T noisy sums; everything after them is post-processing.

    Args:
        gradients: the private table.
        spec: sampler, clip, divisor and noise.
        learning_rate: step size eta.
        noise: source of all private randomness.
        average: return the mean of the second half of the iterates instead of the last.
    """
    k = gradients.p.shape[1]
    log_weights = np.zeros(k)
    trajectory = [np.full(k, 1 / k)]
    for _ in range(spec.steps):
        batch = spec.sample(gradients.count, noise)
        vectors = gradients.clipped(trajectory[-1], spec.clip)[batch]
        gradient = spec.release_sum(vectors, noise) / spec.expected_batch
        log_weights = log_weights - learning_rate * gradient
        log_weights -= log_weights.max()
        trajectory.append(_softmax(log_weights))
    iterates = np.asarray(trajectory)
    final = iterates[1 + spec.steps // 2 :].mean(axis=0) if average and spec.steps > 1 else iterates[-1]
    return Learned(final / final.sum(), iterates)


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
