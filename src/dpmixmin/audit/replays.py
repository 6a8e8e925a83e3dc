"""The replay audit: every mechanism on D and on neighbours of D, its randomness frozen (rules 3, 5, 6, 13, 27).

``replay.py`` says what a replay is, and what it does not show: the law of the noise. Here are the mechanisms as they
run: shipped learner, shipped DP-SGD, the vectors of the charged evaluation, with the specs of the run. A neighbour is
D and one constructed unit (NaN, nothing that any source predicts, a thousand records, ...), D without one of its own
units, and where the adjacency is replace-one also D with one constructed unit in another's place.

What is measured is exact, not statistical: a ratio above 1 refutes the claimed sensitivity, so there is no false alarm
and no power to state. A guarantee holds for every D, so a few units and a few steps are enough.

Of the noise a replay shows one thing: over nobody, every release is noise alone. It must be there, and no step may
repeat another's (rules 5 and 14). Its law is a matter for the statistical audits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dpmixmin import evaluation
from dpmixmin.audit.canaries import fitting_rows
from dpmixmin.audit.replay import (
    Diverged,
    OftenPresent,
    Replay,
    Run,
    record,
    replay,
    worst_logits,
    worst_probabilities,
    worst_records,
    worst_texts,
    worst_token_scores,
)
from dpmixmin.mixing.learners import learn
from dpmixmin.mixing.objective import SourceTable
from dpmixmin.privacy import subsample
from dpmixmin.privacy.events import ADD_REMOVE, REPLACE_ONE
from dpmixmin.privacy.mechanisms import GridGaussian, MechanismSpec, ModelGaussian

if TYPE_CHECKING:
    from dpmixmin.finetune.dp_sgd import ClippedSum

MIXTURE_STEPS, TRAINING_STEPS = 10, 3
"""Steps that are replayed at most; each step of a model's training is kept, as long as the model."""

MIXTURE_ROWS, LABEL_ROWS, TEXT_ROWS = 4000, 128, 16
"""Rows of D; units are left out from there on."""


@dataclass(frozen=True)
class ReplayResult:
    """One mechanism on one pair of neighbours.

    Attributes:
        mechanism: mixture, dp_sgd or evaluation.
        neighbour: what the two differ in.
        ratios: distance over declared sensitivity of each release, shape (releases,); infinity where a step has no
            noise of its own; one infinity where private data got out beside the releases.
    """

    mechanism: str
    neighbour: str
    ratios: np.ndarray

    @property
    def ratio(self) -> float:
        """The largest ratio; infinity where a release is not finite."""
        return float(np.where(np.isfinite(self.ratios), self.ratios, np.inf).max(initial=0.0))

    @property
    def holds(self) -> bool:
        """Whether one unit moved no release by more than the declared sensitivity."""
        return Replay(self.ratios).holds


def worst(results: list[ReplayResult]) -> ReplayResult:
    """Return the result of the largest ratio."""
    return max(results, key=lambda result: result.ratio)


def scores(results: list[ReplayResult]) -> pa.Table:
    """Return all ratios: mechanism, neighbour, release (from 0), ratio."""
    rows = [(each.mechanism, each.neighbour, i, ratio) for each in results for i, ratio in enumerate(each.ratios)]
    schema = {"mechanism": pa.string(), "neighbour": pa.string(), "release": pa.int64(), "ratio": pa.float64()}
    columns = zip(*rows, strict=True) if rows else [[]] * len(schema)
    return pa.table(list(map(list, columns)), schema=pa.schema(schema))


def _results(
    mechanism: str, run: Run, spec: MechanismSpec, nobody: Any, pairs: Iterator[tuple[str, str, Any, Any]]
) -> list[ReplayResult]:
    """Replay pairs of an adjacency, D and D'; each pair is measured by the sensitivity of its own adjacency."""
    found, known, recording = [_noise_alone(mechanism, run, spec, nobody)], None, None
    for adjacency, neighbour, data, other in pairs:
        if data is not known:
            known, recording = data, record(run, spec, data, OftenPresent)
        try:
            ratios = replay(run, replace(spec, adjacency=adjacency), recording, other, OftenPresent).ratios
        except Diverged:
            ratios = np.asarray([np.inf])
        found.append(ReplayResult(mechanism, neighbour, ratios))
    return found


