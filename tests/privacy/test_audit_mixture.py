"""The audit of the mixture: its fast runs are the shipped learner's, it catches broken mechanisms, and it knows D."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.stats import kstest, norm

from dpmixmin.audit import attacks, bounds, canaries, trajectories
from dpmixmin.audit.canaries import MAX_CLIP, Learner, choose
from dpmixmin.audit.mixture import MixtureAudit, _discriminant, audit_mixture
from dpmixmin.audit.others import Others
from dpmixmin.audit.tradeoff import Tradeoff
from dpmixmin.audit.trajectories import WITHOUT, TwinDiffers, simulate
from dpmixmin.mixing import learners, objective
from dpmixmin.mixing.objective import SourceTable, UnitGradients
from dpmixmin.privacy.accounting import Composition
from dpmixmin.privacy.mechanisms import GridGaussian, ResponsibilityGaussian
from dpmixmin.privacy.noise import InsecureNoise
from dpmixmin.privacy.subsample import SECRET_BYTES, names

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
"""A numpy warning goes to a public log and tells that some record has a wild value (rule 20): here it is a failure."""

K = 5
LEARNERS = ("centred", "algorithm1", "responsibilities")


def spec_of(learner, *, rate=1.0, steps=6, sigma=2.0, nominal=60.0, clip=1.5, unit="record"):
    if learner == "responsibilities":
        return ResponsibilityGaussian(1.0, sigma, steps, rate, nominal, 1.0, 1e-5, unit)
    return GridGaussian(clip, sigma, steps, rate, nominal, 1.0, 1e-5, unit)


def records(units):
    """Names of records 0, 1, … of each unit."""
    return names(f"{unit} {number}" for number, unit in enumerate(units))


def labels(rng, n=60):
    """One record a unit; among them one that is not finite, one that nothing predicts, and one that all predict."""
    p = rng.uniform(0.02, 1, (n, K)) ** 3
    p[3], p[4], p[5] = np.nan, 0.0, 0.5
    p[6] = np.eye(K)[2]
    return SourceTable.of_labels(p, names=records(range(n)))


def users(rng, n=20):
    """Units of 0 to 12 records, in any order; one has a record that is not finite."""
    unit = rng.permutation(np.repeat(np.arange(n), rng.integers(1, 13, n)))
    p = rng.uniform(0.02, 1, (len(unit), K)) ** 3
    p[7] = np.nan
    return SourceTable.of_labels(p, (n + 1, unit), records(unit))


def texts(rng, objective_name, n=20):
    unit = np.sort(rng.integers(0, n, 3 * n))
    length = rng.integers(0, 9, len(unit))
    record = np.repeat(np.arange(len(unit)), length)
    logp = rng.normal(-4, 2, (len(record), K))
    if objective_name == "token":
        return SourceTable.of_tokens(logp, record, length, (n, unit), records(unit))
    totals = np.zeros((len(unit), K))
    np.add.at(totals, record, logp)
    return SourceTable.of_sequences(totals, length, (n, unit), records(unit))


TABLES = {
    "labels": labels,
    "users": users,
    "sequence": lambda rng: texts(rng, "sequence"),
    "token": lambda rng: texts(rng, "token"),
}


@dataclass
class Together:
    """Runs made together, and what :func:`trajectories._compare` was given of them."""

    runs: trajectories.Runs
    compared: list


def run_all(monkeypatch, table, mechanism, runs=3, seed=5, **options) -> Together:
    """Simulate all canaries of a table; the comparison with the shipped learner is recorded instead of made."""
    compared = []
    monkeypatch.setattr(trajectories, "_compare", lambda *args: compared.append(args))
    dataset, units = choose(mechanism, table, 0, InsecureNoise(1))
    found = simulate(mechanism, mechanism.prepare(dataset), units, runs, InsecureNoise(seed), **options)
    monkeypatch.undo()
    return Together(found, compared)


# -- the fast runs are those of the shipped learner -----------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("rate", [1.0, 0.4])
@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("kind", list(TABLES))
def test_the_first_run_of_every_world_is_the_shipped_learners(kind, learner, rate, limit, rng, monkeypatch):
    """The audit's own check passes; and left alone with the same randomness, the shipped learner ends within 1e-5.

    The twin does not round the others' contributions to the grid, which makes up to C / 2**20 a step and unit.
    """
    mechanism = Learner(learner, spec_of(learner, rate=rate, unit="user"), 0.7, limit)
    table = TABLES[kind](rng)
    together = run_all(monkeypatch, table, mechanism)
    assert list(together.runs.weights) == [WITHOUT, "natural", "worst_natural", MAX_CLIP]
    for _, others, canary, found, tape, world in together.compared:
        units = others if canary is None else canaries.joined(others, canary.gradients)
        average = learner != "algorithm1"
        learned = learners.learn_private(units, mechanism.spec, 0.7, tape, average=average, records_per_step=limit)
        assert np.abs(learned.weights - found).max() < 1e-5, world
    dataset, units = choose(mechanism, table, 0, InsecureNoise(1))
    again = simulate(mechanism, mechanism.prepare(dataset), units, 3, InsecureNoise(5))
    assert np.array_equal(again.weights["natural"], together.runs.weights["natural"])
    silent = simulate(mechanism, mechanism.prepare(dataset), units, 3, InsecureNoise(5), silent=True)
    assert np.isfinite(list(silent.ratios.values())).all()


def test_the_twin_agrees_at_the_size_of_a_study(rng, monkeypatch):
    """100 steps, 2,000 records, a step size at which rounding errors could add up."""
    mechanism = Learner("centred", spec_of("centred", steps=100, nominal=2000, sigma=20, clip=8.0), 2.0)
    together = run_all(monkeypatch, SourceTable.of_labels(rng.uniform(0.02, 1, (2000, 14))), mechanism, runs=1)
    _, others, canary, found, tape, _ = together.compared[1]
    units = canaries.joined(others, canary.gradients)
    learned = learners.learn("centred", units.table, mechanism.spec, 2.0, tape)
    assert np.abs(learned.weights - found).max() < 1e-6


def test_threads_change_nothing(rng, monkeypatch):
    mechanism = Learner("centred", spec_of("centred"), 0.7)
    table = users(rng)
    one, two = (run_all(monkeypatch, table, mechanism, runs=200, workers=w).runs for w in (1, 3))
    for key, values in one.ratios.items():
        assert np.array_equal(values, two.ratios[key])
    for key, values in one.weights.items():
        assert np.array_equal(values, two.weights[key])


def _sum_of_a_unit_more(self, *args):
    return _SUMS(self, *args) + np.eye(K)[0]


def _clip_of_twice_the_norm(self, weights, clip, present=None):
    return _CLIPPED(self, weights, 2 * clip if self.count > 10 else clip, present)


def _half_a_step(self, released):
    return _NEXT(self, released / 2)


def _the_last_iterate(self, runs):
    return [self.weights.T[start : start + runs] for start in range(0, self.weights.shape[1], runs)]


_SUMS, _CLIPPED, _NEXT = Others.__call__, UnitGradients.clipped, trajectories._Descent._next


@pytest.mark.parametrize(
    ("owner", "attribute", "broken", "what"),
    [
        (Others, "__call__", _sum_of_a_unit_more, "sums"),
        (UnitGradients, "clipped", _clip_of_twice_the_norm, "sums"),
        (trajectories._Descent, "_next", _half_a_step, "sums"),
        (trajectories._Descent, "released", _the_last_iterate, "weights"),
    ],
)
def test_a_difference_from_the_shipped_learner_stops_the_audit(owner, attribute, broken, what, rng, monkeypatch):
    monkeypatch.setattr(owner, attribute, broken)
    with pytest.raises(TwinDiffers, match=f"world without: the {what} are not"):
        audit_mixture(labels(rng), spec_of("centred"), "centred", 0.7, runs=4, seed=0, noise=InsecureNoise(0))


@pytest.mark.parametrize("kind", list(TABLES))
def test_one_weight_vector_a_unit_gives_the_bits_of_one_vector_for_all(kind, rng):
    table = TABLES[kind](rng)
    for gradients in (UnitGradients.of(table, centred=True), UnitGradients.of(table, centred=False)):
        each = rng.dirichlet(np.ones(K), table.count)
        secret = bytes(SECRET_BYTES)
        for present in (None, table.subset(secret, 1)):
            for vectors in (lambda w, p: gradients.clipped(w, 1.0, p), gradients.responsibilities):  # noqa: B023
                expected = [vectors(weights, present)[unit] for unit, weights in enumerate(each)]
                assert np.array_equal(vectors(np.ascontiguousarray(each.T), present), expected, equal_nan=True)


# -- the canaries and D ---------------------------------------------------------------------------------------


def test_neither_canary_is_in_the_dataset_and_the_others_stay_as_they_are(rng):
    table = users(rng)
    mechanism = Learner("centred", spec_of("centred"), 0.7)
    dataset, units = choose(mechanism, table, 3, InsecureNoise(0))
    assert [unit.name for unit in units] == ["natural", "worst_natural", MAX_CLIP]
    assert dataset.count == table.count - 2
    left = set(dataset.names.tolist())
    own = [set(unit.table.names.tolist()) for unit in units]
    assert not left & (own[0] | own[1])
    assert left | own[0] | own[1] == set(table.names.tolist())
    weights = rng.dirichlet(np.ones(K))
    whole, *parts = (
        np.nan_to_num(mechanism.prepare(each).clipped(weights, 1.5))
        for each in (table, dataset, units[0].table, units[1].table)
    )
    assert sorted(np.concatenate(parts).tolist()) == sorted(whole.tolist())
    assert choose(mechanism, table, 3, InsecureNoise(9))[1][0].table.names.tolist() == units[0].table.names.tolist()


def test_the_worst_unit_has_the_largest_vectors(rng):
    p = np.full((30, K), 0.5) + rng.uniform(0, 0.01, (30, K))
    p[17] = [1.0, 0.001, 0.001, 0.001, 0.001]
    units = choose(
        Learner("centred", spec_of("centred", clip=9.0), 0.7), SourceTable.of_labels(p), 0, InsecureNoise(0)
    )[1]
    assert np.array_equal(units[1].table.p[:, 0], p[17])


@pytest.mark.parametrize("unit", ["record", "user"])
@pytest.mark.parametrize("learner", LEARNERS)
def test_the_strongest_canary_moves_a_step_by_one_sensitivity_whatever_the_weights(learner, unit, rng):
    """Of several records too: the norm is within a few grid points of C (or 1), and never above."""
    mechanism = Learner(learner, spec_of(learner, unit=unit), 0.7, 1)
    canary = choose(mechanism, labels(rng), 0, InsecureNoise(0))[1][2]
    assert len(canary.table.unit) == (1 if unit == "record" else 2)
    for secret in (bytes(SECRET_BYTES), bytes(range(SECRET_BYTES))):
        vectors = canary.vectors(mechanism, rng.dirichlet(np.ones(K), 7).T, secret)
        norms = np.linalg.norm(vectors / 2**20, axis=1)
        assert norms.max() <= 1
        assert norms.min() > 1 - 1e-5
        assert (vectors == vectors[0]).all()


def test_large_units_and_tables_are_cut_by_public_constants(rng, monkeypatch):
    monkeypatch.setattr(canaries, "ROWS", 40)
    monkeypatch.setattr(canaries, "UNIT_ROWS", 3)
    table = users(rng)
    mechanism = Learner("centred", spec_of("centred"), 0.7)
    dataset, units = choose(mechanism, table, 0, InsecureNoise(0))
    assert 25 < len(dataset.owner) <= 40
    assert [len(unit.table.owner) <= 3 for unit in units] == [True] * 3
    first = {unit: table.names[table.unit == unit][:3].tolist() for unit in range(table.count)}
    assert units[0].table.names.tolist() in first.values()


@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_tables_of_no_and_few_units_are_audited(count, rate, learner, rng):
    table = SourceTable.of_labels(rng.uniform(0.1, 1, (count, K)))
    audit = audit_mixture(table, spec_of(learner, rate=rate), learner, 0.7, runs=6, seed=0, noise=InsecureNoise(0))
    assert audit.canaries == ((MAX_CLIP,) if count < 2 else ("natural", "worst_natural", MAX_CLIP))
    for name in ("likelihood_ratio", "discriminant", "loss"):
        assert np.isfinite(audit.scores[name].to_numpy()).all()


def test_a_kept_table_is_the_table_of_the_kept_units(rng):
    for kind, make in TABLES.items():
        table = make(rng)
        mask = rng.random(table.count) < 0.5
        kept, weights = table.keep(mask), rng.dirichlet(np.ones(K))
        for present in (None, bytes(SECRET_BYTES)):
            subsets = [None if present is None else each.subset(present, 1) for each in (table, kept)]
            vectors = [
                UnitGradients.of(each, centred=True).clipped(weights, 1.0, subset)
                for each, subset in zip((table, kept), subsets, strict=True)
            ]
            assert np.array_equal(vectors[0][mask], vectors[1], equal_nan=True), kind


# -- what is seen -------------------------------------------------------------------------------------------


def audit_of(table, spec, learner="centred", runs=2000, seed=0, **options) -> MixtureAudit:
    return audit_mixture(table, spec, learner, 0.7, runs=runs, seed=seed, noise=InsecureNoise(seed), **options)


@pytest.mark.parametrize("learner", LEARNERS)
def test_the_strongest_canary_is_exactly_a_gaussian_with_mu_of_the_claim(learner, rng):
    """Full batch: log-likelihood ratios are N(-mu^2/2, mu^2) and N(mu^2/2, mu^2), mu = sqrt(T) / sigma.

    False-alarm rate 2e-6 a learner (two Kolmogorov-Smirnov tests); 2,000 runs notice a mu that is off by 10 %.
    """
    spec = spec_of(learner, steps=9, sigma=2.0)
    worlds = audit_of(labels(rng), spec, learner).worlds[MAX_CLIP, True]["likelihood_ratio"]
    mu = math.sqrt(9) / 2.0
    for values, sign in zip(worlds, (-1, 1), strict=True):
        assert kstest(values, norm(sign * mu**2 / 2, mu).cdf).pvalue > 1e-6
        assert kstest(values, norm(sign * (1.1 * mu) ** 2 / 2, 1.1 * mu).cdf).pvalue < 1e-6


def test_a_sampled_canary_is_exactly_a_sampled_gaussian(rng):
    """Poisson sampling, against direct draws of the one-dimensional mechanism; false-alarm rate 2e-6."""
    spec, runs = spec_of("centred", steps=5, sigma=1.0, rate=0.3), 3000
    worlds = audit_of(labels(rng), spec, runs=runs).worlds[MAX_CLIP, True]["likelihood_ratio"]
    for values, entered in zip(worlds, (0.0, 0.3), strict=True):
        x = rng.normal(size=(runs, 5)) + (rng.random((runs, 5)) < entered)
        direct = np.log(0.7 + 0.3 * np.exp(x - 0.5)).sum(axis=1)
        assert kstest(values, direct).pvalue > 1e-6


class HalfTheNoise(GridGaussian):
    """Claims twice the noise that it adds."""

    def add_noise(self, total, noise):
        return total + noise.rounded_gaussian(self.noise_multiplier * 2**self.grid_bits / 2, total.shape[0])


class NoLimit(GridGaussian):
    """Rounds vectors of any length."""

    def to_grid(self, vectors):
        return np.trunc(np.nan_to_num(vectors) / self.grid).astype(np.int64)


class EveryoneIn(GridGaussian):
    """Claims a sampling rate, and takes everyone."""

    def sample(self, count, noise):
        return np.ones(count, dtype=bool)


def exceeds(audit: MixtureAudit, spec, canary=MAX_CLIP) -> bool:
    """Whether the claimed trade-off is refuted at a false-alarm rate of 0.1 %."""
    attack = attacks.choose(audit.select(canary, True), spec.delta, "gaussian" if spec.sampling_rate == 1 else "dp")
    errors = attacks.count(attack, audit.evaluate(canary, True))
    return bounds.rejects(errors, Tradeoff.of(Composition(spec.events())), 0.999)


@pytest.mark.parametrize(
    ("made", "claim", "rate"),
    [(GridGaussian, 3.0, 1.0), (HalfTheNoise, 3.0, 1.0), (GridGaussian, 1.0, 0.2), (EveryoneIn, 1.0, 0.2)],
)
def test_too_little_noise_and_forgotten_sampling_exceed_the_claim_and_the_real_thing_does_not(made, claim, rate, rng):
    """False-alarm rate of the two real mechanisms 0.1 % each over seeds; this seed passes or fails for ever."""
    spec = made.for_target(epsilon=claim, delta=1e-5, clip=1.5, steps=5, sampling_rate=rate, nominal_units=60)
    assert exceeds(audit_of(labels(rng), spec), spec) == (made is not GridGaussian)


def test_a_forgotten_clip_exceeds_the_claim(rng, monkeypatch):
    """Forgotten twice, that is: the grid's own norm check makes up for a learner that does not clip.

    D's records are below the clip, so that the sums of the others stay the same and only the canary shows it.
    """
    table = SourceTable.of_labels(rng.uniform(0.5, 0.52, (40, K)))
    target = {"epsilon": 2.0, "delta": 1e-5, "clip": 1.5, "steps": 5, "sampling_rate": 1.0, "nominal_units": 60}
    clipped = UnitGradients.clipped
    monkeypatch.setattr(UnitGradients, "clipped", lambda self, w, clip, p=None: clipped(self, w, math.inf, p))
    spec = GridGaussian.for_target(**target)
    assert not exceeds(audit_of(table, spec), spec)
    spec = NoLimit.for_target(**target)
    assert exceeds(audit_of(table, spec), spec)


def test_without_noise_the_strongest_canary_leaks_and_one_that_contributes_nothing_does_not(rng):
    """Full batch: always. With coins: unless they keep the canary out of every step."""
    table = labels(rng)
    without, with_ = audit_of(table, spec_of("centred"), runs=10).worlds[MAX_CLIP, False]["likelihood_ratio"]
    assert len(without) == len(with_) == 10
    assert without.max() == 0 < with_.min()
    spec = spec_of("centred", rate=0.4, steps=4)
    without, with_ = audit_of(table, spec, runs=2000).worlds[MAX_CLIP, False]["likelihood_ratio"]
    assert without.max() == 0
    assert (with_ == 0).mean() == pytest.approx(0.6**4, abs=5 * math.sqrt(0.6**4 / 2000))  # false alarm 1e-6

    blank = SourceTable.of_labels(np.concatenate([table.p.T[10:50], np.full((1, K), np.nan)]))
    mechanism = Learner("centred", spec_of("centred"), 0.7)
    nothing = canaries.Canary("nothing", mechanism.prepare(blank.keep(np.arange(41) == 40)))
    others = mechanism.prepare(blank.keep(np.arange(41) < 40))
    control = simulate(mechanism, others, [nothing], 300, InsecureNoise(0), silent=True)
    assert (np.concatenate(list(control.weights.values())) == control.weights[WITHOUT][0]).all()


def test_black_box_statistics_see_a_weak_mechanism(rng):
    """Half of the released weights' dimensions carry the canary: both statistics tell worlds apart at little noise."""
    audit = audit_of(labels(rng), spec_of("centred", sigma=0.5, nominal=20.0), runs=400)
    for statistic in ("discriminant", "loss"):
        without, with_ = audit.worlds[MAX_CLIP, True][statistic]
        assert abs((with_[:, None] > without).mean() - 0.5) > 0.4


