"""The audit of fine-tuning: canaries in one run of the shipped training (rules 3 and 13).

All randomness is seeded, so a test gives one verdict for ever; the stated rates are what a new seed would risk.
"""

import math
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from scipy.stats import binom, ks_2samp, kstest
from torch.nn.functional import binary_cross_entropy_with_logits

from dpmixmin.audit import one_run
from dpmixmin.audit.silent import Silent
from dpmixmin.audit.tradeoff import Tradeoff
from dpmixmin.audit.training import CanarySum, Plan, audit_training, flipped, log_likelihood_ratios
from dpmixmin.data.records import Records
from dpmixmin.data.text_records import TextRecords
from dpmixmin.finetune.dp_sgd import ClippedSum, fine_tune
from dpmixmin.finetune.labels import label_sums, starting_model
from dpmixmin.finetune.texts import text_sums
from dpmixmin.models import language, networks
from dpmixmin.privacy.accounting import Composition
from dpmixmin.privacy.mechanisms import ModelGaussian
from dpmixmin.privacy.noise import InsecureNoise
from dpmixmin.privacy.subsample import SECRET_BYTES, names
from dpmixmin.sections import Inputs, Network
from dpmixmin.text_sections import LanguageModel, Trainable

WIDTH, HIDDEN, CLIP = 6, 120, 0.5
FALSE_ALARM = 1e-4
"""Of each test of a law."""


def mlp(width: int = WIDTH) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return networks.mlp(width, HIDDEN, 1)


def spec_of(sigma: float, steps: int = 10, rate: float = 1.0, unit: str = "record") -> ModelGaussian:
    return ModelGaussian(CLIP, sigma, steps, rate, 50.0, 1.0, 1e-5, unit)


class Data:
    """Units of 1, 2, 3, 1, 2, 3, ... records; with ``windows``, every other record is two rows of unequal weight.

    Features and labels are noise, which can only be memorised.
    """

    def __init__(self, units: int = 60, *, single: bool = False, windows: bool = False, width: int = WIDTH):
        rng = np.random.default_rng(5)
        sizes = np.ones(units, dtype=int) if single else np.arange(units) % 3 + 1
        owner = np.repeat(np.arange(units), sizes)
        rows = np.arange(len(owner)) % 2 + 1 if windows else np.ones(len(owner), dtype=int)
        self.units, self.record = units, np.repeat(np.arange(len(owner)), rows)
        self.unit, self.names = owner[self.record], names(f"record {i}" for i in range(len(owner)))
        self.weight = np.ones(len(self.record))
        self.weight[np.flatnonzero(rows[self.record] == 2).reshape(-1, 2)] = [0.25, 0.75]
        self.x = rng.normal(size=(len(self.record), width)).astype(np.float32)
        self.y = rng.integers(0, 2, size=len(self.record)).astype(np.float32)
        self.windows = windows

    def build(self, make=ClippedSum, *, limit: int | None = None, physical: int = 512, keep=None) -> ClippedSum:
        rows = np.ones(len(self.unit), dtype=bool) if keep is None else np.isin(self.unit, keep)
        _, unit = np.unique(self.unit[rows], return_inverse=True)
        options = {"row_record": self.record[rows], "row_weight": self.weight[rows]} if self.windows else {}
        if not self.windows and keep is not None:
            options["row_record"] = self.record[rows]
        return make(
            mlp(self.x.shape[1]), self.x[rows], self.y[rows], unit, int(unit.max(initial=-1)) + 1, physical,
            names=self.names, records_per_step=limit, **options,
        )  # fmt: skip


SHAPES = {
    "records": (Data(single=True), {}),
    "users": (Data(), {}),
    "users, some records": (Data(), {"limit": 1}),
    "windows": (Data(windows=True), {"limit": 2, "physical": 7}),
}


def audit(data: Data, spec: ModelGaussian, seed: int = 0, canaries: int = 800, records: int = 0, **options):
    build = partial(data.build, **{key: options.pop(key) for key in ("limit", "physical") if key in options})
    noise = InsecureNoise(seed, "audit")
    return audit_training(build, spec, 0.05, noise, canaries=canaries, records=records, seed=seed, **options)


def planted(data: Data, plan: Plan, **options) -> CanarySum:
    return data.build(partial(CanarySum, plan=plan), **options)


def refutation(found, spec: ModelGaussian) -> float:
    """p-value of the claim: one run, whatever the noise's dependence."""
    claim = Tradeoff.of(Composition(spec.events()))
    return one_run.evaluate(*found.arrays("gradient")).p_value(claim)


