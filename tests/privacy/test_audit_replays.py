"""The replay audit of the mechanisms as they run (rules 3, 5, 6, 13, 27): honest ones hold, broken ones do not.

How each constructed unit fares is in test_replay.py; here is what the audit makes of a run's tables and specs.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dpmixmin import evaluation
from dpmixmin.audit import replays
from dpmixmin.audit.replay import OftenPresent, worst_probabilities
from dpmixmin.data.text_records import TextRecords
from dpmixmin.finetune import dp_sgd
from dpmixmin.finetune.dp_sgd import ClippedSum
from dpmixmin.finetune.texts import text_sums
from dpmixmin.mixing import learners
from dpmixmin.mixing.objective import SourceTable, UnitGradients
from dpmixmin.models import language, networks
from dpmixmin.privacy.mechanisms import GridGaussian, ModelGaussian, ResponsibilityGaussian
from dpmixmin.privacy.subsample import names
from dpmixmin.text_sections import LanguageModel

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
"""A numpy warning goes to a log and tells that some record has a wild value (rule 20): here it is a failure."""

K = 5
LEARNERS = ("algorithm1", "centred", "responsibilities")


def spec_of(learner: str = "centred", **changes) -> GridGaussian:
    values = {"clip": 0.3, "noise_multiplier": 20.0, "steps": 100, "sampling_rate": 1.0, "nominal_units": 60.0,
              "epsilon": 1.0, "delta": 1e-5, **changes}  # fmt: skip
    return (
        ResponsibilityGaussian(**{**values, "clip": 1.0}) if learner == "responsibilities" else GridGaussian(**values)
    )


class Users:
    """Users of 1 to 6 records, a record of 0 to 4 tokens."""

    def __init__(self, rng, count: int = 40):
        self.unit = np.repeat(np.arange(count), rng.integers(1, 7, size=count))
        records = len(self.unit)
        self.length = rng.integers(0, 5, size=records)
        self.record = np.repeat(np.arange(records), self.length)
        self.logp = rng.normal(-6, 2, size=(len(self.record), K))
        self.p = rng.uniform(0, 1, size=(records, K)) ** 4
        self.names = names(map(str, range(records)))

    def table(self, kind: str, wanted=None) -> SourceTable:
        """Build the table of these units, in this order, from the records."""
        wanted = np.arange(self.unit.max() + 1) if wanted is None else np.asarray(wanted)
        records = np.concatenate([np.zeros(0, dtype=int), *(np.flatnonzero(self.unit == one) for one in wanted)])
        owners = len(wanted), np.repeat(np.arange(len(wanted)), [(self.unit == one).sum() for one in wanted])
        length, own = self.length[records], self.names[records]
        if kind == "labels":
            return SourceTable.of_labels(self.p[records], owners, own)
        rows = np.concatenate([np.zeros(0, dtype=int), *(np.flatnonzero(self.record == one) for one in records)])
        record = np.repeat(np.arange(len(records)), length)
        if kind == "token":
            return SourceTable.of_tokens(self.logp[rows], record, length, owners, own)
        totals = np.zeros((len(records), K))
        np.add.at(totals, record, self.logp[rows])
        return SourceTable.of_sequences(totals, length, owners, own)


def broken(results) -> list[str]:
    return [result.neighbour for result in results if not result.holds]


# -- mechanism 1 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1.0, 0.01])
@pytest.mark.parametrize("kind", ["labels", "sequence", "token"])
@pytest.mark.parametrize("learner", LEARNERS)
def test_rule_3_the_shipped_learners_hold_and_come_near_the_bound(learner, kind, rate, rng):
    """At a rate of 1 % too, where by its own coins hardly any unit would ever be there."""
    table = Users(rng).table(kind)
    found = replays.replay_mixture(table, spec_of(learner, sampling_rate=rate), learner, 3.0, 2)
    assert not broken(found)
    assert replays.worst(found).ratio > 0.99
    assert {len(result.ratios) for result in found} == {replays.MIXTURE_STEPS}
    named = {result.neighbour for result in found}
    assert {"without: largest unit", "without: last unit", "without: first unit", "with: NaN (texts)"} <= named
    assert len(found) == 1 + 3 + 3 * len(list(worst_probabilities(K)))
    removed = [result for result in found if result.neighbour.startswith("without")]
    assert all(result.ratio > 0 for result in removed), "a removed unit was there"


def test_rule_27_replace_one_is_measured_by_its_own_sensitivity(rng):
    spec = spec_of(adjacency="replace_one")
    found = replays.replay_mixture(Users(rng).table("labels"), spec, "algorithm1", 3.0)
    assert not broken(found)
    pairs = [result for result in found if " -> " in result.neighbour]
    added = [result for result in found if result.neighbour.startswith("with:")]
    assert len(pairs) == len(added) - 1
    assert max(result.ratio for result in pairs) > 0.5
    assert replays.worst(added).ratio > 0.99, "still measured by C, not by 2 C"


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("learner", LEARNERS)
def test_rule_5_the_smallest_tables_can_be_replayed(learner, count, rng):
    table = Users(rng).table("labels", range(count))
    assert table.count == count
    found = replays.replay_mixture(table, spec_of(learner), learner, 3.0, 2)
    assert not broken(found)
    assert sum(result.neighbour.startswith("without") for result in found) == count, "each unit once"


@pytest.mark.parametrize("k", [1, 2])
def test_few_sources_can_be_replayed(k, rng):
    table = SourceTable.of_labels(rng.uniform(size=(20, k)))
    assert not broken(replays.replay_mixture(table, spec_of(), "algorithm1", 3.0))


@pytest.mark.parametrize("sigma", [1e-3, 1.0, 1e6])
def test_rule_3_noise_of_any_size_hides_no_difference_and_makes_none(sigma, rng):
    table = Users(rng).table("labels")
    found = replays.replay_mixture(table, spec_of(noise_multiplier=sigma), "algorithm1", 3.0)
    assert not broken(found)
    assert 0.99 < replays.worst(found).ratio <= 1


@pytest.mark.parametrize("kind", ["labels", "sequence", "token"])
def test_a_unit_moved_to_the_end_is_the_table_built_in_that_order(kind, rng):
    """To the last bit: owners, vectors, and who is chosen by a step's secret."""
    data, gone = Users(rng), np.arange(40) == 17
    whole = data.table(kind)
    moved = replays._joined(whole.keep(~gone), whole.keep(gone))
    built = data.table(kind, [*np.flatnonzero(~gone), 17])
    assert moved.count == built.count == 40
    np.testing.assert_array_equal(moved.p, built.p)
    np.testing.assert_array_equal(moved.owner, built.owner)
    weights = rng.dirichlet(np.ones(K))
    for limit in (None, 2):
        found = []
        for table in (moved, built):
            present = None if limit is None else table.subset(b"s" * 32, limit)
            found.append(UnitGradients.of(table, centred=True).clipped(weights, 0.3, present))
        np.testing.assert_array_equal(*found)


