"""Mixture learners against autograd and against an optimiser that shares no code with them."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from dpmixmin.mixing.learners import closeness, learn, learn_nonprivate, learn_private, proportional, uniform
from dpmixmin.mixing.objective import SourceTable, UnitGradients, mean_loss, source_probabilities
from dpmixmin.privacy.mechanisms import GridGaussian, ResponsibilityGaussian
from dpmixmin.privacy.noise import InsecureNoise, NoiseSource

FINE = 28
"""Grid bits at which rounding is invisible to a comparison at 1e-6."""


class ZeroNoise(NoiseSource):
    """No noise; coins as they come."""

    private = False

    def __init__(self, seed: int = 0):
        self._coins = InsecureNoise(seed)

    def random_bytes(self, count):
        return self._coins.random_bytes(count)

    def rounded_gaussian(self, scale, size):
        return np.zeros(size, dtype=np.int64)


def spec_of(clip, steps=20, rate=1.0, nominal=60.0, sigma=1.0) -> GridGaussian:
    return GridGaussian(clip, sigma, steps, rate, nominal, 1.0, 1e-5, grid_bits=FINE)


def task(rng, n=50, k=5) -> np.ndarray:
    """Source probabilities of a task that sources 1 and 3 predict well."""
    labels = rng.integers(0, 2, size=n).astype(np.float32)
    strength = np.asarray([0.0, 1.5, 0.3, 2.5, -0.5])[:k]
    logits = (2 * labels[:, None] - 1) * strength + rng.normal(size=(n, k))
    return source_probabilities(1 / (1 + np.exp(-logits)), labels)


def of(p, centred, units=None) -> UnitGradients:
    return UnitGradients.of(SourceTable.of_labels(p, units), centred=centred)


def by_autograd(p, spec, learning_rate, noise, *, centred, units=None) -> np.ndarray:
    """Algorithm 1 (DP-MixMin paper, 4.2) with torch's gradients of -log(p . lambda), one record at a time."""
    p = torch.from_numpy(p)
    k = p.shape[1]
    owner = np.arange(len(p)) if units is None else units
    weights = torch.full((k,), 1 / k, dtype=torch.float64)
    trajectory = [weights.numpy()]
    for _ in range(spec.steps):
        batch = spec.sample(int(owner.max()) + 1, noise)
        total = torch.zeros(k, dtype=torch.float64)
        for unit in np.flatnonzero(batch):
            gradients = []
            for row in np.flatnonzero(owner == unit):
                variable = weights.clone().requires_grad_()
                (-torch.log(p[row] @ variable)).backward()
                gradients.append(variable.grad - variable.grad.mean() if centred else variable.grad)
            gradient = torch.stack(gradients).mean(dim=0)
            total += gradient * min(1.0, spec.clip / float(gradient.norm()))
        weights = weights * torch.exp(-learning_rate * total / spec.expected_batch)
        weights = weights / weights.sum()
        trajectory.append(weights.numpy())
    return np.asarray(trajectory)


@pytest.mark.parametrize("centred", [False, True], ids=["algorithm1", "centred"])
@pytest.mark.parametrize("rate", [1.0, 0.4])
@pytest.mark.parametrize("clip", [0.5, 2.5, 40.0], ids=["all clipped", "some clipped", "hardly any clipped"])
def test_without_noise_the_private_learner_is_algorithm_1_by_autograd(clip, rate, centred, rng):
    p = task(rng)
    spec = spec_of(clip, rate=rate)
    found = learn_private(of(p, centred), spec, 1.5, ZeroNoise(), average=False)
    expected = by_autograd(p, spec, 1.5, ZeroNoise(), centred=centred)
    assert found.trajectory.shape == (21, 5)
    assert np.abs(found.trajectory - expected).max() <= 1e-6
    assert np.abs(found.weights - expected[-1]).max() <= 1e-6
    assert np.abs(expected[-1] - 0.2).max() > 0.02, "the weights have moved"


@pytest.mark.parametrize("centred", [False, True])
def test_units_of_several_records_are_averaged_then_clipped_as_by_autograd(centred, rng):
    p = task(rng)
    owner = np.sort(rng.integers(0, 12, size=len(p)))
    owner = np.unique(owner, return_inverse=True)[1]
    spec = spec_of(1.2, rate=0.7)
    gradients = of(p, centred, (int(owner.max()) + 1, owner))
    found = learn_private(gradients, spec, 2.0, ZeroNoise(), average=False)
    expected = by_autograd(p, spec, 2.0, ZeroNoise(), centred=centred, units=owner)
    assert np.abs(found.trajectory - expected).max() <= 1e-6


def test_centring_changes_nothing_where_nothing_is_clipped(rng):
    """Entropic descent does not see the all-ones direction."""
    p = task(rng)
    spec = spec_of(40.0, steps=5)
    assert np.linalg.norm(of(p, False).clipped(uniform(5).weights, 1e9), axis=1).max() < 5
    plain, centred = (
        learn_private(of(p, flag), spec, 1.0, ZeroNoise(), average=False).trajectory for flag in (False, True)
    )
    assert np.abs(plain - centred).max() <= 1e-6


