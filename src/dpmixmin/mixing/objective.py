"""The MixMin objective, and its gradient in closed form; nothing is materialised by autograd.

Every loss here is a weighted sum of ``-ln(p . lambda)`` over a record's ROWS, where p_i is the probability that source
i's proxy gives to what was observed. The gradient of one row is ``-p / (p . lambda)``.

| table | rows of a record | loss of a record x |
|---|---|---|
| of_labels | 1 | -ln sum_i lambda_i p_i(x, y) |
| of_sequences | 1 | -(1/T) ln sum_i lambda_i p_i(x), with T tokens |
| of_tokens | T | -(1/T) sum_t ln sum_i lambda_i p_i(x_t given x_<t) |

The token objective is a convex surrogate: the mixture it describes chooses a source for each token, not for each
document as pretraining does. The sequence objective is the one of the MixMin reduction.

A row's gradient does not change when p is multiplied by a constant. So language tables keep p / max_i p, computed
from log-probabilities, and a sequence of any length neither underflows nor overflows.

The vector of a unit is the mean over its records (DP-MixMin paper, Algorithm 2). It depends on that unit alone, to
the last bit: arrays have the sources along the FIRST axis, sums over sources are written out, sums over a unit's rows
are segment sums, and there is no matrix product, whose rounding could change with the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpmixmin.privacy.subsample import chosen

Units = tuple[int, np.ndarray]
"""Number of units, and the unit of each record."""

_LARGEST_INVERSE = 1e100
"""Cap of 1 / (p . lambda): above every gradient that matters, small enough that norms stay finite."""


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


@dataclass(frozen=True)
class SourceTable:
    """What the sources' proxies say of private records: rows, of records, of units. Raw private data (rule 19).

    A row that is not finite makes its unit contribute zero (rule 6). A record of length 0 counts among its unit's
    records, with loss 0. Build with one of the three constructors.

    Attributes:
        p: probabilities, up to a factor of each row, float64 of shape (k, rows); a unit's rows are adjacent.
        offset: logarithm of that factor, shape (rows,).
        share: weights of the rows within their record, shape (rows,); they sum to 1 (or a record has no tokens).
        rate: weight of each row in its record's loss, shape (rows,).
        record: record of each row, shape (rows,).
        owner: unit of each row, shape (rows,).
        unit: unit of each record, shape (records,).
        count: number of units.
        names: names of the records, uint64 of shape (records,), or None: then no subset can be drawn.
    """

    p: np.ndarray
    offset: np.ndarray
    share: np.ndarray
    rate: np.ndarray
    record: np.ndarray
    owner: np.ndarray
    unit: np.ndarray
    count: int
    names: np.ndarray | None

    @classmethod
    def of_labels(cls, p: np.ndarray, units: Units | None = None, names: np.ndarray | None = None) -> SourceTable:
        """Make the table of a classification task.

        Args:
            p: from :func:`source_probabilities`, shape (n, k).
            units: number of units and each record's unit, or None when every record is its own.
            names: from ``subsample.names``.
        """
        n = len(p)
        return cls._of(p, np.zeros(n), np.arange(n), np.ones(n), np.ones(n), units, names)

    @classmethod
    def of_sequences(
        cls, logp: np.ndarray, length: np.ndarray, units: Units | None = None, names: np.ndarray | None = None
    ) -> SourceTable:
        """Make the table of a language task on the sequence objective.

        Args:
            logp: total log-probability of each record under each source's proxy, shape (n, k).
            length: number of tokens T of each record, shape (n,); 0 for a record with nothing to predict.
            units: number of units and each record's unit, or None when every record is its own.
            names: from ``subsample.names``.
        """
        length = np.asarray(length, dtype=np.float64)
        scale = np.divide(1.0, length, out=np.zeros(len(length)), where=length > 0)
        p, offset = _scaled(logp)
        # Without a token a record has nothing to say: its equal probabilities would repeat the weights as they are.
        return cls._of(p, offset, np.arange(len(p)), (length > 0).astype(float), scale, units, names)

    @classmethod
    def of_tokens(
        cls,
        logp: np.ndarray,
        record: np.ndarray,
        length: np.ndarray,
        units: Units | None = None,
        names: np.ndarray | None = None,
    ) -> SourceTable:
        """Make the table of a language task on the token objective.

        Args:
            logp: log-probability of each predicted token under each source's proxy, shape (tokens, k).
            record: record of each token, integers from 0 in non-decreasing order, shape (tokens,).
            length: number of tokens T of each record, shape (records,); 0 for a record with nothing to predict.
            units: number of units and each RECORD's unit, or None when every record is its own.
            names: of the records, from ``subsample.names``.
        """
        if (np.diff(record) < 0).any() or not np.array_equal(np.bincount(record, minlength=len(length)), length):
            raise ValueError("tokens must be in the order of their records, as many as the records' lengths say")
        p, offset = _scaled(logp)
        return cls._of(p, offset, np.asarray(record), 1 / length[record], np.ones(len(length)), units, names)

    @classmethod
    def _of(cls, p, offset, record, share, scale, units, names) -> SourceTable:
        """Put a unit's rows side by side; their order within the unit stays."""
        count, unit = (len(scale), np.arange(len(scale))) if units is None else (units[0], np.asarray(units[1]))
        if len(unit) != len(scale) or (names is not None and len(names) != len(scale)):
            raise ValueError("units and names must have one entry per record")
        owner = unit[record]
        if (np.diff(owner) < 0).any():
            order = np.argsort(owner, kind="stable")
            p, offset, record, share, owner = p[order], offset[order], record[order], share[order], owner[order]
        columns = np.ascontiguousarray(np.asarray(p, dtype=np.float64).T)
        return cls(columns, offset, share, share * scale[record], record, owner, unit, count, names)

    @property
    def k(self) -> int:
        """Number of sources."""
        return len(self.p)

    def subset(self, secret: bytes, records_per_step: int) -> np.ndarray | None:
        """Return the mask of the records that enter a step, or None when all do (see ``privacy/subsample.py``)."""
        if self.names is None:
            raise ValueError("a table without record names cannot be subsampled")
        mask = chosen(secret, self.names, self.unit, records_per_step)
        return None if mask.all() else mask

    def select(self, present: np.ndarray | None = None) -> tuple[slice | np.ndarray, np.ndarray]:
        """Return the rows of the present records, and each such row's factor 1 / (its unit's present records).

        Args:
            present: mask of shape (records,), or None for all.
        """
        rows = slice(None) if present is None else np.flatnonzero(present[self.record])
        counts = np.bincount(self.unit if present is None else self.unit[present], minlength=self.count)
        return rows, 1 / counts[self.owner[rows]]

    def weights_of(self, weights: np.ndarray, rows: slice | np.ndarray) -> np.ndarray:
        """Return each row's weights, shape (k, 1) or (k, rows), from one vector for all units or from one a unit.

        Args:
            weights: shape (k,), or (k, units).
            rows: from :meth:`select`.
        """
        return weights[:, None] if weights.ndim == 1 else weights[:, self.owner[rows]]

    def unit_sums(self, values: np.ndarray, rows: slice | np.ndarray) -> np.ndarray:
        """Return the sum over each unit's rows, shape (columns, units), of values of shape (columns, rows)."""
        owner = self.owner[rows]
        total = np.zeros((len(values), self.count))
        if len(owner):
            starts = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])
            total[:, owner[starts]] = values if len(starts) == len(owner) else np.add.reduceat(values, starts, axis=1)
        return total

    def keep(self, units: np.ndarray, records: np.ndarray | None = None) -> SourceTable:
        """Return the table of some of the units, in their order.

        Args:
            units: mask of shape (count,).
            records: mask of those units' records that stay, shape (records,), or None for all.
        """
        records = units[self.unit] if records is None else units[self.unit] & records
        rows = records[self.record]
        new_unit, new_record = np.cumsum(units) - 1, np.cumsum(records) - 1
        return SourceTable(
            np.ascontiguousarray(self.p[:, rows]),
            self.offset[rows],
            self.share[rows],
            self.rate[rows],
            new_record[self.record[rows]],
            new_unit[self.owner[rows]],
            new_unit[self.unit[records]],
            int(units.sum()),
            None if self.names is None else self.names[records],
        )

    def likelihood(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the objective as a weighted log-likelihood: rows, shape (k, m), and their weights, shape (m,).

        Left out are units that contribute zero, and rows that every source finds impossible: nothing can be learned
        from them.
        """
        _, factor = self.select()
        bad = np.zeros(self.count, dtype=bool)
        bad[self.owner[~np.isfinite(self.p).all(axis=0)]] = True
        weight = self.rate * factor
        keep = ~bad[self.owner] & (self.p > 0).any(axis=0) & (weight > 0)
        return self.p[:, keep], weight[keep]


def mean_loss(table: SourceTable, weights: np.ndarray) -> float:
    """Return the mean over units of the mean over their records of the loss (non-private); bad units are left out."""
    with np.errstate(all="ignore"):
        rows, factor = table.select()
        inner = np.clip(_over_sources(table.p * weights[:, None]), 1e-300, None)
        values = table.unit_sums((-(np.log(inner) + table.offset) * table.rate * factor)[None], rows)[0]
    return float(values[np.isfinite(values)].mean())


@dataclass(frozen=True)
class UnitGradients:
    """Clipped gradients of the objective, one vector per unit.

    Attributes:
        table: the private table.
        directions: p, or p minus its mean over sources, shape (k, rows).
    """

    table: SourceTable
    directions: np.ndarray

    @classmethod
    def of(cls, table: SourceTable, *, centred: bool) -> UnitGradients:
        """Prepare a table once; each step is then two passes over it.

        Args:
            table: the private table.
            centred: subtract each row's mean over sources. Entropic descent does not see that direction, and without
                it the norm of most records falls by an order of magnitude, so the same clip needs less noise.
        """
        with np.errstate(all="ignore"):  # a numpy warning would tell that a record has a wild value
            directions = table.p - _over_sources(table.p) / table.k if centred else table.p
        return cls(table, directions)

    @property
    def count(self) -> int:
        """Number of units (private)."""
        return self.table.count

    def clipped(self, weights: np.ndarray, clip: float, present: np.ndarray | None = None) -> np.ndarray:
        """Return each unit's gradient at ``weights``, clipped to ``clip``: float64 of shape (units, k).

        The mean of the gradients of a unit's present records is clipped (the paper's G_ULS, Algorithm 2). A row's
        gradient is capped far above any clip, so it is finite at p . lambda = 0; a present record that is not finite
        makes its unit contribute zero.

        Args:
            weights: on the simplex, shape (k,); or one such vector a unit, shape (k, units).
            clip: clipping norm C.
            present: mask of the records that take part, or None for all.
        """
        rows, factor = self.table.select(present)
        weights = self.table.weights_of(weights, rows)
        with np.errstate(all="ignore"):
            inner = _over_sources(self.table.p[:, rows] * weights)
            inverse = np.minimum(np.where(inner > 0, 1 / inner, np.inf), _LARGEST_INVERSE)
            coefficients = -inverse * self.table.rate[rows] * factor
            gradients = self.table.unit_sums(self.directions[:, rows] * coefficients, rows)
            norms = np.sqrt(_over_sources(gradients * gradients))
            return np.ascontiguousarray((gradients * np.minimum(1.0, clip / np.maximum(norms, 1e-300))).T)

    def responsibilities(self, weights: np.ndarray, present: np.ndarray | None = None) -> np.ndarray:
        """Return each unit's mean responsibilities lambda_i p_i / (p . lambda): float64 of shape (units, k).

        A record's vector, the mean over its rows, lies on the simplex, so it needs no clipping; the 1/T of the
        sequence objective is no part of it. A row that no weighted source explains contributes zero, a record that is
        not finite makes its unit contribute zero.

        Args:
            weights: on the simplex, shape (k,); or one such vector a unit, shape (k, units).
            present: mask of the records that take part, or None for all.
        """
        rows, factor = self.table.select(present)
        weights = self.table.weights_of(weights, rows)
        with np.errstate(all="ignore"):
            joint = self.table.p[:, rows] * weights
            inner = _over_sources(joint)
            shares = np.where(inner == 0, 0.0, joint / inner) * (self.table.share[rows] * factor)
            return np.ascontiguousarray(self.table.unit_sums(shares, rows).T)


def _scaled(logp: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return p / max_i p from log-probabilities of shape (n, k), and ln max_i p; a row with NaN or infinity is NaN."""
    logp = np.asarray(logp, dtype=np.float64)
    with np.errstate(all="ignore"):
        offset = logp.max(axis=1)
        p = np.exp(logp - offset[:, None])
    bad = ~np.isfinite(logp).all(axis=1)
    p[bad], offset[bad] = np.nan, np.nan
    return p, offset


def _over_sources(columns: np.ndarray) -> np.ndarray:
    """Return the sum over the first axis, one source after the other: the same bits for any number of columns."""
    total = columns[0].copy()
    for column in columns[1:]:
        total += column
    return total