def _noise_alone(mechanism: str, run: Run, spec: MechanismSpec, nobody: Any) -> ReplayResult:
    """Run over nobody, and mark releases that are zero or repeat an earlier one; all, where a coordinate stays zero.

    Two Gaussians of grid scale coincide in one coordinate with probability below 1e-6 for a noise multiplier of 0.3.
    """
    releases = record(run, spec, nobody, OftenPresent).releases
    earlier, still = [np.zeros_like(releases[0])], np.ones(np.shape(releases[0]), dtype=bool)
    ratios = []
    for release in releases:
        ratios.append(np.inf if any(np.array_equal(release, each) for each in earlier) else 0.0)
        still &= release == 0
        earlier.append(release)
    if still.any():
        ratios = [np.inf] * len(ratios)
    return ReplayResult(mechanism, "nobody: each step has its noise", np.asarray(ratios))


def _pairs(
    spec: MechanismSpec, data: Any, constructed: dict[str, Any], removed: dict[str, tuple[Any, Any]]
) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield adjacency, name, D, D'.

    Args:
        spec: add/remove pairs are for every spec, replace-one pairs for one that claims that adjacency.
        data: D.
        constructed: name to D and one unit more.
        removed: name to D, the unit last, and D without it.
    """
    for name, larger in constructed.items():
        yield ADD_REMOVE, f"with: {name}", data, larger
    for name, (whole, smaller) in removed.items():
        yield ADD_REMOVE, f"without: {name}", whole, smaller
    if spec.adjacency == REPLACE_ONE:
        for (one, first), (other, second) in pairwise(constructed.items()):
            yield REPLACE_ONE, f"{one} -> {other}", first, second


def _names(count: int) -> np.ndarray:
    """Return the names of a constructed unit's records."""
    return subsample.names(f"replay {number}" for number in range(count))


def _chosen(rows: np.ndarray, limit: int) -> tuple[np.ndarray, dict[str, int]]:
    """Choose the units of D, and among them those that are removed in turn.

    Args:
        rows: of each unit, shape (units,).
        limit: rows of D, except that the named units are always there.

    Returns:
        Units in their order, and name to unit.
    """
    if not len(rows):
        return np.zeros(0, dtype=int), {}
    # Two names of one unit: the first stays.
    named = {int(rows.argmax()): "largest unit", len(rows) - 1: "last unit", 0: "first unit"}
    rest = np.setdiff1d(np.arange(len(rows)), list(named))
    fitting = rest[fitting_rows(rows[rest], limit - rows[list(named)].sum())]
    return np.sort(np.r_[list(named), fitting]), {name: unit for unit, name in named.items()}


# -- mechanism 1: the mixture weights -------------------------------------------------------------------------


def replay_mixture(
    table: SourceTable, spec: GridGaussian, learner: str, learning_rate: float, records_per_step: int | None = None
) -> list[ReplayResult]:
    """Replay the shipped learner.

    Args:
        table: private records, or public ones; may be empty.
        spec: of the run.
        learner: see :func:`~dpmixmin.mixing.learners.learn`, as for what follows.
        learning_rate: step size.
        records_per_step: most records of a unit in a step; the table's records need names then.
    """
    units, removed = _chosen(np.bincount(table.owner, minlength=table.count), MIXTURE_ROWS)
    data = table.keep(np.isin(np.arange(table.count), units))
    constructed = {name: _joined(data, one) for name, one in _units_of_probabilities(table.k)}
    without = {}
    for name, unit in removed.items():
        gone = units == unit
        others = data.keep(~gone)
        without[name] = _joined(others, data.keep(gone)), others

    def run(some, taped, noise):
        learned = learn(learner, some, taped, learning_rate, noise, records_per_step)
        return [learned.trajectory, learned.weights]

    spec = replace(spec, steps=min(spec.steps, MIXTURE_STEPS))
    nobody = table.keep(np.zeros(table.count, dtype=bool))
    return _results("mixture", run, spec, nobody, _pairs(spec, data, constructed, without))


