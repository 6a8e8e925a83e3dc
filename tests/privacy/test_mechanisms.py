"""Mechanism specs: public parameters only, budgets kept, and the integer grid (rules 2, 5, 6, 15, 16)."""

import ast
import dataclasses
import inspect
import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dpmixmin.mixing.learners import learn_private
from dpmixmin.mixing.objective import SourceTable, UnitGradients
from dpmixmin.privacy import accounting, mechanisms
from dpmixmin.privacy.accounting import Composition
from dpmixmin.privacy.events import ADJACENCIES, GaussianEvent, to_json
from dpmixmin.privacy.mechanisms import GridGaussian, MechanismSpec, ModelGaussian, ResponsibilityGaussian
from dpmixmin.privacy.noise import InsecureNoise, NoiseSource


class ZeroNoise(NoiseSource):
    """No noise at all."""

    private = False

    def rounded_gaussian(self, scale, size):
        return np.zeros(size, dtype=np.int64)


def grid(clip=13.0, bits=20, steps=1, rate=1.0, nominal=100.0, sigma=2.0) -> GridGaussian:
    return GridGaussian(clip, sigma, steps, rate, nominal, 1.0, 1e-5, grid_bits=bits)


# -- public parameters only (rule 2) --------------------------------------------------------------------------


def test_rule_2_neighbours_give_byte_identical_specs(rng):
    """A mechanism built and run on D, on D minus a unit, and on nothing describes itself by the same bytes."""
    p = rng.uniform(0.05, 1, size=(40, 5))
    texts = set()
    for data in (p, p[:-1], p[:0]):
        spec = GridGaussian.for_target(epsilon=1.0, delta=1e-5, clip=4.0, steps=3, sampling_rate=0.5, nominal_units=50)
        gradients = UnitGradients.of(SourceTable.of_labels(data), centred=True)
        learn_private(gradients, spec, 1.0, InsecureNoise(0), average=True)
        texts.add((json.dumps(spec.describe()), spec.digest(), spec.events(), spec.spent(), spec.expected_batch))
    assert len(texts) == 1


def test_rule_2_the_divisor_is_the_public_expected_batch(rng):
    """Every record twice: twice the gradient. A divisor that followed the data would cancel it."""
    p = rng.uniform(0.2, 1, size=(30, 4))
    steps = []
    for data in (p, np.repeat(p, 2, axis=0)):
        gradients = UnitGradients.of(SourceTable.of_labels(data), centred=False)
        learned = learn_private(gradients, grid(), 0.3, ZeroNoise(), average=False)
        log_weights = np.log(learned.trajectory[1])
        steps.append(log_weights - log_weights.mean())
    assert np.allclose(steps[1], 2 * steps[0], rtol=1e-4)
    assert np.abs(steps[0]).max() > 1e-3
    assert grid(rate=0.25, nominal=400.0).expected_batch == 100.0


def test_rule_2_no_method_that_makes_or_accounts_a_spec_looks_at_data():
    """`len`, `shape`, `size` and `count` do not occur where rate, divisor, noise level and epsilon are computed."""
    methods = ("for_target", "expected_batch", "noise_std", "sensitivity", "events", "spent", "describe", "digest")
    classes = {node.name: node for node in ast.parse(inspect.getsource(mechanisms)).body if hasattr(node, "name")}
    nodes = [*classes["Spec"].body, *classes["MechanismSpec"].body]
    nodes = [item for item in nodes if getattr(item, "name", "") in methods]
    assert {node.name for node in nodes} == set(methods)
    nodes += [node for node in ast.parse(inspect.getsource(accounting)).body if isinstance(node, ast.FunctionDef)]
    for node in nodes:
        names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
        names |= {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}
        assert not names & {"len", "shape", "size", "count", "units"}, node.name


def test_specs_are_frozen_and_every_field_is_in_the_digest():
    spec = grid()
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.noise_multiplier = 0.1
    changes = {
        "clip": 1.0, "noise_multiplier": 3.0, "steps": 2, "sampling_rate": 0.5, "nominal_units": 99.0,
        "epsilon": 2.0, "delta": 1e-6, "unit": "patient", "adjacency": "zero_out", "grid_bits": 19,
        "alongside": (GaussianEvent(5.0, 1.0, 1),),
    }  # fmt: skip
    assert set(changes) == {field.name for field in dataclasses.fields(spec)}
    digests = {dataclasses.replace(spec, **{name: value}).digest() for name, value in changes.items()}
    assert len(digests | {spec.digest()}) == len(changes) + 1
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(MechanismSpec)}
    assert ModelGaussian(**fields).digest() != MechanismSpec(**fields).digest()


