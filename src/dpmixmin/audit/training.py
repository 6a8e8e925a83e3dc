"""The audit of fine-tuning: one run of the shipped DP-SGD with many canaries in it (Steinke et al. 2305.08846).

Every canary is a unit that is in the data with probability 1/2, by a public coin of its own; an absent one is not
there at all. From what the run released, each gets a score, high where it looks included; how well scores and coins
agree bounds epsilon (``one_run.py``). A guarantee holds for every dataset, so also for one with canaries in it.

* A ``gradient`` canary is a unit whose rows' gradients are ``STRENGTH * C`` at ONE coordinate, its own. Its score is
  a ``likelihood_ratio``: the adversary sees every step's release, and knows all other units with their coins.
* A ``record`` canary is a real unit, as it is or altered (a flipped label). Its score is ``loss_drop``: its loss under
  the first model minus that under the last, which is all that the adversary sees.

Nothing of the mechanism is written anew: :class:`CanarySum` is a :class:`~dpmixmin.finetune.dp_sgd.ClippedSum` with
other rows, built from the arguments of the shipped one, and ``fine_tune`` trains it. Only the gradients of a canary's
rows are put in by hand; coins, choice of records, means over a unit, clipping, summing and noise are the shipped code.

Why a gradient canary's score is allowed: other gradient canaries contribute nothing at its coordinate, and what the
real units contribute there depends on them, their coins and earlier releases. So the score is a function of the
releases, for every fixed choice of the other units and their coins; the guarantee holds for every such choice. The
score is the strongest there is against a mechanism that is exactly what it claims: the log-likelihood ratio of all
steps' releases with the canary and without it. The two kinds share a run: each is valid alone, two tests together
need Bonferroni.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from dpmixmin.audit.silent import Silent
from dpmixmin.finetune.dp_sgd import ClippedSum, fine_tune
from dpmixmin.privacy import subsample
from dpmixmin.privacy.mechanisms import ModelGaussian
from dpmixmin.privacy.noise import NoiseSource

STRENGTH = 10.0
"""Norm of a gradient canary before clipping, in multiples of C: far enough above C to show a forgotten clip."""

GRADIENT, RECORD = "gradient", "record"
STATISTICS = {GRADIENT: "likelihood_ratio", RECORD: "loss_drop"}

Build = Callable[[Callable[..., ClippedSum]], ClippedSum]
"""``build(make)`` calls ``make`` with the arguments of the shipped :class:`ClippedSum`, for a model of its own."""


@dataclass(frozen=True)
class Plan:
    """Which canaries a run has; public.

    Attributes:
        gradients: gradient canaries wanted; there are at most as many as trainable parameters.
        records: record canaries wanted; there are at most a quarter of the units.
        per_canary: records of a gradient canary, at least 1.
        seed: public seed of all draws.
        altered: changes the labels (second argument of the loss) of the record canaries, ``altered(labels)`` of the
            same shape; None: they stay as they are.
    """

    gradients: int
    records: int
    per_canary: int
    seed: int
    altered: Callable[[np.ndarray], np.ndarray] | None = None

    def draw(self, available: int, wanted: int, purpose: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw canaries and their coins.

        Args:
            available: what there is to draw from.
            wanted: at most ``available``.
            purpose: separates draws of one seed.

        Returns:
            ``wanted`` distinct integers below ``available``, ascending, and whether each is included (boolean).
        """
        rng = np.random.default_rng([self.seed, purpose])
        drawn = np.sort(rng.choice(available, wanted, replace=False)) if wanted else np.zeros(0, dtype=np.int64)
        return drawn, rng.random(wanted) < 0.5


def flipped(labels: np.ndarray) -> np.ndarray:
    """Return the other label of 0 and 1; NaN stays: ``altered`` for label models."""
    return 1 - labels