def _units_of_probabilities(k: int) -> Iterator[tuple[str, SourceTable]]:
    """Yield the constructed units: their rows as labelled records, as texts, as the tokens of one text."""
    for name, p in worst_probabilities(k):
        count = len(p)
        unit = (1, np.zeros(count, dtype=int))
        names = _names(count)
        with np.errstate(all="ignore"):
            # A text's tokens are never impossible for a source, only very unlikely.
            logp = np.log(np.where(p == 0, 1e-300, p))
        yield name, SourceTable.of_labels(p, unit, names)
        yield f"{name} (texts)", SourceTable.of_sequences(logp, np.arange(count) % 3, unit, names)
        one = (1, np.zeros(1, dtype=int))
        tokens = SourceTable.of_tokens(logp, np.zeros(count, dtype=int), np.asarray([count]), one, names[:1])
        yield f"{name} (tokens)", tokens


def _joined(table: SourceTable, other: SourceTable) -> SourceTable:
    """Return a table with the units of another after its own."""
    return SourceTable(
        np.concatenate([table.p, other.p], axis=1),
        np.r_[table.offset, other.offset],
        np.r_[table.share, other.share],
        np.r_[table.rate, other.rate],
        np.r_[table.record, other.record + len(table.unit)],
        np.r_[table.owner, other.owner + table.count],
        np.r_[table.unit, other.unit + table.count],
        table.count + other.count,
        None if table.names is None else np.r_[table.names, other.names],
    )


# -- mechanism 2: DP-SGD --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Unit:
    """A constructed unit of a model: its rows, and each row's record, 0 .. records - 1."""

    features: np.ndarray
    labels: np.ndarray
    record: np.ndarray


def replay_training(
    build: Callable[[Callable[..., ClippedSum]], ClippedSum], spec: ModelGaussian, learning_rate: float
) -> list[ReplayResult]:
    """Replay the shipped DP-SGD: at most :data:`TRAINING_STEPS` steps on few units.

    Memory: twice the steps times the model's trainable parameters, float64.

    Args:
        build: ``build(make)`` calls ``make`` with the arguments of the shipped ``ClippedSum`` and returns what it
            returns; always with the same first weights, in a model of its own.
        spec: of the run.
        learning_rate: step size of SGD.
    """
    from dpmixmin.finetune.dp_sgd import fine_tune

    def run(part: _Part, taped, noise):
        sums = build(part)
        fine_tune(sums, taped, learning_rate, noise)
        return [parameter.detach().cpu().numpy() for parameter in sums.parameters]

    seen: dict[str, Any] = {}
    build(partial(_look, seen))
    texts = np.issubdtype(seen["features"].dtype, np.integer)
    rows = np.bincount(seen["unit"], minlength=seen["units"])
    units, removed = _chosen(rows, TEXT_ROWS if texts else LABEL_ROWS)
    made = _users_of_texts if texts else _units_of_records
    constructed = {name: _Part(units, unit) for name, unit in made(seen["features"], seen["labels"])}
    without = {}
    for name, unit in removed.items():
        others = units[units != unit]
        without[name] = _Part(np.r_[others, unit]), _Part(others)
    spec = replace(spec, steps=min(spec.steps, TRAINING_STEPS))
    pairs = _pairs(spec, _Part(units), constructed, without)
    return _results("dp_sgd", run, spec, _Part(np.zeros(0, dtype=int)), pairs)


def _units_of_records(features: np.ndarray, labels: np.ndarray) -> Iterator[tuple[str, _Unit]]:
    """Yield the constructed units of a label model."""
    for name, x, y in worst_records(features.shape[1]):
        yield name, _Unit(x.astype(features.dtype), y.astype(labels.dtype), np.arange(len(x)))


def _users_of_texts(tokens: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[str, _Unit]]:
    """Yield the constructed users of a language model."""
    for name, rows, length, records in worst_texts(tokens.shape[1]):
        yield name, _Unit(rows.astype(tokens.dtype), length.astype(lengths.dtype), records)


def _look(seen: dict[str, Any], model, features, labels, unit_index, units, *_, **options) -> ClippedSum:
    """Note the arguments, for what is constructed; the sums are over nobody."""
    seen |= {"features": features, "labels": labels, "unit": np.asarray(unit_index), "units": units}
    return _Part(np.zeros(0, dtype=int))(model, features, labels, unit_index, units, **options)