def test_what_chooses_and_what_counts_are_apart(rng):
    audit = audit_of(labels(rng), spec_of("centred"), runs=11)
    table = audit.scores
    assert table.column_names == [
        "canary", "noise", "world", "half", "run", "likelihood_ratio", "discriminant", "loss",
    ]  # fmt: skip
    assert table.num_rows == 3 * 2 * 2 * 11
    for half, part in (("select", audit.select(MAX_CLIP, True)), ("eval", audit.evaluate(MAX_CLIP, True))):
        rows = table.to_pylist()
        for index, world in enumerate(("without", "with")):
            wanted = {"canary": MAX_CLIP, "noise": True, "world": world, "half": half}
            for statistic in part:
                found = [row[statistic] for row in rows if wanted.items() <= row.items()]
                assert found == part[statistic][index].tolist()
    assert len(audit.select(MAX_CLIP, True)["loss"][0]) == 5
    without, with_ = rng.dirichlet(np.ones(K), 40), rng.dirichlet(np.ones(K), 40)
    first = _discriminant(without, with_)
    without[20:] = rng.dirichlet(np.ones(K), 20)
    again = _discriminant(without, with_)
    assert np.array_equal(first[0][:20], again[0][:20])
    assert np.array_equal(first[1], again[1])


def test_the_shared_coins_and_secrets_are_those_of_the_others(rng, monkeypatch):
    """One batch of D serves all runs and worlds; the canary's coins differ from run to run."""
    drawn = []
    sample = GridGaussian.sample
    monkeypatch.setattr(
        GridGaussian, "sample", lambda self, n, noise: drawn.append(sample(self, n, noise)) or drawn[-1]
    )
    mechanism = Learner("centred", spec_of("centred", rate=0.5, steps=3), 0.7)
    dataset, units = choose(mechanism, labels(rng), 0, InsecureNoise(0))
    drawn.clear()
    monkeypatch.setattr(trajectories, "_compare", lambda *args: None)
    simulate(mechanism, mechanism.prepare(dataset), units, 64, InsecureNoise(2))
    assert [len(coins) for coins in drawn] == [58, 64, 64, 64] * 3
    assert all(10 < coins.sum() < 54 for coins in drawn)


def test_the_loss_of_a_canary_is_the_objectives_up_to_a_constant(rng):
    for kind, make in TABLES.items():
        table = make(rng)
        unit = table.keep(np.arange(table.count) == 1)
        canary = canaries.Canary("one", UnitGradients.of(unit, centred=True))
        weights = rng.dirichlet(np.ones(K), 4)
        expected = np.array([objective.mean_loss(unit, each) for each in weights])
        found = canary.losses(weights)
        np.testing.assert_allclose(found - found[0], expected - expected[0], atol=1e-10, err_msg=kind)


def test_a_unit_that_does_not_fit_is_passed_over_and_not_the_end():
    """A first unit of many rows once left D empty."""
    assert canaries.fitting_rows(np.array([9, 2, 3, 4, 1]), 6).tolist() == [False, True, True, False, True]
    assert not canaries.fitting_rows(np.array([], dtype=int), 6).size