def test_large_tables_are_cut_but_the_named_units_stay(rng):
    """Of 3000 users of three records the largest, in the middle, has 50."""
    unit = np.sort(np.r_[np.repeat(np.arange(3000), 3), np.full(47, 1700)])
    units, named = replays._chosen(np.bincount(unit), replays.MIXTURE_ROWS)
    assert named == {"largest unit": 1700, "last unit": 2999, "first unit": 0}
    assert set(named.values()) <= set(units.tolist())
    assert replays.MIXTURE_ROWS - 3 < np.bincount(unit)[units].sum() <= replays.MIXTURE_ROWS
    assert (np.diff(units) > 0).all()


def test_rule_3_a_forgotten_clip_is_found(monkeypatch, rng):
    """With the grid's own check gone; each of the two alone keeps the sensitivity."""
    clipped, table = UnitGradients.clipped, Users(rng).table("labels")
    monkeypatch.setattr(
        UnitGradients, "clipped", lambda self, weights, clip, *rest: clipped(self, weights, 1e9, *rest)
    )
    assert not broken(replays.replay_mixture(table, spec_of(), "algorithm1", 3.0))
    monkeypatch.setattr(GridGaussian, "to_grid", lambda self, vectors: np.trunc(np.nan_to_num(vectors) / self.grid))
    found = replays.replay_mixture(table, spec_of(), "algorithm1", 3.0)
    assert {"with: one source predicts it", "without: first unit"} <= set(broken(found))
    assert "with: nothing predicts it" not in broken(found)


def test_rule_2_a_state_that_depends_on_the_private_size_is_found(monkeypatch, rng):
    def leaky(learner, table, *options):
        learned = learners.learn(learner, table, *options)
        return replace(learned, weights=learned.weights * table.count)

    monkeypatch.setattr(replays, "learn", leaky)
    found = replays.replay_mixture(Users(rng).table("labels"), spec_of(), "centred", 3.0)
    assert len(broken(found)) == len(found) - 1
    assert replays.worst(found).ratio == np.inf