@dataclass(frozen=True)
class _Part:
    """Makes the shipped sums over some of the units, and a constructed one.

    Attributes:
        units: which, in the order that they shall have.
        extra: the last unit, or None.
    """

    units: np.ndarray
    extra: _Unit | None = None

    def __call__(
        self,
        model,
        features: np.ndarray,
        labels: np.ndarray,
        unit_index: np.ndarray,
        units: int,
        physical_batch: int = 512,
        *,
        names: np.ndarray | None = None,
        row_record: np.ndarray | None = None,
        row_weight: np.ndarray | None = None,
        **options,
    ) -> ClippedSum:
        """Stand for the class: the same arguments, the same result."""
        from dpmixmin.finetune.dp_sgd import ClippedSum

        place = np.full(units, -1)
        place[self.units] = np.arange(len(self.units))
        unit = np.asarray(unit_index)
        rows = np.flatnonzero(place[unit] >= 0)
        rows = rows[np.argsort(place[unit[rows]], kind="stable")]
        record = np.arange(len(features)) if row_record is None else row_record
        known = len(names) if names is not None else int(record.max(initial=-1)) + 1
        extra = _Unit(features[:0], labels[:0], record[:0]) if self.extra is None else self.extra
        records = int(extra.record.max(initial=-1)) + 1
        if names is not None:
            names = np.r_[names, _names(records)]
        if row_weight is not None:
            row_weight = np.r_[row_weight[rows], 1 / np.bincount(extra.record)[extra.record]]
        return ClippedSum(
            model,
            np.concatenate([features[rows], extra.features]),
            np.concatenate([labels[rows], extra.labels]),
            np.r_[place[unit[rows]], np.full(len(extra.record), len(self.units))].astype(int),
            len(self.units) + (self.extra is not None),
            physical_batch,
            names=names,
            row_record=np.r_[record[rows], known + extra.record].astype(int),
            row_weight=row_weight,
            **options,
        )


# -- the charged evaluation -----------------------------------------------------------------------------------


def replay_evaluation(spec: GridGaussian, bound: float, bins: int | None) -> list[ReplayResult]:
    """Replay the noisy sum that a deployment's model is measured by, on made-up scores: it depends on nothing else.

    Args:
        spec: of the run.
        bound: a loss is clipped to this.
        bins: of the histogram of a label model's predictions; None: the model is one of texts.
    """
    rng = np.random.default_rng(0)
    if bins is None:
        made = [(list(-rng.exponential(bound, size=(2, 7))), None) for _ in range(20)]
        constructed = {name: (values, None) for name, values in worst_token_scores()}
    else:
        made = [(rng.normal(0, 3, size=2), rng.integers(0, 2, size=2).astype(float)) for _ in range(20)]
        constructed = {name: (logits, labels) for name, logits, labels in worst_logits()}

    def run(some: _Scored, taped, noise):
        taped.release_sum(some.vectors(bound, bins), noise)

    data, larger = _Scored(made), {name: _Scored([*made, unit]) for name, unit in constructed.items()}
    removed = {"last unit": (data, _Scored(made[:-1]))}
    return _results("evaluation", run, spec, _Scored([]), _pairs(spec, data, larger, removed))


@dataclass(frozen=True)
class _Scored:
    """Units as (one score per record, labels): logits and labels, or the tokens' log-probabilities and nothing."""

    units: list[tuple[Any, np.ndarray | None]]

    def vectors(self, bound: float, bins: int | None) -> np.ndarray:
        """Return what the units contribute, by the shipped code."""
        index = np.repeat(np.arange(len(self.units)), np.asarray([len(values) for values, _ in self.units], dtype=int))
        owners = len(self.units), index
        if bins is None:
            return evaluation.text_vectors([each for values, _ in self.units for each in values], owners, bound)
        logits = np.concatenate([np.zeros(0), *(values for values, _ in self.units)])
        labels = np.concatenate([np.zeros(0), *(y for _, y in self.units)])
        return evaluation.unit_vectors(logits, labels, owners, bound, bins)
