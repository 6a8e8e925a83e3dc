"""The sum of all other units at many weights at once, in closed form: what makes thousands of runs cheap.

A unit with one row, whose gradient is along d and whose row has weight w, contributes
-C d/|d| / max(p . lambda C / (w |d|), 1): the 1 is the clipping. Responsibilities, which are not clipped, are linear
in the rows: lambda_i times the sum of p_i / (p . lambda / w). Both are two matrix products around an inverse. Units of
several rows need the norm of their mean; those of equally many rows are done together.

What contributes zero in ``mixing/objective.py`` contributes zero here. Contributions are not rounded to the grid:
``trajectories.py`` says why that is allowed, and compares with the shipped sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from dpmixmin.audit.canaries import Learner
from dpmixmin.mixing.objective import UnitGradients

_COLUMNS = 128
"""Runs whose sums are computed together."""

_PRODUCT = 2**18
"""Multiplications of one matrix product, at most: blocks stay in the cache, and OpenBLAS starts no threads of its own.

Its threads, beside ours, on a machine that others use too, cost up to 25 times the time."""

_TINY = 1e-100
"""Least p . lambda that is divided by, where a row's largest p is 1; its inverse is the cap of ``objective.py``."""


class Others:
    """The sum of the clipped vectors of D's units at many weights.

    Args:
        mechanism: what is audited.
        gradients: of D.
    """

    def __init__(self, mechanism: Learner, gradients: UnitGradients):
        self._mechanism, self._table = mechanism, gradients.table
        with np.errstate(all="ignore"):
            p, d = gradients.table.p.T, gradients.directions.T
            self._bad = ~np.isfinite(p).all(axis=1)
            if mechanism.spec.statistic == "responsibilities":
                self._bad |= (p < 0).any(axis=1)  # off the simplex
            # Vectors do not change when a row is multiplied by a constant.
            largest = np.abs(p).max(axis=1, keepdims=True)
            scale = np.where(self._bad[:, None] | (largest == 0), 1.0, largest)
            self._p = np.where(self._bad[:, None], 0.0, p / scale)
            self._d = np.where(self._bad[:, None], 0.0, d / scale)
        self._everyone: list[_Block] | None = None

    def __call__(self, weights: np.ndarray, batch: np.ndarray, secret: bytes | None, pool: Executor) -> np.ndarray:
        """Return the sums, float64 of shape (runs, k).

        Args:
            weights: shape (k, runs).
            batch: units that take part, boolean of shape (units,).
            secret: chooses their records, or None.
            pool: threads.
        """
        present = self._mechanism.subset(self._table, secret)
        if present is None and batch.all():
            if self._everyone is None:
                self._everyone = list(self._blocks(batch, None))
            blocks = self._everyone
        else:
            blocks = list(self._blocks(batch, present))

        def part(start: int) -> np.ndarray:
            at, total = np.ascontiguousarray(weights[:, start : start + _COLUMNS]), 0.0
            for block in blocks:
                total = total + block(at)
            if self._mechanism.spec.statistic == "responsibilities":
                total = total * at
            return np.broadcast_to(total, at.shape)

        return np.concatenate(list(pool.map(part, range(0, weights.shape[1], _COLUMNS))), axis=1).T

    def _blocks(self, batch: np.ndarray, present: np.ndarray | None) -> Iterator[_Block]:
        """Yield the sum's terms for one step."""
        table, spec = self._table, self._mechanism.spec
        rows, factor = table.select(present)
        rows = np.arange(len(table.owner))[rows]
        taking_part = batch.copy()
        taking_part[table.owner[rows[self._bad[rows]]]] = False
        responsible = spec.statistic == "responsibilities"
        weight = (table.share if responsible else table.rate)[rows] * factor
        kept = taking_part[table.owner[rows]] & (weight > 0)
        rows, weight = rows[kept], weight[kept, None]
        if responsible:
            yield from _one_row(self._p[rows] / weight, self._p[rows], _TINY)
            return
        owner = table.owner[rows]
        starts = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]]) if len(rows) else rows
        sizes = np.diff(np.r_[starts, len(rows)])
        single = starts[sizes == 1]
        p, d, w = self._p[rows[single]], self._d[rows[single]], weight[single]
        norm = np.linalg.norm(d, axis=1, keepdims=True)
        p, d, w, norm = (each[norm[:, 0] > 0] for each in (p, d, w, norm))
        yield from _one_row(p * (spec.clip / (w * norm)), d * (-spec.clip / norm), 1.0)
        for size in np.unique(sizes[sizes > 1]):
            index = starts[sizes == size][:, None] + np.arange(size)
            p, d = self._p[rows[index]], (-weight[index] * self._d[rows[index]]).transpose(0, 2, 1)
            at_once = max(1, _PRODUCT // (_COLUMNS * max(size, p.shape[2])))
            for start in range(0, len(p), at_once):
                yield _Several(p[start : start + at_once], d[start : start + at_once], spec.clip)


@dataclass(frozen=True)
class _OneRow:
    """Terms a / max(p . lambda, floor) of rows: p of shape (rows, k), a of shape (k, rows)."""

    p: np.ndarray
    a: np.ndarray
    floor: float

    def __call__(self, weights: np.ndarray) -> np.ndarray:
        inner = self.p @ weights
        np.maximum(inner, self.floor, out=inner)
        return self.a @ np.reciprocal(inner, out=inner)


def _rows_at_once(k: int) -> int:
    return max(1, _PRODUCT // (_COLUMNS * k))


def _one_row(p: np.ndarray, a: np.ndarray, floor: float) -> Iterator[_OneRow]:
    size = _rows_at_once(p.shape[1])
    for start in range(0, len(p), size):
        part = slice(start, start + size)
        yield _OneRow(np.ascontiguousarray(p[part]), np.ascontiguousarray(a[part].T), floor)


@dataclass(frozen=True)
class _Several:
    """Clipped sums of a / (p . lambda) over the rows of units: p of shape (units, m, k), a of shape (units, k, m)."""

    p: np.ndarray
    a: np.ndarray
    clip: float

    def __call__(self, weights: np.ndarray) -> np.ndarray:
        vectors, size = 0.0, _rows_at_once(self.p.shape[2])
        for start in range(0, self.p.shape[1], size):
            inner = self.p[:, start : start + size] @ weights
            np.maximum(inner, _TINY, out=inner)
            vectors = vectors + self.a[:, :, start : start + size] @ np.reciprocal(inner, out=inner)
        norms = np.sqrt(np.einsum("ukr,ukr->ur", vectors, vectors))
        return np.einsum("ukr,ur->kr", vectors, np.minimum(1.0, self.clip / np.maximum(norms, 1e-300)))


_Block = _OneRow | _Several