def test_averaging_takes_the_second_half_of_the_iterates(rng):
    gradients = of(task(rng), True)
    for steps in (1, 2, 7, 20):
        spec = spec_of(3.0, steps=steps)
        learned = learn_private(gradients, spec, 1.0, InsecureNoise(1), average=True)
        half = learned.trajectory[1 + steps // 2 :] if steps > 1 else learned.trajectory[-1:]
        assert np.allclose(learned.weights, half.mean(axis=0))
        last = learn_private(gradients, spec, 1.0, InsecureNoise(1), average=False)
        assert np.array_equal(last.trajectory, learned.trajectory)
        assert np.allclose(last.weights, learned.trajectory[-1])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 1e4), st.sampled_from([1e-9, 1.0, 1e3]), st.booleans())
def test_weights_stay_on_the_simplex_whatever_the_noise_and_step_size(seed, rate, sigma, centred):
    p = task(np.random.default_rng(seed), n=20)
    spec = spec_of(2.0, steps=5, sigma=sigma)
    learned = learn_private(of(p, centred), spec, rate, InsecureNoise(seed), average=True)
    for weights in (learned.weights, *learned.trajectory):
        assert np.isfinite(weights).all()
        assert (weights >= 0).all()
        assert weights.sum() == pytest.approx(1)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 10), st.sampled_from([1e-9, 1.0, 1e3]))
def test_responsibilities_stay_on_the_simplex_whatever_the_noise(seed, relaxation, sigma):
    p = task(np.random.default_rng(seed), n=20)
    spec = ResponsibilityGaussian(1.0, sigma, 6, 1.0, 60.0, 1.0, 1e-5)
    learned = learn("responsibilities", SourceTable.of_labels(p), spec, relaxation, InsecureNoise(seed))
    for weights in (learned.weights, *learned.trajectory):
        assert (weights > 0).all()
        assert weights.sum() == pytest.approx(1)


@pytest.mark.parametrize("nominal", [60.0, 30.0, 200.0])
@pytest.mark.parametrize("relaxation", [1.0, 2.0])
def test_responsibilities_converge_to_the_optimum_whatever_the_nominal_number(nominal, relaxation, rng):
    """With next to no noise: the same weights as the non-private optimum, which another algorithm finds."""
    p = task(rng, n=60)
    spec = ResponsibilityGaussian(1.0, 1e-6, 300, 1.0, nominal, 1.0, 1e-5)
    learned = learn("responsibilities", SourceTable.of_labels(p), spec, relaxation, InsecureNoise(0))
    assert closeness(learned.weights, learn_nonprivate(SourceTable.of_labels(p)).weights)["l1"] < 0.01


def test_responsibilities_are_the_mean_over_a_units_records(rng):
    p, weights = task(rng, n=6), rng.dirichlet(np.ones(5))
    unit = np.asarray([0, 0, 1, 1, 1, 2])
    each = p * weights / (p @ weights)[:, None]
    expected = np.stack([each[unit == u].mean(axis=0) for u in range(3)])
    found = of(p, False, (3, unit)).responsibilities(weights)
    assert np.allclose(found, expected)
    assert np.allclose(found.sum(axis=1), 1)


def test_learners_by_name_are_what_the_config_offers(rng):
    p, spec = task(rng), spec_of(2.0)
    centred = learn("centred", SourceTable.of_labels(p), spec, 1.0, InsecureNoise(1))
    direct = learn_private(of(p, True), spec, 1.0, InsecureNoise(1), average=True)
    assert np.array_equal(centred.weights, direct.weights)
    paper = learn("algorithm1", SourceTable.of_labels(p), spec, 1.0, InsecureNoise(1))
    assert np.allclose(paper.weights, paper.trajectory[-1])


def test_rule_6_bad_records_change_nothing_but_the_noise(rng):
    p = task(rng)
    bad = np.full((3, 5), np.nan)
    spec = spec_of(2.0)
    with_bad, without = (
        learn_private(of(data, True), spec, 1.0, ZeroNoise(), average=True).weights
        for data in (np.concatenate([p, bad]), p)
    )
    assert np.array_equal(with_bad, without)
    assert np.array_equal(
        learn_nonprivate(SourceTable.of_labels(np.concatenate([p, bad]))).weights,
        learn_nonprivate(SourceTable.of_labels(p)).weights,
    )


def test_rule_5_an_empty_part_gives_weights_from_noise_alone():
    learned = learn_private(of(np.zeros((0, 5)), True), spec_of(2.0), 1.0, NoiseSource(), average=True)
    assert learned.weights.sum() == pytest.approx(1)
    assert np.ptp(learned.weights) > 0