def refutation_by_worlds(found, spec: ModelGaussian) -> float:
    """p-value of the claim: errors of the best test, which are independent. For full batches."""
    right = total = 0
    for half in (found.select(), found.evaluate()):
        without, with_canary = half["likelihood_ratio"]
        right += int((without < 0).sum() + (with_canary > 0).sum())
        total += len(without) + len(with_canary)
    return float(binom.sf(right - 1, total, ndtr(Composition(spec.events()).mu / 2)))


# -- the law of the scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_full_batch_scores_are_independent_gaussians_of_the_accounted_mu(shape):
    """800 scores against N(+-mu²/2, mu²) with mu = sqrt(T)/sigma, by Kolmogorov and Smirnov."""
    data, options = SHAPES[shape]
    spec = spec_of(sigma=3.0, unit="record" if shape == "records" else "user")
    scores, included = audit(data, spec, **options).arrays("gradient")
    mu = Composition(spec.events()).mu
    assert mu == pytest.approx(math.sqrt(10) / 3)
    assert len(scores) == 800
    assert kstest((scores[included] - mu**2 / 2) / mu, "norm").pvalue > FALSE_ALARM
    assert kstest((scores[~included] + mu**2 / 2) / mu, "norm").pvalue > FALSE_ALARM
    # Neighbours in the order of coordinates are uncorrelated: |r| < 4 / sqrt(n), false alarm 1e-4.
    centred = scores + np.where(included, -1, 1) * mu**2 / 2
    assert abs(np.corrcoef(centred[1:], centred[:-1])[0, 1]) < 4 / math.sqrt(800)


def test_sampled_scores_follow_the_sampled_gaussian(rng):
    """Against 20000 simulated canaries in each world."""
    spec = spec_of(sigma=0.8, rate=0.3)
    scores, included = audit(SHAPES["records"][0], spec).arrays("gradient")
    s, q = spec.noise_std, spec.sampling_rate
    for world in (True, False):
        entered = (rng.random((10, 20000)) < q) & world
        x = rng.normal(0, s, entered.shape) + CLIP * entered
        density = [np.exp(-((x - centre) ** 2) / (2 * s**2)) for centre in (0, CLIP)]
        expected = np.log((1 - q) + q * density[1] / density[0]).sum(axis=0)
        assert ks_2samp(scores[included == world], expected).pvalue > FALSE_ALARM


def test_the_log_likelihood_ratio_survives_extremes():
    spec = spec_of(sigma=1e-3, steps=2, rate=0.5)
    found = log_likelihood_ratios(np.array([[CLIP, 0.0], [CLIP, 0.0]]), spec)
    assert found[0] == pytest.approx(2 * (math.log(0.5) + 0.5e6))
    assert found[1] == pytest.approx(2 * math.log(0.5))


# -- what is found, and what is not -----------------------------------------------------------------------------


def broken_noise(monkeypatch, factor):
    def release_sum(self, total, noise, *, shares=1):
        return total + factor * noise.gaussian(self.noise_std, total.shape[0])

    monkeypatch.setattr(ModelGaussian, "release_sum", release_sum)


def broken_clip(monkeypatch):
    original = ClippedSum.__call__
    monkeypatch.setattr(
        ClippedSum, "__call__", lambda self, batch, clip, secret=None: original(self, batch, 1e6, secret)
    )


def broken_coins(monkeypatch):
    monkeypatch.setattr(ModelGaussian, "sample", lambda self, count, noise: np.ones(count, dtype=bool))


def broken_unit(monkeypatch):
    """Every record is clipped and counted by itself."""

    def unit_means(self, rows, weights):
        return self._per_record(rows)

    monkeypatch.setattr(ClippedSum, "_unit_means", unit_means)


def broken_release(monkeypatch):
    """The loop adds noise, and then uses the sum without it."""
    original = CanarySum.__call__
    kept = {}

    def call(self, batch, clip, secret=None):
        kept["total"] = original(self, batch, clip, secret)
        return kept["total"].clone()

    def release_sum(self, total, noise, *, shares=1):
        noise.gaussian(self.noise_std, total.shape[0])
        return kept["total"].numpy()

    monkeypatch.setattr(CanarySum, "__call__", call)
    monkeypatch.setattr(ModelGaussian, "release_sum", release_sum)


