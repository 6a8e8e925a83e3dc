"""The units that an audit of the mixture adds to a dataset: two real ones and a made-up one.

* ``natural``: a real unit, drawn with the public seed.
* ``worst_natural``: the real unit with the largest clipped vectors along one ordinary run. For a full batch the sum of
  their squares is mu^2 up to a constant.
* ``max_clip``: a unit whose gradient is ten times the clipping norm at every step, along the most weighted sources.

A guarantee holds for every dataset and every unit, so an audit may choose both: very large units are cut to their
first records, and very large datasets to their first units, by public constants.

What a canary contributes to a step is computed by the shipped code alone: choice of records, gradient, clipping and
grid rounding see a table of as many copies of the canary as there are runs, each at its own run's weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dpmixmin.mixing.learners import learn, learn_nonprivate
from dpmixmin.mixing.objective import SourceTable, UnitGradients
from dpmixmin.privacy import subsample
from dpmixmin.privacy.mechanisms import GridGaussian
from dpmixmin.privacy.noise import NoiseSource

NATURAL, WORST, MAX_CLIP = "natural", "worst_natural", "max_clip"

STRENGTH = 10.0
"""Norm of the max_clip canary before clipping, in multiples of C: far enough above C to show a forgotten clip."""

ROWS = 2**14
"""Rows of the table that an audit runs on, at most."""

UNIT_ROWS = 2**9
"""Rows of a canary, at most, unless its first record alone has more."""

_COPIED_ROWS = 2**14
"""Rows of copies of a canary that are made at once: their temporaries stay in the cache's reach."""


@dataclass(frozen=True)
class Learner:
    """A mixture learner with its public parameters: what is audited.

    Attributes:
        learner: centred, algorithm1 or responsibilities.
        spec: sampler, clip, divisor and noise.
        learning_rate: see ``learn_private``.
        records_per_step: most records of a unit that enter a step, or None.
    """

    learner: str
    spec: GridGaussian
    learning_rate: float
    records_per_step: int | None = None

    def prepare(self, table: SourceTable) -> UnitGradients:
        """Return what the learner prepares of a table."""
        return UnitGradients.of(table, centred=self.learner == "centred")

    def subset(self, table: SourceTable, secret: bytes | None) -> np.ndarray | None:
        """Return which records enter a step with this secret, or None when all do."""
        return None if self.records_per_step is None else table.subset(secret, self.records_per_step)

    def vectors(self, gradients: UnitGradients, weights: np.ndarray, present: np.ndarray | None) -> np.ndarray:
        """Return what each unit contributes before rounding, by the shipped code: float64 of shape (units, k).

        Args:
            gradients: from :meth:`prepare`.
            weights: shape (k,) or (k, units).
            present: from :meth:`subset`.
        """
        if self.spec.statistic == "responsibilities":
            return gradients.responsibilities(weights, present)
        return gradients.clipped(weights, self.spec.clip, present)