# -- the non-private optimum ----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 5])
def test_the_nonprivate_learner_finds_the_optimum(k, rng):
    """KKT: the mean of p_i / (p . lambda) is 1 where lambda_i > 0 and at most 1 elsewhere; and scipy agrees."""
    p = task(rng, n=400, k=k)
    learned = learn_nonprivate(SourceTable.of_labels(p))
    ratios = (p / (p @ learned.weights)[:, None]).mean(axis=0)
    assert ratios.max() <= 1 + 1e-3
    assert np.abs(learned.weights * (ratios - 1)).max() <= 1e-4
    peer = minimize(
        lambda weights: -np.log(p @ weights).mean(),
        np.full(k, 1 / k),
        jac=lambda weights: -(p / (p @ weights)[:, None]).mean(axis=0),
        bounds=[(0, 1)] * k,
        constraints={"type": "eq", "fun": lambda weights: weights.sum() - 1},
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-12},
    )
    assert mean_loss(SourceTable.of_labels(p), learned.weights) <= peer.fun + 1e-6
    assert closeness(learned.weights, peer.x)["l1"] < 0.01
    assert (
        mean_loss(SourceTable.of_labels(p), learned.weights)
        < mean_loss(SourceTable.of_labels(p), uniform(k).weights) - 0.01
    )


def test_the_nonprivate_learner_never_raises_the_loss(rng):
    p = task(rng)
    losses = [
        mean_loss(SourceTable.of_labels(p), weights)
        for weights in learn_nonprivate(SourceTable.of_labels(p), steps=100).trajectory
    ]
    assert all(after <= before + 1e-12 for before, after in pairwise(losses))
    assert losses[-1] < losses[0]


def test_the_nonprivate_learner_of_an_empty_table_is_uniform():
    assert learn_nonprivate(SourceTable.of_labels(np.zeros((0, 4)))).weights.tolist() == [0.25] * 4


def test_a_large_budget_brings_the_private_weights_to_the_optimum(rng):
    p = task(rng, n=4000)
    optimum = learn_nonprivate(SourceTable.of_labels(p)).weights
    spec = GridGaussian.for_target(
        epsilon=50.0, delta=1e-5, clip=4.0, steps=100, sampling_rate=1.0, nominal_units=4000
    )
    gradients = of(p, True)
    close = closeness(learn_private(gradients, spec, 2.0, InsecureNoise(3), average=True).weights, optimum)
    assert close["cosine"] > 0.99
    noisy = dataclasses.replace(spec, noise_multiplier=spec.noise_multiplier * 1e4)
    far = closeness(learn_private(gradients, noisy, 2.0, InsecureNoise(3), average=True).weights, optimum)
    assert far["cosine"] < close["cosine"]


# -- objective ------------------------------------------------------------------------------------------------


def test_source_probabilities_are_those_of_the_true_label():
    f = np.asarray([[0.9, 0.2], [0.9, 0.2], [0.9, np.nan], [0.9, 0.2], [0.9, 1.5], [np.inf, 0.2], [-0.5, 0.2]])
    labels = np.asarray([1, 0, 1, np.nan, 0, 1, 1], dtype=np.float32)
    p = source_probabilities(f, labels)
    assert p.dtype == np.float64
    assert np.allclose(p[:2], [[0.9, 0.2], [0.1, 0.8]])
    assert np.isnan(p[2:]).all()


def test_gradients_of_the_objective_have_a_mean_of_minus_1_under_the_weights(rng):
    """sum_i lambda_i g_i = -1 for every record."""
    p = task(rng)
    weights = rng.dirichlet(np.ones(5))
    vectors = of(p, False).clipped(weights, 1e9)
    assert np.allclose(vectors @ weights, -1)
    centred = of(p, True).clipped(weights, 1e9)
    assert np.allclose(centred, vectors - vectors.mean(axis=1, keepdims=True))


def test_mean_loss_skips_rows_without_a_value_and_survives_zero():
    p = np.asarray([[0.5, 0.5], [np.nan, 0.1], [0.0, 0.0]])
    assert mean_loss(SourceTable.of_labels(p), np.asarray([0.5, 0.5])) == pytest.approx(
        (np.log(2) + 300 * np.log(10)) / 2
    )


def test_closeness():
    same = closeness(np.asarray([0.2, 0.8]), np.asarray([0.2, 0.8]))
    assert same == {"cosine": pytest.approx(1), "l1": 0.0}
    assert closeness(np.asarray([1.0, 0.0]), np.asarray([0.0, 1.0])) == {"cosine": 0.0, "l1": 2.0}


def test_uniform():
    assert uniform(4).weights.tolist() == [0.25] * 4
    assert uniform(4).trajectory.shape == (1, 4)


def test_the_gradient_is_exact_however_small_the_probabilities(rng):
    """-p / (p . lambda) does not change when p is scaled, down to the smallest probabilities."""
    p, weights = rng.uniform(0.1, 1, (20, 5)), rng.dirichlet(np.ones(5))
    expected = -p / (p @ weights)[:, None]
    for scale in (1.0, 1e-9, 1e-90):
        found = of(p * scale, False).clipped(weights, 1e6)
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_proportional():
    assert proportional(np.asarray([1, 3, 0])).weights.tolist() == [0.25, 0.75, 0.0]
    assert proportional([2, 2]).trajectory.shape == (1, 2)
