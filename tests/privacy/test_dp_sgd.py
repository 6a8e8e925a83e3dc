"""DP-SGD: per-example gradients, physical batches, empty batches, units, noise (rules 4, 5, 6, 7, 8, 13)."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dpmixmin.errors import UserError
from dpmixmin.finetune.dp_sgd import ClippedSum, fine_tune
from dpmixmin.models import networks
from dpmixmin.privacy.mechanisms import ModelGaussian
from dpmixmin.privacy.noise import InsecureNoise, NoiseSource

SHAPE = (1, 8, 8)
WIDTH = 64
KINDS = ("cnn", "mlp")


def network(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return networks.cnn(SHAPE, (4, 6), 8, 1) if kind == "cnn" else networks.mlp(WIDTH, 16, 1)


def records(rng, n: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.normal(size=(n, WIDTH)).astype(np.float32), rng.integers(0, 2, size=n).astype(np.float32)


def sums_of(kind, x, y, unit=None, physical=512, sums=ClippedSum) -> ClippedSum:
    unit = np.arange(len(x)) if unit is None else unit
    units = int(unit.max()) + 1 if len(unit) else 0
    return sums(network(kind), x, y, unit, units, physical)


def spec_of(clip=0.5, sigma=1.0, steps=1, rate=1.0, nominal=10.0) -> ModelGaussian:
    return ModelGaussian(clip, sigma, steps, rate, nominal, 1.0, 1e-5)


def loop_gradient(kind: str, x: np.ndarray, y: float) -> np.ndarray:
    """The gradient of one record by plain autograd in a batch of 1."""
    model = network(kind)
    loss = binary_cross_entropy_with_logits(model(torch.from_numpy(x[None])).squeeze(1), torch.tensor([float(y)]))
    loss.backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]).double().numpy()


def clipped(gradient: np.ndarray, clip: float) -> np.ndarray:
    return gradient * min(1.0, clip / np.linalg.norm(gradient))


class TapedSum(ClippedSum):
    """Records every update, and how many units each step sampled."""

    def __call__(self, batch, clip, secret=None):
        self.sampled = [*getattr(self, "sampled", []), int(batch.sum())]
        return super().__call__(batch, clip, secret)

    def add(self, update):
        self.updates = [*getattr(self, "updates", []), update.numpy().copy()]
        super().add(update)


# -- gradients (rule 8) ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_rule_8_per_example_gradients_equal_a_loop_of_batches_of_1(kind, rng):
    x, y = records(rng, 12)
    sums = sums_of(kind, x, y)
    found = sums._per_record(np.arange(12)).numpy()
    expected = np.stack([loop_gradient(kind, *record) for record in zip(x, y, strict=True)])
    assert found.shape == expected.shape == (12, sums.size)
    assert np.abs(expected).max(axis=1).min() > 1e-3
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [0.3, 1e6])
def test_rule_3_the_sum_is_that_of_clipped_gradients_of_the_sampled_units(kind, clip, rng):
    x, y = records(rng, 12)
    sums = sums_of(kind, x, y)
    batch = np.arange(12) % 3 != 0
    expected = sum(clipped(loop_gradient(kind, x[i], y[i]), clip) for i in np.flatnonzero(batch))
    assert np.allclose(sums(batch, clip).numpy(), expected, rtol=3e-5, atol=1e-5)
    again = sums(batch, clip).numpy()
    assert np.array_equal(again, sums(batch, clip).numpy()), "nothing accumulates between calls"


@pytest.mark.parametrize("kind", KINDS)
def test_rule_7_one_record_does_not_see_another(kind, rng):
    x, y = records(rng, 6)
    alone = sums_of(kind, x, y)._per_record(np.asarray([2])).numpy()
    x[[0, 1, 3, 4, 5]] = 1e4
    together = sums_of(kind, x, y)._per_record(np.arange(6)).numpy()[2:3]
    assert np.allclose(alone, together, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "name"),
    [(nn.BatchNorm1d(16), "1.normal"), (nn.InstanceNorm1d(16), "1.normal"), (nn.SyncBatchNorm(16), "1.normal")],
)
def test_rule_7_layers_that_mix_records_are_refused_by_name(layer, name, rng):
    inner = nn.Sequential()
    inner.add_module("normal", layer)
    model = nn.Sequential(nn.Linear(WIDTH, 16), inner, nn.Linear(16, 1))
    x, y = records(rng, 2)
    with pytest.raises(UserError, match=f"layer `{name}` .{type(layer).__name__}") as caught:
        ClippedSum(model, x, y, np.arange(2), 2)
    assert "\n" not in str(caught.value)


# -- physical batches (rule 4) --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grouped", [False, True])
def test_rule_4_the_update_is_the_same_for_physical_batches_1_4_and_64(kind, grouped, rng):
    x, y = records(rng, 40)
    unit = np.repeat(np.arange(15), rng.multinomial(25, [1 / 15] * 15) + 1) if grouped else None
    updates = []
    for physical in (1, 4, 64):
        sums = sums_of(kind, x, y, unit, physical, sums=TapedSum)
        fine_tune(sums, spec_of(steps=3, rate=0.6), 0.1, InsecureNoise(8))
        updates.append(np.stack(sums.updates))
    assert updates[0].shape == (3, sums.size)
    assert np.abs(updates[0]).max() > 1e-3
    for other in updates[1:]:
        assert np.abs(other - updates[0]).max() <= 1e-6


def test_rule_4_every_sampled_record_is_read_once_whatever_the_chunks(rng):
    """Units of 1 to 9 records in chunks of 8: none is cut or lost or read twice, and only whole units share."""
    sizes = rng.integers(1, 10, size=30)
    unit = np.repeat(np.arange(30), sizes)
    x, y = records(rng, len(unit))
    sums = sums_of("mlp", x, y, unit, 8)
    batch = rng.uniform(size=30) < 0.7
    rows, _ = sums._present(batch, None)
    assert rows.tolist() == np.flatnonzero(batch[unit]).tolist()
    chunks = [rows[part] for part in sums._chunks(rows)]
    assert np.concatenate(chunks).tolist() == rows.tolist()
    assert all(len(chunk) <= 8 or len(set(unit[chunk])) == 1 for chunk in chunks)
    assert all(set(unit[one]).isdisjoint(unit[other]) for one, other in pairwise(chunks)), "no unit is cut"
    assert len(chunks) < 0.9 * batch.sum(), "small units share a chunk"


# -- nobody there (rule 5) ------------------------------------------------------------------------------------


def test_rule_5_an_empty_batch_still_adds_noise_and_every_step_counts(rng):
    """q = 0.01, 5 units, 200 steps: 95 % of the batches are empty. Each update is noised at full strength.

    Deterministic (seeded). The mean of squares over 200 x 1,105 coordinates is within 3 % of the noise's variance.
    """
    x, y = records(rng, 5)
    sums = sums_of("mlp", x, y, sums=TapedSum)
    spec = spec_of(clip=0.5, sigma=2.0, steps=200, rate=0.01, nominal=500)
    fine_tune(sums, spec, 0.3, InsecureNoise(2))
    assert len(sums.updates) == 200
    assert np.mean(np.asarray(sums.sampled) == 0) > 0.8
    expected = 0.3 * spec.noise_std / spec.expected_batch
    per_step = np.sqrt(np.mean(np.square(sums.updates), axis=1))
    assert per_step.min() > 0.8 * expected
    assert np.mean(np.square(per_step)) == pytest.approx(expected**2, rel=0.03)


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_rule_5_a_part_without_units_trains_on_noise_alone(rate):
    x, y = np.zeros((0, WIDTH), np.float32), np.zeros(0, np.float32)
    sums = sums_of("cnn", x, y, sums=TapedSum)
    before = networks.state_bytes(network("cnn"))
    fine_tune(sums, spec_of(steps=3, rate=rate), 0.1, NoiseSource())
    assert len(sums.updates) == 3
    assert all(update.any() for update in sums.updates)
    assert networks.state_bytes(sums.model) != before


def test_rule_13_the_noise_of_an_update_has_the_spec_deviation():
    """False-alarm rate 1e-9: the sum of squares of an empty part's update is chi-squared."""
    sums = sums_of("mlp", np.zeros((0, WIDTH), np.float32), np.zeros(0, np.float32), sums=TapedSum)
    spec = spec_of(clip=0.7, sigma=3.0, steps=40, nominal=50.0)
    fine_tune(sums, spec, 1.0, NoiseSource())
    scaled = np.stack(sums.updates) * spec.expected_batch / (0.7 * 3.0)
    low, high = chi2.ppf([0.5e-9, 1 - 0.5e-9], scaled.size)
    assert low < np.square(scaled).sum() < high
    assert not low < np.square(scaled * 1.05).sum() < high, "5 % more noise would be seen"