class Repeating(GridGaussian):
    """Draws its noise once, and adds it in every step."""

    def add_noise(self, total, noise):
        return total + noise.__dict__.setdefault("drawn", super().add_noise(0 * total, noise))


class Quiet(GridGaussian):
    """Adds nothing where there is nobody."""

    def release_sum(self, vectors, noise):
        return super().release_sum(vectors, noise) if len(vectors) else np.zeros(vectors.shape[1])


class QuietCoordinate(GridGaussian):
    """Adds no noise to one source's coordinate."""

    def add_noise(self, total, noise):
        return np.where(np.arange(len(total)) == 1, total, super().add_noise(total, noise))


@pytest.mark.parametrize(("kind", "steps"), [(Repeating, 9), (Quiet, 10), (QuietCoordinate, 10)])
def test_rules_5_and_14_steps_without_noise_of_their_own_are_found(kind, steps, rng):
    """Between neighbours nothing is wrong."""
    spec = kind(
        **{name: value for name, value in spec_of().describe().items() if name not in ("mechanism", "alongside")}
    )
    found = replays.replay_mixture(Users(rng).table("labels"), spec, "centred", 3.0)
    assert broken(found) == ["nobody: each step has its noise"]
    assert np.isinf(found[0].ratios).sum() == steps


def test_rule_6_a_release_that_is_not_finite_is_found():
    result = replays.ReplayResult("mixture", "with: NaN", np.asarray([0.5, np.nan]))
    assert not result.holds
    assert result.ratio == np.inf


def test_every_unit_enters_the_first_sampled_step_and_keeps_its_coins():
    one, other = OftenPresent(), OftenPresent()
    assert one.coins(1e-9, 50).all()
    assert other.coins(1e-9, 51).all()
    second = one.coins(1e-9, 50)
    assert 10 < second.sum() < 40
    assert np.array_equal(second, other.coins(1e-9, 51)[:50])


# -- mechanism 2 ----------------------------------------------------------------------------------------------


def label_build(rng, units: int = 20, **options):
    unit = np.repeat(np.arange(units), rng.integers(1, 4, size=units))
    x = rng.normal(size=(len(unit), 6)).astype(np.float32)
    y = rng.integers(0, 2, size=len(unit)).astype(np.float32)

    def build(make):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = networks.mlp(6, 8, 1)
        return make(model, x, y, unit, units, 16, names=names(map(str, range(len(unit)))), **options)

    return build


def model_spec(**changes) -> ModelGaussian:
    values = {"clip": 0.2, "noise_multiplier": 2.0, "steps": 50, "sampling_rate": 0.01, "nominal_units": 20.0,
              "epsilon": 1.0, "delta": 1e-5, **changes}  # fmt: skip
    return ModelGaussian(**values)


@pytest.mark.parametrize("rate", [1.0, 0.01])
@pytest.mark.parametrize("limit", [None, 2])
def test_rule_3_the_shipped_dp_sgd_holds_and_comes_near_the_bound(limit, rate, rng):
    build = label_build(rng, records_per_step=limit)
    found = replays.replay_training(build, model_spec(sampling_rate=rate), 0.5)
    assert not broken(found)
    assert replays.worst(found).ratio > 0.99
    assert {len(result.ratios) for result in found} == {replays.TRAINING_STEPS}
    removed = [result for result in found if result.neighbour.startswith("without")]
    assert [result.ratio > 0 for result in removed] == [True] * 3


@pytest.mark.parametrize("units", [0, 1])
def test_rule_5_the_smallest_parts_can_be_replayed(units, rng):
    found = replays.replay_training(label_build(rng, units), model_spec(adjacency="replace_one"), 0.5)
    assert not broken(found)
    assert sum(" -> " in result.neighbour for result in found) == 7


def test_rule_13_records_that_count_as_units_are_found(monkeypatch, rng):
    build = label_build(rng)

    class EachRecord(ClippedSum):
        def __init__(self, model, features, labels, unit_index, units, physical_batch, **options):
            rows = len(features)
            super().__init__(model, features, labels, np.arange(rows), rows, physical_batch, **options)

    monkeypatch.setattr(dp_sgd, "ClippedSum", EachRecord)
    found = replays.replay_training(build, model_spec(), 0.5)
    assert "with: 1000 equal records" in broken(found)
    assert replays.worst(found).ratio > 900
    assert "with: plain" not in broken(found)