@dataclass(frozen=True)
class Canary:
    """One unit that world ``with`` has and world ``without`` has not.

    Attributes:
        name: natural, worst_natural or max_clip.
        gradients: of a table with this unit alone.
        direction: of a made-up gradient: a unit vector of shape (k,); None where the table says it all.
    """

    name: str
    gradients: UnitGradients
    direction: np.ndarray | None = None
    _copies: dict[int, UnitGradients] = field(default_factory=dict, repr=False)

    @property
    def table(self) -> SourceTable:
        """The table of this one unit."""
        return self.gradients.table

    def vectors(self, mechanism: Learner, weights: np.ndarray, secret: bytes | None) -> np.ndarray:
        """Return what the canary contributes to one step of many runs, if it enters the step.

        Args:
            mechanism: what is audited.
            weights: of each run, shape (k, runs).
            secret: the step's secret, or None where all records enter.

        Returns:
            int64 of shape (runs, k), in grid units.
        """
        present, runs = mechanism.subset(self.table, secret), weights.shape[1]
        at_once = max(1, _COPIED_ROWS // max(1, len(self.table.owner)))
        found = []
        for start in range(0, runs, at_once):
            part = weights[:, start : start + at_once]
            copies = self._repeated(part.shape[1])
            mask = None if present is None else np.tile(present, part.shape[1])
            found.append(mechanism.spec.to_grid(mechanism.vectors(copies, part, mask)))
        return np.concatenate(found)

    def losses(self, weights: np.ndarray) -> np.ndarray:
        """Return the canary's loss at released weights, shape (runs, k), up to a constant; high where it was absent.

        A made-up gradient has no loss; what stands for it is how far log-weights lie along it: entropic descent went
        the other way.
        """
        weights = np.maximum(weights, np.finfo(float).tiny)
        if self.direction is not None:
            return np.log(weights) @ self.direction
        p, share = self.table.likelihood()
        return -np.log(np.maximum(weights @ p, np.finfo(float).tiny)) @ share

    def _repeated(self, count: int) -> UnitGradients:
        """Return the canary as so many units; kept, because every step asks for the same numbers of them."""
        if count not in self._copies:
            one, copy = self.table, np.arange(count)
            table = SourceTable(
                np.tile(one.p, count),
                np.tile(one.offset, count),
                np.tile(one.share, count),
                np.tile(one.rate, count),
                (one.record + len(one.unit) * copy[:, None]).ravel(),
                np.repeat(copy, len(one.owner)),
                np.repeat(copy, len(one.unit)),
                count,
                None if one.names is None else np.tile(one.names, count),
            )
            self._copies[count] = UnitGradients(table, np.tile(self.gradients.directions, count))
        return self._copies[count]


def joined(first: UnitGradients, last: UnitGradients) -> UnitGradients:
    """Return the units of both, those of ``last`` behind the others."""
    one, two = first.table, last.table
    table = SourceTable(
        np.concatenate([one.p, two.p], axis=1),
        np.concatenate([one.offset, two.offset]),
        np.concatenate([one.share, two.share]),
        np.concatenate([one.rate, two.rate]),
        np.concatenate([one.record, two.record + len(one.unit)]),
        np.concatenate([one.owner, two.owner + one.count]),
        np.concatenate([one.unit, two.unit + one.count]),
        one.count + two.count,
        None if one.names is None else np.concatenate([one.names, two.names]),
    )
    return UnitGradients(table, np.concatenate([first.directions, last.directions], axis=1))


def choose(mechanism: Learner, table: SourceTable, seed: int, noise: NoiseSource) -> tuple[SourceTable, list[Canary]]:
    """Return the dataset D of an audit, which no canary is in, and the canaries.

    A table of fewer than two units gives no real canary.

    Args:
        mechanism: what is audited.
        table: real units.
        seed: public seed of the natural canary.
        noise: of the ordinary run that finds the worst unit.
    """
    kept, canaries = np.ones(table.count, dtype=bool), []
    if table.count > 1:
        worst = _worst(mechanism, table, noise)
        natural = int(np.random.default_rng(seed).choice(np.delete(np.arange(table.count), worst)))
        kept[[natural, worst]] = False
        canaries = [
            Canary(name, mechanism.prepare(_unit(table, index)))
            for name, index in ((NATURAL, natural), (WORST, worst))
        ]
    sizes = np.bincount(table.owner, minlength=table.count)
    kept[kept] = fitting_rows(sizes[kept], ROWS)
    others = table.keep(kept)
    return others, [*canaries, max_clip(mechanism, others)]


def fitting_rows(sizes: np.ndarray, limit: int) -> np.ndarray:
    """Say which units are taken, one after another, while their rows fit; one that does not is passed over.

    Args:
        sizes: rows of each unit, shape (units,).
        limit: rows of all that are taken.

    Returns:
        Boolean of shape (units,).
    """
    taken = np.zeros(len(sizes), dtype=bool)
    for index in np.flatnonzero(sizes <= limit):
        if sizes[index] <= limit:
            taken[index] = True
            limit -= sizes[index]
    return taken


def max_clip(mechanism: Learner, others: SourceTable) -> Canary:
    """Return the unit that moves every step as far as one unit can, along the sources that weigh most without noise.

    Gradients: a row that every source predicts equally well, whose direction is replaced. Responsibilities: a row
    that only the most weighted source predicts, which is at a corner of the simplex whatever the weights.
    Where records are not what is protected the unit has two records, so that records counted as units show.

    Args:
        mechanism: what is audited.
        others: D.
    """
    optimum, spec = learn_nonprivate(others).weights, mechanism.spec
    records = 1 if spec.unit == "record" else 2
    p, direction = np.ones((records, others.k)), None
    if spec.statistic == "responsibilities":
        p[:] = np.arange(others.k) == optimum.argmax()
    names = None if others.names is None else subsample.names(f"canary {number}" for number in range(records))
    gradients = mechanism.prepare(SourceTable.of_labels(p, (1, np.zeros(records, dtype=np.int64)), names))
    if spec.statistic == "gradients":
        direction = _direction(optimum, centred=mechanism.learner == "centred")
        # A row of ones has the gradient -directions at any weights.
        raw = np.repeat(-STRENGTH * spec.clip * direction[:, None], records, axis=1)
        gradients = UnitGradients(gradients.table, raw)
    return Canary(MAX_CLIP, gradients, direction)


def _direction(optimum: np.ndarray, *, centred: bool) -> np.ndarray:
    """Return the gradient's unit vector that raises the weights of the optimum's sources."""
    weighted = optimum - optimum.mean() if centred else optimum
    if np.linalg.norm(weighted) < 1e-6:  # equal weights have no direction among centred vectors
        weighted = np.eye(len(optimum))[0] - 1 / len(optimum)
    return -weighted / np.linalg.norm(weighted)


def _worst(mechanism: Learner, table: SourceTable, noise: NoiseSource) -> int:
    """Return the unit with the largest sum of squared vectors along one run of the shipped learner."""
    spec = mechanism.spec
    learned = learn(mechanism.learner, table, spec, mechanism.learning_rate, noise, mechanism.records_per_step)
    gradients, total = mechanism.prepare(table), np.zeros(table.count)
    for weights in learned.trajectory[:-1]:
        # Units that are not finite contribute zero.
        total += np.nan_to_num(np.square(mechanism.vectors(gradients, weights, None)).sum(axis=1))
    return int(total.argmax())


def _unit(table: SourceTable, index: int) -> SourceTable:
    """Return the table of one unit, cut to the first records that fit."""
    own = np.flatnonzero(table.unit == index)
    rows = np.bincount(table.record, minlength=len(table.unit))[own]
    fitting = int((np.cumsum(rows) <= UNIT_ROWS).sum())
    kept = np.zeros(len(table.unit), dtype=bool)
    kept[own[: max(1, fitting)]] = True
    return table.keep(np.arange(table.count) == index, kept)