def test_rule_27_the_adjacency_changes_the_sensitivity_and_the_noise():
    """Replace-one needs twice the noise of add/remove for clipped sums, sqrt 2 for the simplex; zero-out the same."""
    target = {"epsilon": 1.0, "delta": 1e-5, "steps": 7, "sampling_rate": 1.0, "nominal_units": 50}
    for kind, factor in ((GridGaussian, 2.0), (ModelGaussian, 2.0), (ResponsibilityGaussian, math.sqrt(2.0))):
        made = {a: kind.for_target(**target, clip=1.0, adjacency=a) for a in ADJACENCIES}
        sigma = {name: spec.noise_multiplier for name, spec in made.items()}
        assert sigma["replace_one"] == pytest.approx(factor * sigma["add_remove"], rel=1e-9)
        assert sigma["zero_out"] == sigma["add_remove"]
        assert made["replace_one"].sensitivity == pytest.approx(factor)
        assert all(spec.spent() <= 1.0 for spec in made.values())
    with pytest.raises(ValueError, match="adjacency"):
        GridGaussian(1.0, 1.0, 1, 1.0, 10, 1.0, 1e-5, adjacency="nearby")


def test_rule_15_responsibilities_off_the_simplex_count_as_zero():
    spec = ResponsibilityGaussian(1.0, 2.0, 1, 1.0, 10, 1.0, 1e-5)
    rows = np.asarray([[0.25, 0.75, 0.0], [1.0, 0.0, 0.0], [0.6, 0.6, 0.0], [1.2, -0.2, 0.0], [np.nan, 1.0, 0.0]])
    found = spec.to_grid(rows)
    assert found[0].tolist() == [2**18, 3 * 2**18, 0]
    assert found[1].tolist() == [2**20, 0, 0]
    assert not found[2:].any()
    with pytest.raises(ValueError, match="clipping norm is 1"):
        dataclasses.replace(spec, clip=2.0)


def test_sequential_composition_calibrates_the_second_release_to_what_the_first_left():
    """Both together meet the target; less noise would not, and a first release that took everything is refused."""
    first = GridGaussian.for_target(epsilon=0.3, delta=1e-5, clip=1.0, steps=5, sampling_rate=1.0, nominal_units=50)
    target = {"epsilon": 1.0, "delta": 1e-5, "clip": 1.0, "steps": 20, "sampling_rate": 0.1, "nominal_units": 500}
    second = ModelGaussian.for_target(**target, alongside=first.events())
    together = Composition((*first.events(), *second.events())).epsilon(1e-5)
    assert 0.99 <= together <= 1.0
    assert second.spent() == together
    assert second.noise_multiplier > ModelGaussian.for_target(**target).noise_multiplier
    assert second.describe()["alongside"] == [to_json(event) for event in first.events()]
    whole = GridGaussian.for_target(epsilon=1.0, delta=1e-5, clip=1.0, steps=5, sampling_rate=1.0, nominal_units=50)
    with pytest.raises(ValueError, match="alongside"):
        ModelGaussian.for_target(**target, alongside=whole.events())


# -- budgets (rule 16) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GridGaussian, ModelGaussian])
@pytest.mark.parametrize(("epsilon", "rate", "steps"), [(0.1, 1.0, 50), (1.0, 0.1, 30), (5.0, 1.0, 1), (8.0, 0.5, 3)])
def test_rule_16_a_calibrated_spec_spends_at_most_its_target(kind, epsilon, rate, steps):
    spec = kind.for_target(
        epsilon=epsilon, delta=1e-5, clip=0.7, steps=steps, sampling_rate=rate, nominal_units=500, unit="user"
    )
    assert 0.99 * epsilon <= spec.spent() <= epsilon
    assert spec.events() == (GaussianEvent(spec.noise_multiplier, rate, steps),)
    assert spec.noise_std == spec.noise_multiplier * 0.7
    assert spec.unit == "user"


def test_rule_16_a_spec_with_too_little_noise_is_refused():
    spec = GridGaussian.for_target(epsilon=1.0, delta=1e-5, clip=1.0, steps=5, sampling_rate=1.0, nominal_units=10)
    with pytest.raises(ValueError, match="above its target"):
        dataclasses.replace(spec, noise_multiplier=spec.noise_multiplier * 0.999).spent()
    with pytest.raises(ValueError, match="above its target"):
        dataclasses.replace(spec, steps=6).spent()


# -- the grid (rule 15) ---------------------------------------------------------------------------------------


def integer_norms_squared(integers: np.ndarray) -> list[int]:
    return [sum(int(value) ** 2 for value in row) for row in integers]


clips = st.sampled_from([13.0, 0.01, 0.2, 1.0, 1e5, 3.0000000000000004])
rows = arrays(
    np.float64,
    st.tuples(st.integers(1, 3), st.integers(1, 16)),
    elements=st.floats(-1, 1, allow_subnormal=False) | st.sampled_from([0.0, 1.0, -1.0, 1e-300]),
)