def test_rule_18_training_stops_at_exactly_the_steps_of_the_spec(rng):
    x, y = records(rng, 4)
    sums = sums_of("mlp", x, y, sums=TapedSum)
    fine_tune(sums, spec_of(steps=7), 0.1, InsecureNoise(0))
    assert len(sums.updates) == 7


# -- units and bad records (rules 6, 13) ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [0.2, 1e6], ids=["clipped", "not clipped"])
def test_rule_13_the_mean_over_a_units_records_is_clipped(clip, kind, rng):
    """Mean then clip; clipping then mean, or a sum, would give another vector."""
    x, y = records(rng, 9)
    unit = np.asarray([0, 0, 0, 0, 1, 2, 2, 2, 2])
    gradients = np.stack([loop_gradient(kind, *record) for record in zip(x, y, strict=True)])
    expected = sum(clipped(gradients[unit == u].mean(axis=0), clip) for u in range(3))
    other_order = sum(np.mean([clipped(g, clip) for g in gradients[unit == u]], axis=0) for u in range(3))
    found = sums_of(kind, x, y, unit)(np.ones(3, dtype=bool), clip).numpy()
    assert np.allclose(found, expected, rtol=3e-5, atol=1e-5)
    if clip == 0.2:
        assert np.abs(found - other_order).max() > 1e-2


