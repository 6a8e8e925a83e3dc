"""Replay (rule 3): with the randomness frozen, one unit more or less moves a release by at most the sensitivity.

Every mechanism runs through ``audit.replay``, over random and constructed neighbours and under every adjacency. The
checks are shown to fail when clipping is broken.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from dpmixmin.audit.replay import ROUNDING, FrozenNoise, Taped, replay, worst_probabilities, worst_records
from dpmixmin.finetune import dp_sgd
from dpmixmin.finetune.dp_sgd import ClippedSum, fine_tune
from dpmixmin.mixing.learners import learn_private
from dpmixmin.mixing.objective import SourceTable, UnitGradients
from dpmixmin.models import networks
from dpmixmin.privacy.mechanisms import GridGaussian, ModelGaussian, ResponsibilityGaussian
from dpmixmin.privacy.selection import NoisyMax, noisy_score

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
"""A numpy warning goes to a public log and tells that some record has a wild value (rule 20): here it is a failure."""

K = 6
WORST = dict(worst_probabilities(K))
WORST_RECORDS = {name: (x, y) for name, x, y in worst_records(6)}


def test_frozen_noise_gives_shared_units_the_same_coins():
    assert np.array_equal(FrozenNoise().coins(0.5, 100), FrozenNoise().coins(0.5, 101)[:100])


# -- mechanism 1: the mixture weights -------------------------------------------------------------------------


@dataclass
class Rows:
    """Source probabilities with each row's unit."""

    p: np.ndarray
    unit: np.ndarray

    @classmethod
    def each_its_own(cls, p: np.ndarray) -> "Rows":
        return cls(p, np.arange(len(p)))

    def plus(self, rows: np.ndarray) -> "Rows":
        """Add one unit, the last."""
        new = self.unit.max(initial=-1) + 1
        return Rows(np.concatenate([self.p, rows]), np.r_[self.unit, np.full(len(rows), new)])

    def minus(self, unit: int) -> "Rows":
        """Remove one unit; those after it move up."""
        keep = self.unit != unit
        index = self.unit[keep]
        return Rows(self.p[keep], np.where(index > unit, index - 1, index))

    def gradients(self, centred: bool) -> UnitGradients:
        table = SourceTable.of_labels(self.p, (int(self.unit.max(initial=-1)) + 1, self.unit))
        return UnitGradients.of(table, centred=centred)


def mixture_spec(kind=GridGaussian, **changes) -> GridGaussian:
    values = {
        "clip": 1.0, "noise_multiplier": 2.0, "steps": 6, "sampling_rate": 1.0, "nominal_units": 20.0, "epsilon": 1.0,
        "delta": 1e-5, **changes,
    }  # fmt: skip
    return kind(**values)


def mixture_replay(spec, data: Rows, neighbour: Rows, *, centred=False, learning_rate=2.0):
    def run(rows, taped, noise):
        return learn_private(rows.gradients(centred), taped, learning_rate, noise, average=False).trajectory

    found = replay(run, spec, data, neighbour)
    assert len(found.ratios) == spec.steps
    return found


def table(rng, n=25) -> Rows:
    p = rng.uniform(0, 1, size=(n, K)) ** 4
    p[0] = np.nan
    p[1] = 0.0
    p[2] = np.eye(K)[1]
    return Rows.each_its_own(p)


LEARNERS = ("algorithm1", "centred", "responsibilities")


def learner_spec(learner: str, clip: float, **changes):
    """Return the spec, whether gradients are centred, and a step size that drives the weights to a corner."""
    if learner == "responsibilities":
        return mixture_spec(ResponsibilityGaussian, steps=8, **changes), False, 3.0
    return mixture_spec(clip=clip, steps=8, **changes), learner == "centred", 300.0 / clip


@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("clip", [13.0, 0.01])
@pytest.mark.parametrize("name", WORST)
def test_rule_3_and_13_mixture_release_moves_by_at_most_the_clip_for_worst_case_units(name, clip, rate, learner, rng):
    """At p.lambda = 0 too: a large step size drives the weights to a corner of the simplex."""
    data = table(rng)
    spec, centred, learning_rate = learner_spec(learner, clip, sampling_rate=rate)
    found = mixture_replay(spec, data, data.plus(WORST[name]), centred=centred, learning_rate=learning_rate)
    assert found.holds, found.worst


@pytest.mark.parametrize("learner", LEARNERS)
def test_rule_3_mixture_release_moves_by_at_most_the_clip_whichever_unit_goes(learner, rng):
    """Removing any unit in turn; and the bound is nearly reached, so the check has teeth."""
    data = table(rng)
    spec, centred, _ = learner_spec(learner, 1.5)
    found = [mixture_replay(spec, data, data.minus(gone), centred=centred) for gone in range(25)]
    assert all(each.holds for each in found)
    assert max(each.worst for each in found) >= 0.99