@settings(max_examples=200, deadline=None)
@given(rows, clips, st.floats(0, 1))
def test_rule_15_rounding_goes_toward_zero_and_never_lengthens(directions, clip, length):
    """Vectors up to the clip; comparisons in exact rational arithmetic."""
    norms = np.maximum(np.linalg.norm(directions, axis=1, keepdims=True), 1e-30)
    vectors = directions * (clip * length / norms) * (norms > 1e-30)
    spec = grid(clip=clip)
    integers = spec.to_grid(vectors)
    assert integers.dtype == np.int64
    assert max(integer_norms_squared(integers)) <= 2**40
    unit = Fraction(spec.grid)
    ulp = 1 + Fraction(1, 2**50)
    for vector, row in zip(vectors, integers, strict=True):
        for value, integer in zip(vector.tolist(), row.tolist(), strict=True):
            assert integer * value >= 0
            assert abs(integer) * unit <= abs(Fraction(value)) * ulp
            # At most one more grid point is lost than truncation takes (the shrinking of an ulp too long).
            assert abs(Fraction(value)) <= (abs(integer) + 2) * unit * ulp
        assert sum(integer**2 for integer in row.tolist()) * unit**2 <= ulp**2 * sum(
            Fraction(value) ** 2 for value in vector.tolist()
        )


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 16), clips, st.integers(0, 2**32 - 1), st.integers(-2, 4))
def test_rule_15_vectors_at_the_clip_and_ulps_above_it_stay_inside(k, clip, seed, ulps):
    direction = np.random.default_rng(seed).normal(size=k)
    vector = direction * (clip / np.linalg.norm(direction))
    for _ in range(abs(ulps)):
        vector = np.nextafter(vector, np.sign(ulps) * np.sign(vector) * np.inf)
    spec = grid(clip=clip)
    (norm_squared,) = integer_norms_squared(spec.to_grid(vector[None]))
    assert norm_squared <= 2**40
    assert norm_squared >= (1 - 1e-4) * 2**40


@pytest.mark.parametrize("k", [1, 2, 4, 9])
def test_rule_15_the_exact_corner_is_kept_and_one_ulp_more_is_shrunk(k):
    """A vector on the grid with integer norm exactly 2**20 passes unchanged; a grid point more does not."""
    spec = grid(clip=1.0)
    corner = np.zeros((1, k))
    corner[0, 0] = 1.0
    assert spec.to_grid(corner)[0, 0] == 2**20
    beyond = corner + spec.grid
    assert max(integer_norms_squared(spec.to_grid(beyond))) <= 2**40


@pytest.mark.parametrize("vector", [[1e300] * 6, [2.0, 2.0, 2.0, 0.0, 0.0, 0.0], [-1e5] + [1.0] * 5])
def test_rule_15_a_vector_far_above_the_clip_is_shrunk_too(vector):
    """Defence in depth: no caller does this."""
    (norm_squared,) = integer_norms_squared(grid(clip=1.0).to_grid(np.asarray([vector])))
    assert 0 < norm_squared <= 2**40


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rule_6_a_row_that_is_not_finite_contributes_zero(bad):
    vectors = np.full((3, 4), 0.5)
    vectors[1, 2] = bad
    integers = grid(clip=2.0).to_grid(vectors)
    assert not integers[1].any()
    assert integers[[0, 2]].all()


@pytest.mark.parametrize("clip", [1.0, 13.0, 0.01])
def test_rule_5_and_15_an_empty_part_still_gets_noise_on_the_grid(clip):
    """False-alarm rate below 1e-80: fourteen draws of deviation 2 million that are all zero."""
    spec = grid(clip=clip)
    released = spec.release_sum(np.zeros((0, 14)), NoiseSource())
    assert released.shape == (14,)
    assert released.any()
    assert np.array_equal(np.rint(released / spec.grid) * spec.grid, released)
    assert 0.01 < released.std() / spec.noise_std < 10


def test_rule_15_a_release_is_the_exact_integer_sum_plus_one_draw_a_coordinate(rng):
    spec = grid(clip=1.0)
    vectors = rng.normal(size=(1000, 7))
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1.0)
    total = [sum(int(row[i]) for row in spec.to_grid(vectors)) for i in range(7)]
    noise = InsecureNoise(4).rounded_gaussian(spec.noise_multiplier * 2**20, 7)
    assert noise.all(), "every coordinate is noised"
    expected = [(one + int(other)) * spec.grid for one, other in zip(total, noise, strict=True)]
    assert spec.release_sum(vectors, InsecureNoise(4)).tolist() == expected


def test_rule_15_the_stated_total_variation_is_far_below_delta():
    assert grid(steps=100_000).total_variation(1000) < 1e-20


def test_model_sized_noise_has_the_spec_deviation():
    """Deterministic (seeded): the deviation of 100k draws within 2 %."""
    spec = ModelGaussian(0.5, 3.0, 1, 1.0, 100, 1.0, 1e-5)
    assert spec.release_sum(np.zeros(100_000), InsecureNoise(1)).std() == pytest.approx(1.5, rel=0.02)
    share = spec.release_sum(np.ones(100_000), InsecureNoise(1), shares=4)
    assert share.mean() == pytest.approx(1, abs=0.02)
    assert share.std() == pytest.approx(0.75, rel=0.02)


@pytest.mark.parametrize("bits", [0, 32, 40])
def test_rule_15_a_grid_too_fine_to_check_norms_in_int64_is_refused(bits):
    """At 40 bits the squares overflow, so the norm check would pass whatever it is given."""
    with pytest.raises(ValueError, match="grid_bits"):
        grid(bits=bits)
