"""Replay (rule 3): with the noise frozen, one unit more or less moves a release by at most the declared sensitivity.

Each check runs the real mechanism on D and on D'. Later steps depend on earlier outputs, so on D' every released sum
is recorded and then REPLACED by the one from D: everything after a release is post-processing, so both runs see the
same weights at every step. The checks are shown to fail when clipping is broken.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from dpmixmin.finetune import dp_sgd
from dpmixmin.finetune.dp_sgd import ClippedSum, fine_tune
from dpmixmin.mixing.learners import learn_private
from dpmixmin.mixing.objective import UnitGradients
from dpmixmin.models import networks
from dpmixmin.privacy.mechanisms import GridGaussian, ModelGaussian
from dpmixmin.privacy.noise import NoiseSource

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
"""A numpy warning goes to a public log and tells that some record has a wild value (rule 20): here it is a failure."""

ROUNDING = 1 + 1e-12
"""Float64 rounding of the difference of two releases, the only slack of the integer mechanism."""


class FrozenNoise(NoiseSource):
    """The same bytes for the same call, whoever asks: the j-th call gives a prefix of one fixed stream.

    So the first n coins of a step are the same for n and for n + 1 units, and so is the noise that follows.
    """

    private = False

    def __init__(self):
        self.calls = 0

    def random_bytes(self, count: int) -> bytes:
        self.calls += 1
        return hashlib.shake_256(b"frozen %d" % self.calls).digest(count)


def test_frozen_noise_gives_shared_units_the_same_coins():
    assert np.array_equal(FrozenNoise().coins(0.5, 100), FrozenNoise().coins(0.5, 101)[:100])


# -- mechanism 1: the mixture weights -------------------------------------------------------------------------


@dataclass(frozen=True)
class Taped(GridGaussian):
    """Records each released sum; given a tape, returns what is on it instead."""

    @classmethod
    def of(cls, **values):
        spec = cls(**values)
        object.__setattr__(spec, "recorded", [])
        object.__setattr__(spec, "tape", None)
        return spec

    def release_sum(self, vectors, noise):
        released = super().release_sum(vectors, noise)
        self.recorded.append(released)
        return released if self.tape is None else self.tape[len(self.recorded) - 1]


def mixture_distances(data, neighbour, kind=Taped, *, rate=1.0, clip=13.0, steps=6, rate_of_learning=2.0):
    """Return ||release(D) - release(D')|| of every step of ``learn_private``, divided by the clip."""
    values = {
        "clip": clip, "noise_multiplier": 2.0, "steps": steps, "sampling_rate": rate, "nominal_units": 20.0,
        "epsilon": 1.0, "delta": 1e-5,
    }  # fmt: skip
    first, second = kind.of(**values), kind.of(**values)
    one = learn_private(data, first, rate_of_learning, FrozenNoise(), average=False)
    object.__setattr__(second, "tape", first.recorded)
    other = learn_private(neighbour, second, rate_of_learning, FrozenNoise(), average=False)
    assert len(first.recorded) == steps
    assert np.array_equal(one.trajectory, other.trajectory), "the replay must see the same weights"
    return np.asarray([np.linalg.norm(a - b) for a, b in zip(first.recorded, second.recorded, strict=True)]) / clip


def table(rng, n=25, k=6) -> np.ndarray:
    p = rng.uniform(0, 1, size=(n, k)) ** 4
    p[0] = np.nan
    p[1] = 0.0
    p[2] = np.eye(k)[1]
    return p


def single(k: int, **values: float) -> np.ndarray:
    row = np.zeros((1, k))
    for name, value in values.items():
        row[0, int(name.removeprefix("at"))] = value
    return row


WORST = {
    "nothing predicts it": single(6),
    "one source predicts it": single(6, at2=1.0),
    "one source, hardly": single(6, at3=1e-30),
    "smallest float32": single(6, at0=1e-45),
    "nearly all sources": np.asarray([[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]]),
    "all sources": np.ones((1, 6)),
    "NaN": np.full((1, 6), np.nan),
    "one NaN": np.asarray([[0.5, np.nan, 0.5, 0.5, 0.5, 0.5]]),
    "infinity": np.asarray([[0.5, np.inf, 0.5, 0.5, 0.5, 0.5]]),
    "huge": np.asarray([[1e200, 1e-200, 0, 0, 0, 0]]),
    "negative": np.asarray([[-1.0, 1.0, 0.5, 0, 0, 0]]),
}


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("clip", [13.0, 0.01])
@pytest.mark.parametrize("name", WORST)
def test_rule_3_mixture_release_moves_by_at_most_the_clip_for_worst_case_units(name, clip, rate, centred, rng):
    """At p.lambda = 0 too: a large step size drives the weights to a corner of the simplex."""
    p = table(rng)
    data = UnitGradients.of(p, centred=centred)
    neighbour = UnitGradients.of(np.concatenate([p, WORST[name]]), centred=centred)
    learning_rate = 300.0 / clip
    distances = mixture_distances(data, neighbour, rate=rate, clip=clip, rate_of_learning=learning_rate, steps=8)
    assert distances.max() <= ROUNDING


@pytest.mark.parametrize("centred", [False, True])
def test_rule_3_mixture_release_moves_by_at_most_the_clip_for_random_units(centred, rng):
    """Removing any unit in turn; and the bound is reached, so the check has teeth."""
    p = table(rng)
    data = UnitGradients.of(p, centred=centred)
    clip = 1.5
    largest = 0.0
    for gone in range(len(p)):
        neighbour = UnitGradients.of(np.delete(p, gone, axis=0), centred=centred)
        largest = max(largest, mixture_distances(data, neighbour, clip=clip).max())
    assert 0.99 <= largest <= ROUNDING


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("weights", [[0, 1, 0, 0, 0, 0], [0.5, 0, 0, 0, 0, 0.5], [1 / 6] * 6])
def test_rule_3_clipped_gradients_at_weights_that_miss_a_record(weights, centred):
    """p.lambda = 0 exactly: the factor is finite, the vector as long as the clip."""
    p = np.concatenate([WORST["one source predicts it"], WORST["nothing predicts it"]])
    vectors = UnitGradients.of(p, centred=centred).clipped(np.asarray(weights, dtype=float), 2.0)
    assert np.isfinite(vectors).all()
    assert np.linalg.norm(vectors[0]) == pytest.approx(2.0)
    assert not vectors[1].any()


def grouped(p: np.ndarray, index: np.ndarray, centred: bool) -> UnitGradients:
    return UnitGradients.of(p, centred=centred, units=(int(index.max()) + 1, index))


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize(
    "unit",
    [
        np.tile(np.eye(6)[4], (1000, 1)),
        np.concatenate([np.eye(6), np.full((2, 6), np.nan)]),
        np.full((3, 6), np.nan),
        np.zeros((4, 6)),
        np.tile(single(6, at5=1e-45), (50, 1)),
    ],
    ids=["1000 records", "some NaN", "all NaN", "all zero", "hardly predicted"],
)
def test_rule_13_a_unit_with_many_records_moves_the_mixture_by_at_most_the_clip(unit, rate, centred, rng):
    p, index = table(rng, n=30), np.repeat(np.arange(10), 3)
    more = np.concatenate([p, unit])
    longer = np.concatenate([index, np.full(len(unit), 10)])
    distances = mixture_distances(
        grouped(p, index, centred), grouped(more, longer, centred), rate=rate, clip=0.7, rate_of_learning=50.0
    )
    assert distances.max() <= ROUNDING


class NoNormCheck(Taped):
    """A grid that forgets to check the integer norm."""

    def to_grid(self, vectors):
        return np.trunc(np.nan_to_num(vectors) / self.grid).astype(np.int64)


def clip_each_coordinate(self, weights, clip):
    with np.errstate(divide="ignore", invalid="ignore"):
        gradients = -self.directions / (self.p @ weights)[:, None]
    return np.clip(gradients, -clip, clip)


def test_rule_3_the_mixture_check_fails_when_each_coordinate_is_clipped_instead(monkeypatch, rng):
    """Control: first with the norm check gone too, then with it, which alone keeps the sensitivity."""
    p = table(rng)
    data = UnitGradients.of(p, centred=False)
    neighbour = UnitGradients.of(np.concatenate([p, WORST["all sources"]]), centred=False)
    assert mixture_distances(data, neighbour, kind=NoNormCheck, clip=0.5).max() <= ROUNDING
    monkeypatch.setattr(UnitGradients, "clipped", clip_each_coordinate)
    assert mixture_distances(data, neighbour, kind=NoNormCheck, clip=0.5).max() > 2
    assert mixture_distances(data, neighbour, clip=0.5).max() <= ROUNDING


# -- mechanism 2: DP-SGD --------------------------------------------------------------------------------------


class TapedSum(ClippedSum):
    """Records each sum and each update; given a tape, applies the updates on it instead."""

    tape = None

    def __call__(self, batch, clip):
        total = super().__call__(batch, clip)
        self.sums = [*getattr(self, "sums", []), total.numpy().copy()]
        return total

    def add(self, update):
        self.updates = [*getattr(self, "updates", []), update]
        super().add(update if self.tape is None else self.tape[len(self.updates) - 1])


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


def model_distances(part: Part, neighbour: Part, kind=TapedSum, *, clip=0.3, rate=1.0, physical=512) -> np.ndarray:
    """Return ||sum(D) - sum(D')|| of every step of ``fine_tune``, divided by the clip."""
    spec = ModelGaussian(clip, 1.0, 4, rate, 10.0, 1.0, 1e-5)
    runs = []
    for data in (part, neighbour):
        sums = kind(model_of(), data.x, data.y, data.unit, data.units, physical)
        sums.tape = runs[0].updates if runs else None
        fine_tune(sums, spec, 0.5, FrozenNoise())
        runs.append(sums)
    assert len(runs[0].sums) == len(runs[1].sums) == 4
    for one, other in zip(runs[0].parameters, runs[1].parameters, strict=True):
        assert torch.equal(one, other), "the replay must see the same weights"
    return np.asarray([np.linalg.norm(a - b) for a, b in zip(runs[0].sums, runs[1].sums, strict=True)]) / clip


UNITS = {
    "plain": (np.ones((1, 6)), np.ones(1)),
    "huge features": (np.full((1, 6), 1e18), np.zeros(1)),
    "overflowing features": (np.full((1, 6), 3e38), np.zeros(1)),
    "NaN feature": (np.asarray([[1, np.nan, 1, 1, 1, 1]]), np.ones(1)),
    "NaN label": (np.ones((1, 6)), np.full(1, np.nan)),
    "1000 equal records": (np.ones((1000, 6)), np.zeros(1000)),
    "1000 records, one NaN": (np.r_[np.ones((999, 6)), np.full((1, 6), np.nan)], np.zeros(1000)),
    "records of both labels": (np.ones((10, 6)) * np.arange(10)[:, None], np.arange(10) % 2),
}


@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("name", UNITS)
def test_rule_3_and_13_dp_sgd_sum_moves_by_at_most_the_clip_for_worst_case_units(name, rate, rng):
    part = some_part(rng)
    distances = model_distances(part, part.plus(*UNITS[name]), rate=rate)
    assert np.isfinite(distances).all()
    assert distances.max() <= 1
    if name == "NaN label":
        assert distances.max() == 0


def test_rule_3_dp_sgd_sum_moves_by_at_most_the_clip_whichever_unit_goes(rng):
    """Removing any unit in turn, which shifts the physical batches; and the bound is nearly reached."""
    part = some_part(rng)
    largest = max(model_distances(part, part.minus(gone), physical=5).max() for gone in range(part.units))
    assert 0.999 <= largest <= 1


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
    larger = part.plus(*UNITS["plain"])
    assert model_distances(part, larger, clip=0.01).max() <= 1

    def largest_coordinate(gradients, dim, dtype=None):
        return gradients.abs().amax(dim=dim).to(dtype or gradients.dtype)

    monkeypatch.setattr(dp_sgd.torch.linalg, "vector_norm", largest_coordinate)
    assert model_distances(part, larger, clip=0.01).max() > 2


class EachRecordClipped(TapedSum):
    """Clips records and sums them, so a unit counts as often as it has records."""

    def __init__(self, model, features, labels, unit_index, units, physical_batch):
        self.owners = unit_index
        super().__init__(model, features, labels, np.arange(len(features)), len(features), physical_batch)

    def __call__(self, batch, clip):
        return super().__call__(np.ones(self.units, dtype=bool), clip)


def test_rule_13_the_dp_sgd_check_fails_when_records_are_clipped_instead_of_units(rng):
    """Control."""
    part = some_part(rng)
    larger = part.plus(*UNITS["1000 equal records"])
    assert model_distances(part, larger).max() <= 1
    assert model_distances(part, larger, kind=EachRecordClipped).max() > 100