@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out"])
def test_rule_27_mixture_sensitivity_under_the_other_adjacencies(adjacency, learner, rng):
    """One unit replaced by another under its id, or by nothing. Opposite units nearly reach the replace-one bound."""
    data = table(rng)
    spec, centred, _ = learner_spec(learner, 0.5, adjacency=adjacency)
    one, other = np.eye(K)[[1]], np.eye(K)[[2]]
    replaced = np.full((1, K), np.nan) if adjacency == "zero_out" else other
    found = mixture_replay(spec, data.plus(one), data.plus(replaced), centred=centred)
    assert found.holds
    assert found.worst > (0.7 if adjacency == "replace_one" else 0.99)
    if adjacency == "replace_one":
        narrow = replace(spec, adjacency="add_remove")
        assert not mixture_replay(narrow, data.plus(one), data.plus(other), centred=centred).holds
    assert spec.sensitivity == pytest.approx(
        {"zero_out": spec.clip, "replace_one": spec.clip * (2**0.5 if learner == "responsibilities" else 2)}[adjacency]
    )


@pytest.mark.parametrize("learner", LEARNERS)
def test_rule_5_the_only_unit_of_a_part_moves_its_release_by_at_most_the_clip(learner):
    nobody = Rows(np.zeros((0, K)), np.zeros(0, dtype=int))
    spec, centred, _ = learner_spec(learner, 1.0)
    assert mixture_replay(spec, nobody, nobody.plus(np.eye(K)[[1]]), centred=centred).holds


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("weights", [[0, 1, 0, 0, 0, 0], [0.5, 0, 0, 0, 0, 0.5], [1 / 6] * 6])
def test_rule_3_clipped_gradients_at_weights_that_miss_a_record(weights, centred):
    """p.lambda = 0 exactly: the factor is finite, the vector as long as the clip."""
    p = np.concatenate([np.eye(K)[[2]], WORST["nothing predicts it"]])
    gradients = UnitGradients.of(SourceTable.of_labels(p), centred=centred)
    vectors = gradients.clipped(np.asarray(weights, dtype=float), 2.0)
    assert np.isfinite(vectors).all()
    assert np.linalg.norm(vectors[0]) == pytest.approx(2.0)
    assert not vectors[1].any()
    responsibilities = gradients.responsibilities(np.asarray(weights, dtype=float))
    assert not responsibilities[1].any()
    assert responsibilities[0].sum() in (0.0, 1.0)


class NoNormCheck(GridGaussian):
    """A grid that forgets to check the integer norm."""

    def to_grid(self, vectors):
        return np.trunc(np.nan_to_num(vectors) / self.grid).astype(np.int64)


def clip_each_coordinate(self, weights, clip, present=None):
    with np.errstate(divide="ignore", invalid="ignore"):
        gradients = -self.directions / (weights @ self.table.p)
    return np.clip(gradients, -clip, clip).T


def test_rule_3_the_mixture_check_fails_when_each_coordinate_is_clipped_instead(monkeypatch, rng):
    """Control: first with the norm check gone too, then with it, which alone keeps the sensitivity."""
    data = table(rng)
    neighbour = data.plus(WORST["all sources"])
    unchecked = mixture_spec(NoNormCheck, clip=0.5)
    assert mixture_replay(unchecked, data, neighbour).holds
    monkeypatch.setattr(UnitGradients, "clipped", clip_each_coordinate)
    assert mixture_replay(unchecked, data, neighbour).worst > 2
    assert mixture_replay(mixture_spec(clip=0.5), data, neighbour).holds


def test_rule_3_the_responsibility_check_fails_when_records_are_summed_instead_of_averaged(monkeypatch, rng):
    """Control: a unit counts as often as it has records, and the grid does not check."""
    data, spec = table(rng), mixture_spec(ResponsibilityGaussian)
    neighbour = data.plus(WORST["1000 equal records"])

    monkeypatch.setattr(SourceTable, "select", lambda self, present=None: (slice(None), np.ones(len(self.record))))
    assert mixture_replay(spec, data, neighbour).holds, "the grid drops a row outside the simplex"
    monkeypatch.setattr(ResponsibilityGaussian, "to_grid", NoNormCheck.to_grid)
    assert mixture_replay(spec, data, neighbour).worst > 100


def test_the_replay_sees_a_release_that_is_not_recorded(rng):
    """A mechanism that lets private data out beside its releases ends in another public state."""

    def leaky(rows, taped, noise):
        learn_private(rows.gradients(False), taped, 1.0, noise, average=False)
        return len(rows.p)

    with pytest.raises(AssertionError, match="public states"):
        replay(leaky, mixture_spec(), table(rng), table(rng).minus(3))

    def shorter(rows, taped, noise):
        return learn_private(rows.gradients(False), Shortened(taped, len(rows.p) % 2 + 1), 1.0, noise, average=False)

    with pytest.raises(AssertionError, match="numbers of releases"):
        replay(shorter, mixture_spec(), table(rng), table(rng).minus(3))