def test_rule_2_a_divisor_that_depends_on_the_private_size_is_found(monkeypatch, rng):
    class Divided(ClippedSum):
        def add(self, update):
            super().add(update / max(1, self.units))

    monkeypatch.setattr(dp_sgd, "ClippedSum", Divided)
    found = replays.replay_training(label_build(rng), model_spec(), 0.5)
    assert len(broken(found)) == len(found) - 1


@pytest.fixture
def texts(rng):
    """``build(limit)`` of a GPT-2 of one layer; texts of none to three windows."""
    end, words, count = 0, 256, 24
    model = language.build(LanguageModel(layers=1, width=8, heads=1), words, 8, end, 0)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = [rng.integers(1, words, size=size).astype(np.int32) for size in (3, 20, 0, 9, 8, 1, 5, 17) * 3]
    unit = np.sort(np.array([f"{i % 12:02d}" for i in range(count)]))
    records = TextRecords(np.array([f"{i:02d}" for i in range(count)]), unit, [""] * count, tokens)

    def build(make, limit=None, physical=64):
        config = SimpleNamespace(
            text=SimpleNamespace(context=8, long_records="windows"),
            finetune=SimpleNamespace(physical_batch=physical),
            private=SimpleNamespace(records_per_step=limit),
        )
        model.load_state_dict(start)
        return text_sums(model, records, end, config, make)

    return build


@pytest.mark.parametrize("limit", [None, 1])
def test_rule_3_the_shipped_dp_sgd_of_texts_holds_and_comes_near_the_bound(limit, texts):
    found = replays.replay_training(lambda make: texts(make, limit), model_spec(unit="user"), 0.5)
    assert not broken(found)
    by_name = {result.neighbour: result.ratio for result in found}
    assert sum(name.startswith("with:") for name in by_name) == 6
    assert by_name["with: nothing to predict"] == 0
    assert min(by_name["with: one token"], by_name["with: one text of 50 windows"]) > 0.99
    assert min(ratio for name, ratio in by_name.items() if name.startswith("without")) > 0


def test_rule_6_a_physical_batch_of_empty_texts_alone_is_nothing_special(texts):
    """A user without a token may be all of a physical batch, and all of a step."""
    found = replays.replay_training(lambda make: texts(make, physical=1), model_spec(unit="user"), 0.5)
    assert not broken(found)


# -- the charged evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("bins", [10, 2, None])
def test_rule_3_the_charged_evaluation_holds_and_comes_near_the_bound(bins, adjacency):
    spec = spec_of(clip=1.0, steps=1, adjacency=adjacency)
    found = replays.replay_evaluation(spec, 5.0, bins)
    assert not broken(found)
    assert replays.worst(found).ratio > 0.8
    assert found[0].neighbour == "nobody: each step has its noise"
    by_name = {result.neighbour: result.ratio for result in found}
    assert by_name["with: NaN score"] == by_name["with: infinite score"] == 0


def test_rule_3_an_evaluation_vector_that_is_too_long_is_found(monkeypatch):
    """The blocks are not scaled, and nothing else checks."""
    spec = spec_of(clip=1.0, steps=1)
    monkeypatch.setattr(evaluation, "BLOCKS", 1)
    assert not broken(replays.replay_evaluation(spec, 5.0, 10)), "the grid shrinks the vector"
    monkeypatch.setattr(GridGaussian, "to_grid", lambda self, vectors: np.trunc(np.nan_to_num(vectors) / self.grid))
    found = replays.replay_evaluation(spec, 5.0, 10)
    assert "with: right" in broken(found)


def test_the_scores_are_one_row_a_release():
    results = [
        replays.ReplayResult("mixture", "with: NaN", np.asarray([0.0, 0.5])),
        replays.ReplayResult("dp_sgd", "without: last unit", np.asarray([np.inf])),
    ]
    assert replays.scores(results).to_pydict() == {
        "mechanism": ["mixture", "mixture", "dp_sgd"],
        "neighbour": ["with: NaN", "with: NaN", "without: last unit"],
        "release": [0, 1, 0],
        "ratio": [0.0, 0.5, np.inf],
    }
    assert replays.scores([]).num_rows == 0
    assert replays.worst(results) is results[1]