BROKEN = {
    "half the noise": (lambda patch: broken_noise(patch, 0.5), 3.0),
    "records counted as units": (broken_unit, 3.0),
    "no noise": (lambda patch: broken_noise(patch, 0.0), 12.0),
    "no clip": (broken_clip, 12.0),
    "noise not used": (broken_release, 12.0),
}
"""What is broken, and a noise multiplier whose claim is far from it."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sigma", [3.0, 12.0])
def test_an_honest_run_is_not_refuted(shape, sigma):
    """False alarm at most 1e-3 for each of the two tests."""
    data, options = SHAPES[shape]
    spec = spec_of(sigma, unit="user")
    found = audit(data, spec, seed=1, **options)
    assert refutation(found, spec) > 1e-3
    assert refutation_by_worlds(found, spec) > 1e-3


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_run_is_refuted(what, monkeypatch):
    """Twice the accounted mu needs independent scores; what leaks all is caught without that assumption too."""
    breaks, sigma = BROKEN[what]
    spec = spec_of(sigma, unit="user")
    breaks(monkeypatch)
    found = audit(SHAPES["users"][0], spec, seed=1)
    assert refutation_by_worlds(found, spec) < 1e-6
    if sigma > 3:
        assert refutation(found, spec) < 1e-6


def test_sampling_that_takes_everyone_is_refuted(monkeypatch):
    spec = spec_of(sigma=1.5, rate=0.2)
    data = SHAPES["records"][0]
    assert refutation(audit(data, spec, seed=1), spec) > 1e-3
    broken_coins(monkeypatch)
    assert refutation(audit(data, spec, seed=1), spec) < 1e-6


def test_without_noise_every_canary_is_known():
    for spec, least in ((spec_of(sigma=30.0), 1.0), (spec_of(sigma=30.0, rate=0.5), 0.99)):
        control = audit(SHAPES["records"][0], spec, canaries=200).control
        scores, included = control.arrays("gradient")
        threshold = scores[~included].max() + 1e-9
        assert (scores[~included] <= threshold).all()
        assert (scores[included] > threshold).mean() >= least  # 10 coins of 1/2 all show "out": 0.1 %
        assert control.noise is False
        assert control.control is None


def test_the_silent_source_draws_the_coins_of_the_other():
    silent, other = Silent(InsecureNoise(4)), InsecureNoise(4)
    assert (silent.coins(0.3, 1000) == other.coins(0.3, 1000)).all()
    assert not silent.gaussian(3.0, 5).any()
    assert not silent.private


# -- the shipped sums with other rows ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_without_canaries_it_is_the_shipped_training_bit_for_bit(shape):
    data, options = SHAPES[shape]
    weights = []
    for make in (ClippedSum, partial(CanarySum, plan=Plan(0, 0, 1, 0))):
        sums = data.build(make, **options)
        fine_tune(sums, spec_of(sigma=1.0, steps=3, rate=0.6), 0.1, InsecureNoise(9))
        weights.append(networks.state_bytes(sums.model))
    assert weights[0] == weights[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_canary_adds_the_clip_at_its_coordinate_and_an_absent_one_nothing(shape):
    data, options = SHAPES[shape]
    sums = planted(data, Plan(40, 0, 2, 3), **options)
    secret = bytes(SECRET_BYTES)
    shipped = data.build(**options)
    whole = shipped(np.ones(shipped.units, dtype=bool), CLIP, secret).numpy()
    found = sums(np.ones(sums.units, dtype=bool), CLIP, secret).numpy()
    expected = whole.copy()
    expected[sums.coordinates[sums.gradient_included]] += CLIP
    assert 5 < sums.gradient_included.sum() < 35
    assert sums.units == shipped.units + sums.gradient_included.sum()
    np.testing.assert_allclose(found, expected, atol=2e-5 * CLIP)
    np.testing.assert_allclose(sums.without[0], whole[sums.coordinates], atol=1e-12)


def test_the_records_of_a_canary_are_subsampled_like_any(rng):
    """One of three a step, each as often: no frequency of 300 is 4.5 standard deviations off (false alarm 4e-4)."""
    sums = planted(Data(windows=True), Plan(30, 0, 3, 3), limit=1)
    everyone, counts = np.ones(sums.units, dtype=bool), np.zeros(len(sums._row_coordinate))
    for _ in range(300):
        rows, weights = sums._present(everyone, rng.bytes(SECRET_BYTES))
        own = rows >= sums._real_rows
        assert (weights[own] == 1).all()
        counts[rows[own] - sums._real_rows] += 1
    counts = counts.reshape(-1, 3)
    assert (counts.sum(axis=1) == 300).all()
    assert (abs(counts - 100) < 4.5 * math.sqrt(300 * 2 / 9)).all()


def test_worlds_are_disjoint_halves_of_the_gradient_canaries():
    found = audit(SHAPES["records"][0], spec_of(sigma=1.0, steps=1), canaries=101)
    scores, included = found.arrays("gradient")
    halves = [half()["likelihood_ratio"] for half in (found.select, found.evaluate)]
    assert [len(without) + len(with_canary) for without, with_canary in halves] == [51, 50]
    for world in (False, True):
        together = np.concatenate([half[int(world)] for half in halves])
        np.testing.assert_array_equal(np.sort(together), np.sort(scores[included == world]))


def test_an_absent_record_canary_leaves_no_trace():
    """The sums are, bit for bit, those of the table without its rows."""
    for data, options in SHAPES.values():
        plan = Plan(0, 10, 1, 3)
        drawn, included = plan.draw(data.units, 10, 1)
        sums = planted(data, plan, **options)
        rest = np.setdiff1d(np.arange(data.units), drawn[~included])
        shipped = data.build(keep=rest, **options)
        assert sums.units == shipped.units == data.units - (~included).sum()
        assert (included == sums.record_included).all()
        batch = np.arange(sums.units) % 4 > 0
        secret = bytes(SECRET_BYTES)
        assert torch.equal(sums(batch, CLIP, secret), shipped(batch, CLIP, secret))


def test_the_draws_are_public_distinct_and_fair():
    plan = Plan(0, 0, 1, 8)
    drawn, included = plan.draw(100_000, 50_000, 0)
    assert (np.diff(drawn) > 0).all()
    assert drawn[0] >= 0
    assert drawn[-1] < 100_000
    assert abs(included.mean() - 0.5) < 4 / (2 * math.sqrt(50_000))  # false alarm 1e-4
    again = replace(plan).draw(100_000, 50_000, 0)
    assert all((one == other).all() for one, other in zip((drawn, included), again, strict=True))
    assert (plan.draw(100_000, 50_000, 1)[0] != drawn).any()
    assert (replace(plan, seed=9).draw(100_000, 50_000, 0)[0] != drawn).any()


def test_there_are_no_more_canaries_than_there_is_room_for():
    data = Data(10, single=True)
    sums = planted(data, Plan(10**6, 10**6, 1, 0))
    assert len(sums.coordinates) == sums.size
    assert len(sums.record_included) == 2
    tiny = audit(Data(3, single=True), spec_of(sigma=1.0, steps=1), canaries=4, records=5)
    assert tiny.kinds == ["gradient"]


def test_an_empty_part_can_be_audited():
    data = Data(0, single=True)
    spec = spec_of(sigma=1.0)
    scores, included = audit(data, spec, canaries=100, records=5).arrays("gradient")
    assert scores[included].mean() > scores[~included].mean()


def test_memory_does_not_grow_with_steps_times_parameters():
    sums = planted(SHAPES["records"][0], Plan(20, 0, 1, 0))
    update = torch.ones(sums.size, dtype=torch.float64)
    gone = weakref.ref(update)
    sums.add(update)
    del update
    assert gone() is None
    total = sums(np.ones(sums.units, dtype=bool), CLIP)
    gone = weakref.ref(total)
    del total
    assert gone() is None
    assert all(kept[0].base is None or kept[0].base.nbytes == 160 for kept in (sums.without, sums.updates))


# -- record canaries --------------------------------------------------------------------------------------------


def test_record_canaries_score_the_drop_of_their_own_altered_loss():
    """Against a loop over the drawn units with their labels flipped; two windows weigh as the record says."""
    data = SHAPES["windows"][0]
    plan = Plan(0, 12, 1, 6, flipped)
    sums = planted(data, plan, physical=5)
    drawn, _ = plan.draw(data.units, 12, 1)
    model, expected = mlp(), []
    for unit in drawn:
        rows = data.unit == unit
        logits = model(torch.from_numpy(data.x[rows])).squeeze(1)
        losses = binary_cross_entropy_with_logits(logits, torch.from_numpy(1 - data.y[rows]), reduction="none")
        expected.append(np.average(losses.detach().numpy(), weights=data.weight[rows]))
    np.testing.assert_allclose(sums.losses(), expected, rtol=1e-5)


def test_the_labels_of_other_units_stay_and_missing_ones_too():
    data = Data(40, single=True)
    data.y[:20] = np.nan
    before = data.y.copy()
    plan = Plan(0, 10, 1, 6, flipped)
    sums = CanarySum(mlp(), data.x, data.y, data.unit, 40, plan=plan)
    np.testing.assert_array_equal(data.y, before)  # a copy is altered
    drawn, included = plan.draw(40, 10, 1)
    expected = np.where(np.isin(np.arange(40), drawn), 1 - before, before)
    np.testing.assert_array_equal(sums._y.numpy(), np.delete(expected, drawn[~included]))


def test_memorised_records_are_found_and_noise_hides_them():
    """Means of 50 losses in two worlds, apart by more than four standard errors, or (false alarm 1e-4) not."""
    data = Data(200, single=True, width=60)
    noise = InsecureNoise(1)
    spec = replace(spec_of(sigma=40.0, steps=95), nominal_units=200.0)
    found = audit_training(data.build, spec, 3.0, noise, canaries=0, records=50, altered=flipped, seed=0)
    for run, memorised in ((found, False), (found.control, True)):
        scores, included = run.arrays("record")
        assert len(scores) == 50
        error = math.hypot(*(scores[part].std() / math.sqrt(part.sum()) for part in (included, ~included)))
        assert (scores[included].mean() - scores[~included].mean() > 4 * error) == memorised
    assert found.kinds == ["record"]
    assert found.statistic("record") == "loss_drop"


def test_a_unit_whose_loss_is_not_finite_scores_zero():
    data = Data(40, single=True)
    data.x[:] = np.inf
    found = audit(data, spec_of(sigma=1.0, steps=2), canaries=10, records=10)
    assert (found.arrays("record")[0] == 0).all()
    assert np.isfinite(found.arrays("gradient")[0]).all()


def test_the_table_has_every_canary_of_both_runs():
    found = audit(SHAPES["users"][0], spec_of(sigma=1.0, steps=1), canaries=30, records=8)
    table = found.scores
    assert table.column_names == ["canary", "noise", "index", "included", "score"]
    assert table.num_rows == 2 * (30 + 8)
    rows = np.flatnonzero((table["canary"].to_numpy() == "record") & ~table["noise"].to_numpy())
    np.testing.assert_array_equal(table["score"].to_numpy()[rows], found.control.arrays("record")[0])
    np.testing.assert_array_equal(table["included"].to_numpy()[rows], found.arrays("record")[1])


# -- built from the arguments of the shipped sums ---------------------------------------------------------------


def test_label_sums_take_canaries(tmp_path):
    inputs, network = Inputs(), Network()
    model = networks.build(inputs, WIDTH, network, 1, 0)
    (tmp_path / "model.safetensors").write_bytes(networks.state_bytes(model))
    config = SimpleNamespace(
        inputs=inputs,
        pretrain=network,
        finetune=SimpleNamespace(trainable=Trainable(), physical_batch=64),
        private=SimpleNamespace(records_per_step=1),
    )
    data = Data()
    records = Records(
        np.array([f"{i:04d}" for i in range(len(data.x))]), np.array([f"{u:03d}" for u in data.unit]), data.x, {}
    )

    def build(make=ClippedSum):
        return label_sums(starting_model(config, WIDTH, str(tmp_path)), records, data.y, config, make)

    assert type(build()) is ClippedSum
    found = audit_training(
        build, spec_of(sigma=1.0, steps=2, unit="user"), 0.1, InsecureNoise(0),
        canaries=50, records=5, altered=flipped, seed=0,
    )  # fmt: skip
    assert found.kinds == ["gradient", "record"]
    wrong = abs(int(found.arrays("gradient")[1].sum()) - 25)  # of a perfect attack that guesses half to be in
    assert one_run.guesses(*found.control.arrays("gradient"), 50) == (50, 50 - wrong)


def test_text_sums_take_canaries():
    end, words = 0, 256
    model = language.build(LanguageModel(layers=1, width=8, heads=1), words, 8, end, 0)
    rng = np.random.default_rng(1)
    tokens = [rng.integers(1, words, size=size).astype(np.int32) for size in (3, 20, 0, 9, 8, 1, 5, 17) * 3]
    unit = np.sort(np.array([f"{i % 12:02d}" for i in range(24)]))
    records = TextRecords(np.array([f"{i:02d}" for i in range(24)]), unit, [""] * 24, tokens)
    config = SimpleNamespace(
        text=SimpleNamespace(context=8, long_records="windows"),
        finetune=SimpleNamespace(physical_batch=4),
        private=SimpleNamespace(records_per_step=1),
    )
    spec = spec_of(sigma=0.5, steps=1, unit="user")
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def build(make=ClippedSum):
        model.load_state_dict(start)
        return text_sums(model, records, end, config, make)

    assert type(build()) is ClippedSum
    found = audit_training(build, spec, 0.1, InsecureNoise(0), canaries=200, records=3, seed=0)
    scores, included = found.arrays("gradient")
    mu = 2.0
    assert kstest((scores + np.where(included, -1, 1) * mu**2 / 2) / mu, "norm").pvalue > FALSE_ALARM
    scores, _ = found.arrays("record")
    assert scores.shape == (3,)
    assert scores.any()