class Shortened:
    """A spec with another number of steps."""

    def __init__(self, spec, steps):
        self._spec, self.steps = spec, steps

    def __getattr__(self, name):
        return getattr(self._spec, name)


# -- selection ------------------------------------------------------------------------------------------------

SCORES = {
    "one candidate only": np.asarray([[1.0, 0.0, 0.0]]),
    "all candidates": np.ones((1, 3)),
    "far above the bound": np.asarray([[1e300, -1e300, 5.0]]),
    "NaN": np.asarray([[1.0, np.nan, 0.0]]),
    "infinity": np.asarray([[np.inf, 0.0, 0.0]]),
}


@pytest.mark.parametrize("rule", ["permute_and_flip", "exponential"])
@pytest.mark.parametrize("name", SCORES)
def test_rule_9_selection_qualities_move_by_at_most_the_declared_range(name, rule, rng):
    scores = rng.uniform(size=(30, 3))
    spec = NoisyMax(3, 1.0, 1.0, 1e-5, 30.0, rule)
    found = replay(lambda data, taped, noise: taped.release(data, noise), spec, scores, np.r_[scores, SCORES[name]])
    assert found.holds
    assert (found.worst == 0) == (name in ("NaN", "infinity", "all candidates"))
    if name == "one candidate only":
        assert found.worst == 1.0, "the bound is reached"
        swapped = np.r_[scores, SCORES[name][:, ::-1]]
        both = replay(
            lambda data, taped, noise: taped.release(data, noise),
            replace(spec, adjacency="replace_one"), np.r_[scores, SCORES[name]], swapped,
        )  # fmt: skip
        assert both.worst == 1.0


@pytest.mark.parametrize("value", [5.0, -5.0, np.nan, np.inf, 0.3])
def test_rule_9_a_noisy_score_moves_by_at_most_the_clip(value, rng):
    scores = rng.uniform(size=30)
    spec = mixture_spec(clip=1.0, steps=1)
    found = replay(lambda data, taped, noise: noisy_score(taped, data, noise), spec, scores, np.r_[scores, value])
    assert found.holds
    assert found.worst == pytest.approx({5.0: 1, -5.0: 1, 0.3: 0.3}.get(value, 0), abs=1e-5)


# -- mechanism 2: DP-SGD --------------------------------------------------------------------------------------


def model_of(width: int = 6) -> nn.Module:
    torch.manual_seed(1)
    return networks.mlp(width, 8, 1)


@dataclass
class Part:
    """Records of a fine-tuning part."""

    x: np.ndarray
    y: np.ndarray
    unit: np.ndarray

    @property
    def units(self) -> int:
        return int(self.unit.max()) + 1 if len(self.unit) else 0

    def plus(self, x: np.ndarray, y: np.ndarray) -> "Part":
        """Add one unit, the last."""
        new = np.full(len(x), self.units)
        parts = ((self.x, x.astype(np.float32)), (self.y, y.astype(np.float32)), (self.unit, new))
        return Part(*(np.concatenate(pair) for pair in parts))

    def minus(self, unit: int) -> "Part":
        """Remove one unit; those after it move up."""
        keep = self.unit != unit
        index = self.unit[keep]
        return Part(self.x[keep], self.y[keep], np.where(index > unit, index - 1, index))


def some_part(rng, units=12) -> Part:
    index = np.repeat(np.arange(units), rng.integers(1, 4, size=units))
    x = rng.normal(size=(len(index), 6)).astype(np.float32)
    return Part(x, rng.integers(0, 2, size=len(index)).astype(np.float32), index)


def model_replay(part: Part, neighbour: Part, kind=ClippedSum, *, clip=0.3, rate=1.0, physical=512, **changes):
    """Replay ``fine_tune``. The noise is tiny, so that the difference is not lost in its rounding."""
    spec = ModelGaussian(clip, 1e-6, 4, rate, 10.0, 1.0, 1e-5, **changes)

    def run(data, taped, noise):
        sums = kind(model_of(), data.x, data.y, data.unit, data.units, physical)
        fine_tune(sums, taped, 0.5, noise)
        return [parameter.detach().numpy() for parameter in sums.parameters]

    found = replay(run, spec, part, neighbour)
    assert len(found.ratios) == 4
    return found