class CanarySum(ClippedSum):
    """A :class:`ClippedSum` over real units and canaries; a record canary that is not included is left out.

    Args:
        model: as in :class:`ClippedSum`, like all that is not named here.
        features: of the real rows, as are ``labels``, ``unit_index``, ``names``, ``row_record`` and ``row_weight``.
        labels: see there.
        unit_index: see there.
        units: number of real units, record canaries included.
        physical_batch: see there.
        plan: the canaries.
        names: see there.
        row_record: see there.
        row_weight: see there.
        options: see there.

    Attributes:
        coordinates: of the gradient canaries, shape (m,), ascending.
        gradient_included: boolean of shape (m,).
        record_included: boolean of shape (r,).
        without: what all others contributed at ``coordinates``, one float64 array of shape (m,) a step.
        updates: of the parameters at ``coordinates``, the same.
    """

    def __init__(
        self,
        model: nn.Module,
        features: np.ndarray,
        labels: np.ndarray,
        unit_index: np.ndarray,
        units: int,
        physical_batch: int = 512,
        *,
        plan: Plan,
        names: np.ndarray | None = None,
        row_record: np.ndarray | None = None,
        row_weight: np.ndarray | None = None,
        **options,
    ):
        size = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self.coordinates, self.gradient_included = plan.draw(size, min(plan.gradients, size), 0)
        drawn, self.record_included = plan.draw(units, min(plan.records, units // 4), 1)
        self.without: list[np.ndarray] = []
        self.updates: list[np.ndarray] = []

        unit = np.asarray(unit_index)
        record = np.arange(len(features)) if row_record is None else row_record
        watched = np.isin(unit, drawn)
        if plan.altered is not None:
            labels = labels.copy()
            labels[watched] = plan.altered(labels[watched])
        self._probe = torch.from_numpy(features[watched]), torch.from_numpy(labels[watched])
        self._probe_unit = np.searchsorted(drawn, unit[watched])
        self._probe_weight = np.ones(watched.sum()) if row_weight is None else row_weight[watched]

        present = np.ones(units, dtype=bool)
        present[drawn[~self.record_included]] = False
        real = present[unit]
        self._real_rows, self._real_units = int(real.sum()), int(present.sum())
        inserted = np.flatnonzero(self.gradient_included)
        rows = len(inserted) * plan.per_canary
        self._row_coordinate = np.repeat(self.coordinates[inserted], plan.per_canary)
        # Canaries come last, and their rows never reach the model: what is in them does not matter.
        known = len(names) if names is not None else int(record.max(initial=-1)) + 1
        if names is not None:
            own = [f"canary {one} {number}" for one in inserted for number in range(plan.per_canary)]
            names = np.concatenate([names, subsample.names(own)])
        if row_weight is not None:
            row_weight = np.concatenate([row_weight[real], np.ones(rows)])
        super().__init__(
            model,
            _extended(features[real], rows),
            _extended(labels[real], rows),
            np.concatenate(
                [
                    (np.cumsum(present) - 1)[unit[real]],
                    self._real_units + np.repeat(np.arange(len(inserted)), plan.per_canary),
                ]
            ),
            self._real_units + len(inserted),
            physical_batch,
            names=names,
            row_record=np.concatenate([record[real], known + np.arange(rows)]),
            row_weight=row_weight,
            **options,
        )

    def __call__(self, batch: np.ndarray, clip: float, secret: bytes | None = None) -> torch.Tensor:
        """See the base class; also remembers what a canary's coordinate would have got without it."""
        self._clip = clip
        total = super().__call__(batch, clip, secret)
        # The canaries' part is computed by the shipped code too, so that a wrong clip is not taken for granted.
        canaries = super().__call__(batch & (np.arange(self.units) >= self._real_units), clip, secret)
        self.without.append((total - canaries)[self.coordinates].numpy())
        return total

    def add(self, update: torch.Tensor) -> None:
        """See the base class; also remembers the update at the canaries' coordinates."""
        self.updates.append(update[self.coordinates].numpy())
        super().add(update)

    def _per_record(self, rows: np.ndarray) -> torch.Tensor:
        """See the base class; a canary's rows have the gradients that are put in by hand."""
        real = int(np.searchsorted(rows, self._real_rows))
        if real == len(rows):
            return super()._per_record(rows)
        gradients = self.parameters[0].new_zeros(len(rows), self.size)
        if real:
            gradients[:real] = super()._per_record(rows[:real])
        columns = self._row_coordinate[rows[real:] - self._real_rows]
        gradients[np.arange(real, len(rows)), columns] = STRENGTH * self._clip
        return gradients

    def released(self, spec: ModelGaussian, learning_rate: float) -> np.ndarray:
        """Return what the canaries' coordinates got beyond all others, shape (steps, m): the noise, and the canary.

        It is read off the updates and not off the spec, so a training loop that does not release what the spec
        releases is seen for what it is.
        """
        sums = np.asarray(self.updates) * (spec.expected_batch / -learning_rate)
        return sums - np.asarray(self.without)

    @torch.no_grad()
    def losses(self) -> np.ndarray:
        """Return each record canary's mean loss over its rows now, included or not: float64 of shape (r,)."""
        self.model.eval()
        total, rows = np.zeros(len(self.record_included)), len(self._probe_unit)
        for start in range(0, rows, self._physical):
            part = slice(start, start + self._physical)
            batch = self._probe[0][part], self._probe[1][part]
            if self._trim is not None:
                batch = self._trim(*batch)
            found = self._gradients.loss(self.model, *(each.to(self._device) for each in batch))
            np.add.at(total, self._probe_unit[part], found.double().cpu().numpy() * self._probe_weight[part])
        weights = np.bincount(self._probe_unit, self._probe_weight, minlength=len(total))
        return total / np.where(weights > 0, weights, 1)


def _extended(values: np.ndarray, rows: int) -> np.ndarray:
    """Return an array with so many rows of zeros more."""
    return np.concatenate([values, np.zeros((rows, *values.shape[1:]), dtype=values.dtype)])


@dataclass(frozen=True)
class TrainingAudit:
    """Scores and coins of one run's canaries.

    Attributes:
        canaries: kind to (scores, included): float64 and boolean, both of shape (canaries of the kind,).
        noise: False in the control.
        control: the same run without noise; None in the control itself.
    """

    canaries: dict[str, tuple[np.ndarray, np.ndarray]]
    noise: bool = True
    control: TrainingAudit | None = None

    @property
    def kinds(self) -> list[str]:
        """The kinds of which there are at least two canaries, as a test of them needs."""
        return [kind for kind, (scores, _) in self.canaries.items() if len(scores) > 1]

    def arrays(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Return scores and coins of a kind, as ``one_run.evaluate`` takes them."""
        return self.canaries[kind]

    def statistic(self, kind: str) -> str:
        """Return the name of a kind's score."""
        return STATISTICS[kind]

    def select(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return every other gradient canary as runs of two worlds: statistic to (without, with), for ``attacks.py``.

        With :meth:`evaluate`, a sharper reading of the same run than guesses are, that needs one thing more: scores
        that are independent. They are where the noise is independent from coordinate to coordinate, because a score
        looks at its own coordinate alone and the coins of canaries are independent. Then each canary is a run of its
        own, of the same pair of neighbours up to the order of the coordinates, and bounds that count errors hold. For
        a claim that says which noise is added, the counts refute it either way; as bounds on epsilon they are void
        for noise that is correlated. Record canaries share the whole model and can never be read so.
        """
        return self._worlds(0)

    def evaluate(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return the others: see :meth:`select`."""
        return self._worlds(1)

    def _worlds(self, first: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        scores, included = (values[first::2] for values in self.canaries[GRADIENT])
        return {STATISTICS[GRADIENT]: (scores[~included], scores[included])}

    @property
    def scores(self) -> pa.Table:
        """All canaries, those of the control too: canary, noise, index, included, score."""
        parts = [
            pa.table(
                {
                    "canary": pa.array([kind] * len(scores), pa.string()),
                    "noise": pa.array(np.full(len(scores), self.noise)),
                    "index": pa.array(np.arange(len(scores))),
                    "included": pa.array(included),
                    "score": pa.array(scores),
                }
            )
            for kind, (scores, included) in self.canaries.items()
        ]
        return pa.concat_tables([*parts, *([self.control.scores] if self.control else [])])


def no_scores() -> pa.Table:
    """Return the table of an audit without canaries."""
    return TrainingAudit({}, control=None).scores


def audit_training(
    build: Build,
    spec: ModelGaussian,
    learning_rate: float,
    noise: NoiseSource,
    *,
    canaries: int = 1000,
    records: int = 0,
    per_canary: int | None = None,
    altered: Callable[[np.ndarray], np.ndarray] | None = None,
    seed: int,
) -> TrainingAudit:
    """Train once with canaries, and once more without noise; the result's ``control`` is the second run.

    Memory: steps x canaries x 2 float64 beyond what a training needs.

    Args:
        build: makes the sums of the shipped training from the class that it is given; called twice.
        spec: what the mechanism claims, and does.
        learning_rate: step size, above 0.
        noise: source of coins and noise.
        canaries: gradient canaries, at most one a trainable parameter.
        records: record canaries, at most a quarter of the units.
        per_canary: records of a gradient canary; default: 1 where records are protected, else 2, so that records
            counted as units show.
        altered: see :class:`Plan`; :func:`flipped` for labels.
        seed: public seed of the canaries and their coins.
    """
    own = per_canary or (1 if spec.unit == "record" else 2)
    make = partial(CanarySum, plan=Plan(canaries, records, own, seed, altered))
    control = _run(build, make, spec, learning_rate, Silent(noise))
    return TrainingAudit(_run(build, make, spec, learning_rate, noise), control=TrainingAudit(control, noise=False))


def _run(
    build: Build, make: Callable[..., ClippedSum], spec: ModelGaussian, learning_rate: float, noise: NoiseSource
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Train once; return scores and coins by kind."""
    sums = build(make)
    before = sums.losses()
    fine_tune(sums, spec, learning_rate, noise)
    # A loss that is not finite says nothing about its unit (rule 6).
    drop = np.nan_to_num(before - sums.losses(), nan=0.0, posinf=0.0, neginf=0.0)
    ratios = log_likelihood_ratios(sums.released(spec, learning_rate), spec)
    return {GRADIENT: (ratios, sums.gradient_included), RECORD: (drop, sums.record_included)}


def log_likelihood_ratios(released: np.ndarray, spec: ModelGaussian) -> np.ndarray:
    """Return the log-likelihood ratio of a canary that contributes C at its coordinate against one that is absent.

    A step's release beyond the others is N(C, s**2) where the canary entered it (probability q), else N(0, s**2).

    Args:
        released: from :meth:`CanarySum.released`, shape (steps, m).
        spec: C, s and q.

    Returns:
        float64 of shape (m,).
    """
    entered = (released * spec.clip - spec.clip**2 / 2) / spec.noise_std**2
    q = spec.sampling_rate
    return (np.logaddexp(math.log1p(-q), math.log(q) + entered) if q < 1 else entered).sum(axis=0)
