"""The MixMin objective for binary tasks and its gradient in closed form.

With source probabilities p_i(x, y) = f_i(x) if y = 1 else 1 - f_i(x), the loss of weights lambda is
``-ln(p . lambda)`` and the gradient of one record is ``-p / (p . lambda)``. Nothing is materialised by autograd.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def source_probabilities(predictions: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the probability each source's proxy gives to the true label.

    Args:
        predictions: f_i(x) in [0, 1], shape (n, k).
        labels: 1 or 0, shape (n,); NaN where a record has no label.

    Returns:
        float64 of shape (n, k); a row with any NaN or infinity is all NaN (it will contribute zero).
    """
    f = predictions.astype(np.float64)
    y = labels.astype(np.float64)[:, None]
    p = np.where(y == 1, f, 1 - f)
    bad = ~np.isfinite(f).all(axis=1) | ~np.isfinite(labels) | (p < 0).any(axis=1)
    p[bad] = np.nan
    return p


def mean_loss(p: np.ndarray, weights: np.ndarray) -> float:
    """Return the mean of ``-ln(p . lambda)`` over rows that have a value (non-private)."""
    values = p @ weights
    return float(-np.log(np.clip(values[np.isfinite(values)], 1e-300, None)).mean())


_LARGEST_INVERSE = 1e100
"""Cap of 1 / (p . lambda): above every gradient that matters, small enough that norms stay finite."""


@dataclass(frozen=True)
class UnitGradients:
    """Clipped gradients of the objective, one vector per unit.

    Args (constructor):
        p: source probabilities, shape (n, k), from :func:`source_probabilities`.
        centred: subtract each row's mean over sources. Entropic descent does not see that direction, and without it
            the norm of most records falls by an order of magnitude, so the same clip needs less noise.
        units: number of units and each row's unit index, or None when every row is its own unit.
    """

    p: np.ndarray
    directions: np.ndarray
    units: tuple[int, np.ndarray] | None

    @classmethod
    def of(cls, p: np.ndarray, *, centred: bool, units: tuple[int, np.ndarray] | None = None) -> UnitGradients:
        """Prepare a table once; each step is then two passes over it."""
        with np.errstate(all="ignore"):  # a numpy warning would tell that a record has a wild value
            directions = p - p.mean(axis=1, keepdims=True) if centred else p
        return cls(p, directions, units)

    @property
    def count(self) -> int:
        """Number of units (private)."""
        return len(self.p) if self.units is None else self.units[0]

    def clipped(self, weights: np.ndarray, clip: float) -> np.ndarray:
        """Return each unit's gradient at ``weights``, clipped to ``clip``: float64 of shape (units, k).

        The mean of a unit's record gradients is clipped (the paper's G_ULS, Algorithm 2); most units have one record.
        A record's gradient is capped far above any clip, so it is finite at p . lambda = 0; a record that is not
        finite makes its unit contribute zero. Every operation on a unit depends on that unit alone, to the last bit:
        row-wise sums and no matrix product, whose rounding could change with the number of rows.
        """
        with np.errstate(all="ignore"):
            inner = (self.p * weights).sum(axis=1)
            inverse = np.where(inner > 0, 1 / inner, np.inf)
            gradients = self._unit_means(-self.directions * np.minimum(inverse, _LARGEST_INVERSE)[:, None])
            norms = np.linalg.norm(gradients, axis=1, keepdims=True)
            return gradients * np.minimum(1.0, clip / np.maximum(norms, 1e-300))

    def responsibilities(self, weights: np.ndarray) -> np.ndarray:
        """Return each unit's mean responsibilities lambda_i p_i / (p . lambda): float64 of shape (units, k).

        A row lies on the simplex, so it needs no clipping. A record that no weighted source explains contributes
        zero, one that is not finite makes its unit contribute zero.
        """
        with np.errstate(all="ignore"):
            joint = self.p * weights
            inner = joint.sum(axis=1, keepdims=True)
            return self._unit_means(np.where(inner == 0, 0.0, joint / inner))

    def _unit_means(self, rows: np.ndarray) -> np.ndarray:
        """Return the mean over each unit's records."""
        if self.units is None:
            return rows
        count, index = self.units
        total = np.zeros((count, rows.shape[1]))
        np.add.at(total, index, rows)
        return total / np.bincount(index, minlength=count)[:, None]