@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("name", WORST_RECORDS)
def test_rule_3_and_13_dp_sgd_sum_moves_by_at_most_the_clip_for_worst_case_units(name, rate, rng):
    part = some_part(rng)
    found = model_replay(part, part.plus(*WORST_RECORDS[name]), rate=rate)
    assert found.holds, found.worst
    if name == "NaN label":
        assert found.worst == 0


def test_rule_3_dp_sgd_sum_moves_by_at_most_the_clip_whichever_unit_goes(rng):
    """Removing any unit in turn, which shifts the physical batches; and the bound is nearly reached."""
    part = some_part(rng)
    found = [model_replay(part, part.minus(gone), physical=5) for gone in range(part.units)]
    assert all(each.holds for each in found)
    assert max(each.worst for each in found) >= 0.999


@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out"])
def test_rule_27_dp_sgd_sensitivity_under_the_other_adjacencies(adjacency, rng):
    part = some_part(rng)
    ones = np.ones((1, 6))
    first = part.plus(ones, np.ones(1))
    second = part.plus(ones, np.zeros(1)) if adjacency == "replace_one" else part.plus(ones, np.full(1, np.nan))
    found = model_replay(first, second, clip=0.01, adjacency=adjacency)
    assert found.holds
    assert found.worst >= 0.99, "the same features with opposite labels have opposite gradients"
    if adjacency == "replace_one":
        assert not model_replay(first, second, clip=0.01).holds


def test_rule_5_the_only_unit_of_a_part_moves_the_model_by_at_most_the_clip():
    nobody = Part(np.zeros((0, 6), np.float32), np.zeros(0, np.float32), np.zeros(0, dtype=int))
    assert model_replay(nobody, nobody.plus(np.ones((3, 6)), np.ones(3))).holds


def test_rule_3_dp_sgd_rounding_of_long_sums_stays_within_the_margin(rng):
    """Thousands of equal units in one physical batch: float rounding of the sum must not exceed the clip."""
    units = 4096
    worst = 0.0
    for scale in (1.0, 3.7, 41.0):
        model = nn.Linear(29, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        x = np.tile((rng.normal(size=29) * scale).astype(np.float32), (units, 1))
        sums = ClippedSum(model, x, np.ones(units, np.float32), np.arange(units), units, units)
        for present in range(2900, 3000, 4):
            batch = np.arange(units) < present
            less = np.arange(units) < present - 1
            worst = max(worst, float(torch.linalg.vector_norm(sums(batch, 1.0) - sums(less, 1.0))))
    assert 0.999 < worst <= 1


@pytest.mark.parametrize("width", [20_000, 400_000])
def test_rule_3_dp_sgd_norms_of_long_gradients_are_exact_enough(width):
    """A float32 norm of 400,000 equal coordinates is 1e-4 too small: the unit would be longer than the clip."""
    worst = 0.0
    for value in (0.1, 0.11, 0.13, 0.7, 3.3):
        model = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(model.weight)
        sums = ClippedSum(model, np.full((1, width), value, np.float32), np.ones(1, np.float32), np.zeros(1, int), 1)
        worst = max(worst, float(torch.linalg.vector_norm(sums(np.ones(1, dtype=bool), 1.0))))
    assert 0.999 < worst <= 1


def test_rule_3_the_dp_sgd_check_fails_when_each_coordinate_is_clipped_instead(monkeypatch, rng):
    """Control: the norm is taken as the largest coordinate."""
    part = some_part(rng)
    larger = part.plus(*WORST_RECORDS["plain"])
    assert model_replay(part, larger, clip=0.01).holds

    def largest_coordinate(gradients, dim, dtype=None):
        return gradients.abs().amax(dim=dim).to(dtype or gradients.dtype)

    monkeypatch.setattr(dp_sgd.torch.linalg, "vector_norm", largest_coordinate)
    assert model_replay(part, larger, clip=0.01).worst > 2


class EachRecordClipped(ClippedSum):
    """Clips records and sums them, so a unit counts as often as it has records."""

    def __init__(self, model, features, labels, unit_index, units, physical_batch):
        super().__init__(model, features, labels, np.arange(len(features)), len(features), physical_batch)

    def __call__(self, batch, clip, secret=None):
        return super().__call__(np.ones(self.units, dtype=bool), clip, secret)


def test_rule_13_the_dp_sgd_check_fails_when_records_are_clipped_instead_of_units(rng):
    """Control."""
    part = some_part(rng)
    larger = part.plus(*WORST_RECORDS["1000 equal records"])
    assert model_replay(part, larger).holds
    assert model_replay(part, larger, kind=EachRecordClipped).worst > 100


def test_a_taped_spec_passes_everything_else_through():
    spec = mixture_spec(clip=2.0)
    taped = Taped(spec)
    assert (taped.clip, taped.expected_batch, taped.events()) == (2.0, 20.0, spec.events())
    assert ROUNDING - 1 < 1e-11