@pytest.mark.parametrize("where", ["feature", "infinite feature", "overflow"])
def test_rule_6_a_unit_whose_gradient_is_not_finite_contributes_zero(where, rng):
    x, y = records(rng, 6)
    unit = np.asarray([0, 1, 1, 2, 3, 3])
    expected = sums_of("mlp", x, y, unit)(np.asarray([True, False, True, True]), 0.4).numpy()
    x[2, 5] = {"feature": np.nan, "infinite feature": np.inf, "overflow": 3e38}[where]
    if where == "overflow":
        x[2] = 3e38
    found = sums_of("mlp", x, y, unit)(np.ones(4, dtype=bool), 0.4).numpy()
    assert np.isfinite(found).all()
    if where != "overflow":
        assert np.allclose(found, expected, atol=1e-6)
    assert np.linalg.norm(found - expected) <= 0.4


def test_rule_6_a_record_without_a_label_contributes_zero(rng):
    x, y = records(rng, 5)
    y[3] = np.nan
    found = sums_of("mlp", x, y)(np.ones(5, dtype=bool), 0.4).numpy()
    rest = np.asarray([True, True, True, False, True])
    assert np.allclose(found, sums_of("mlp", x, y)(rest, 0.4).numpy(), atol=1e-6)
    x[3] = np.nan
    assert np.isfinite(sums_of("mlp", x, y)(np.ones(5, dtype=bool), 0.4).numpy()).all()


def test_rows_out_of_the_order_of_units_are_refused(rng):
    x, y = records(rng, 3)
    with pytest.raises(ValueError, match="order of their units"):
        sums_of("mlp", x, y, np.asarray([1, 0, 1]))


def test_rule_2_the_update_divides_by_the_public_expected_batch(rng):
    """Every unit twice: twice the update, with the noise left out."""

    class Silent(NoiseSource):
        def gaussian(self, std, size):
            return np.zeros(size)

    x, y = records(rng, 6)
    updates = []
    for copies in (1, 2):
        sums = sums_of("mlp", np.repeat(x, copies, axis=0), np.repeat(y, copies), sums=TapedSum)
        fine_tune(sums, spec_of(nominal=33.0), 0.1, Silent())
        updates.append(sums.updates[0])
    assert np.allclose(updates[1], 2 * updates[0], atol=1e-6)
    total = sums_of("mlp", x, y)(np.ones(6, dtype=bool), 0.5).numpy()
    assert np.allclose(updates[0], -0.1 * total / 33.0, atol=1e-9)
    assert math.isclose(spec_of(nominal=33.0, rate=0.5).expected_batch, 16.5)


def test_frozen_parameters_are_left_alone_and_get_no_noise(rng):
    model = network("mlp")
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    x, y = records(rng, 4)
    sums = ClippedSum(model, x, y, np.arange(4), 4)
    assert sums.size == sum(p.numel() for p in model.parameters() if p.requires_grad)
    fine_tune(sums, spec_of(steps=2), 0.1, InsecureNoise(1))
    assert torch.equal(model[0].weight, before)
