"""Accounting and composition against independent formulas and accountants (rules 16, 17, 21)."""

import math

import mpmath
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from dpmixmin.privacy import accounting
from dpmixmin.privacy.accounting import (
    REPORT_DELTAS,
    REPORT_EPSILONS,
    Composition,
    Event,
    calibrate,
    curve,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
)
from dpmixmin.privacy.composition import Touch, guarantee, worst_compositions

ALMOST_FULL = 1 - 1e-12
"""A Poisson rate so near to 1 that only the accountant's branch differs from a full batch."""


def exact_gaussian_delta(mu: float, epsilon: float) -> mpmath.mpf:
    """Balle & Wang 2018, Theorem 8, with 60 digits."""
    with mpmath.workdps(60):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


def hockey_sticks(sigma: float, q: float, epsilon: float) -> tuple[float, float]:
    """One Poisson-sampled step, by numerical integration: the unit removed, and the unit added."""

    def without(x):
        return norm.pdf(x, 0, sigma)

    def with_unit(x):
        return (1 - q) * norm.pdf(x, 0, sigma) + q * norm.pdf(x, 1, sigma)

    def integral(p, r):
        # The integrand is smooth on either side of the only point where p = e^eps r.
        points = np.linspace(-12 * sigma, 1 + 12 * sigma, 4001)
        excess = p(points) - math.exp(epsilon) * r(points)
        change = points[:-1][np.diff(np.sign(excess)) != 0]
        edges = [points[0], *change, *(change + points[1] - points[0]), points[-1]]
        pieces = zip(sorted(edges)[:-1], sorted(edges)[1:], strict=True)
        return sum(quad(lambda x: max(p(x) - math.exp(epsilon) * r(x), 0), a, b, epsabs=0)[0] for a, b in pieces)

    return integral(with_unit, without), integral(without, with_unit)


# -- the Gaussian mechanism -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [1e-3, 0.01, 0.268, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.01, 0.5, 5.0, 50.0])
def test_rule_16_gaussian_delta_equals_the_formula_in_60_digits(mu, epsilon):
    exact = exact_gaussian_delta(mu, epsilon)
    if exact < 1e-290:
        assert gaussian_delta(mu, epsilon) < 1e-280
    else:
        assert gaussian_delta(mu, epsilon) == pytest.approx(float(exact), rel=1e-7)


@pytest.mark.parametrize(("epsilon", "sigma"), [(1, 3.731), (2, 1.994), (5, 0.892)])
def test_rule_16_published_noise_at_delta_1e_5(epsilon, sigma):
    """The noise multipliers that the mixture uses at epsilon 1, 2 and 5."""
    assert 1 / gaussian_mu(epsilon, 1e-5) == pytest.approx(sigma, abs=6e-4)
    assert calibrate(epsilon, 1e-5, 1.0, 1) == pytest.approx(sigma, abs=6e-4)
    assert calibrate(epsilon, 1e-5, 1.0, 100) == pytest.approx(10 * sigma, abs=6e-3)


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 1e-2])
@pytest.mark.parametrize("epsilon", [0.01, 1.0, 50.0])
def test_gaussian_inverses_stand_on_the_safe_side(epsilon, delta):
    mu = gaussian_mu(epsilon, delta)
    assert gaussian_delta(mu, epsilon) <= delta
    assert gaussian_delta(mu * (1 + 1e-6), epsilon) > delta
    found = gaussian_epsilon(mu, delta)
    assert gaussian_delta(mu, found) <= delta
    assert found == pytest.approx(epsilon, rel=1e-6)


def test_gaussian_epsilon_is_zero_where_delta_pays_for_everything():
    assert gaussian_epsilon(1e-6, 1e-5) == 0.0
    assert gaussian_delta(0.0, 0.0) == 0.0


# -- Poisson sampling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.1), (3.0, 0.5), (0.6, 0.01)])
def test_rule_16_one_poisson_step_against_the_hockey_stick_in_both_directions(sigma, q):
    composition = Composition([Event(sigma, q, 1)])
    per_direction = composition._distribution()
    for epsilon in (0.05, 0.2, 0.5):
        removed, added = hockey_sticks(sigma, q, epsilon)
        assert removed > added
        assert composition.delta(epsilon) >= removed * (1 - 1e-9)
        assert composition.delta(epsilon) <= removed * 1.01 + 1e-12
        for pmf, exact in ((per_direction._pmf_remove, removed), (per_direction._pmf_add, added)):
            got = pmf.get_delta_for_epsilon(epsilon)
            assert exact * (1 - 1e-9) - 1e-15 <= got <= exact * 1.01 + 1e-12


@pytest.mark.parametrize(("sigma", "steps"), [(3.731, 1), (37.31, 100), (0.892, 1), (50.0, 3)])
def test_rule_16_poisson_with_rate_1_is_the_gaussian_mechanism(sigma, steps):
    exact = Composition([Event(sigma, 1.0, steps)])
    sampled = Composition([Event(sigma, ALMOST_FULL, steps)])
    assert exact.mu == pytest.approx(math.sqrt(steps) / sigma)
    assert sampled.mu is None
    assert 1 - 1e-9 <= sampled.epsilon(1e-5) / exact.epsilon(1e-5) <= 1.001
    epsilon = exact.epsilon(1e-4)
    assert 1 - 1e-9 <= sampled.delta(epsilon) / exact.delta(epsilon) <= 1.01


BRACKETS = [  # sigma, q, steps, delta, grid of the lower bound
    (1.1, 0.03, 30, 1e-5, 1e-4),
    (3.94, 0.1, 100, 1e-5, 1e-5),
    (2.0, 0.01, 1000, 1e-6, 1e-5),
    (1000.0, 0.5, 10, 1e-5, 1e-7),
    (0.3, 0.01, 10, 1e-5, 1e-3),
]


@pytest.mark.parametrize(("sigma", "q", "steps", "delta", "grid"), BRACKETS)
def test_rule_16_bracket_of_upper_and_lower_bound_is_within_1_percent(sigma, q, steps, delta, grid):
    event = Event(sigma, q, steps)
    upper = Composition([event]).epsilon(delta)
    lower = Composition([event], grid=grid, pessimistic=False).epsilon(delta)
    assert lower <= upper
    assert upper <= 1.01 * lower + 1e-9


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "delta"),
    [(1.1, 0.03, 30, 1e-5), (3.94, 0.1, 100, 1e-5), (1.8948, 200 / 80726, 36_000, 1e-5), (0.8, 0.02, 60, 1e-5)],
)
@pytest.mark.filterwarnings("ignore:Optimal order:UserWarning")
def test_rule_16_inside_the_error_interval_of_opacus_prv(sigma, q, steps, delta):
    from opacus.accountants import PRVAccountant

    peer = PRVAccountant()
    peer.history = [(sigma, q, steps)]
    distribution = peer._get_dprv(eps_error=0.01, delta_error=delta / 1000)
    low, estimate, high = distribution.compute_epsilon(delta, delta / 1000, 0.01)
    ours = Composition([Event(sigma, q, steps)]).epsilon(delta)
    assert low <= ours <= high
    assert ours == pytest.approx(estimate, rel=1e-3)


# -- calibration ----------------------------------------------------------------------------------------------

TARGETS = [  # epsilon, delta, q, steps
    (0.01, 1e-5, 1.0, 1),
    (0.01, 1e-12, 1.0, 36_000),
    (1.0, 1e-5, 1.0, 50),
    (50.0, 1e-12, 1.0, 10),
    (0.01, 1e-12, 0.5, 10),
    (0.01, 1e-5, 0.01, 1000),
    (0.01, 1e-12, 200 / 80726, 36_000),
    (1.0, 1e-5, 0.1, 100),
    (1.0, 1e-5, 0.03, 30),
    (2.0, 1e-12, 1e-2, 300),
    (8.0, 1e-5, 0.02, 60),
    (50.0, 1e-5, 0.5, 1),
    (50.0, 1e-12, 0.01, 10),
]


@pytest.mark.parametrize(("epsilon", "delta", "q", "steps"), TARGETS)
def test_rule_16_calibration_spends_at_most_the_target_and_at_least_99_percent(epsilon, delta, q, steps):
    sigma = calibrate(epsilon, delta, q, steps)
    spent = Composition([Event(sigma, q, steps)]).epsilon(delta)
    assert 0.99 * epsilon <= spent <= epsilon
    if q == 1:
        assert exact_gaussian_delta(math.sqrt(steps) / sigma, epsilon) <= delta


def test_rule_16_calibration_of_the_nih_experiment():
    """q = 200 / 80726, 36,000 steps, epsilon 1: sigma about 1.894."""
    sigma = calibrate(1.0, 1e-5, 200 / 80726, 36_000)
    assert sigma == pytest.approx(1.894, abs=0.003)
    assert 0.99 <= Composition([Event(sigma, 200 / 80726, 36_000)]).epsilon(1e-5) <= 1


def test_calibration_where_delta_alone_pays_returns_some_noise():
    """A unit is sampled less often than delta, so any noise meets the target."""
    sigma = calibrate(0.01, 0.05, 0.04, 1)
    assert 0 < sigma < 1
    assert Composition([Event(sigma, 0.04, 1)]).epsilon(0.05) <= 0.01


@pytest.mark.parametrize(
    ("epsilon", "delta", "q", "steps"),
    [
        (0.0, 1e-5, 1.0, 1),
        (-1.0, 1e-5, 1.0, 1),
        (math.nan, 1e-5, 1.0, 1),
        (math.inf, 1e-5, 1.0, 1),
        (1.0, 0.0, 1.0, 1),
        (1.0, 1.0, 1.0, 1),
        (1.0, 1e-5, 0.0, 1),
        (1.0, 1e-5, 1.1, 1),
        (1.0, 1e-5, math.nan, 1),
        (1.0, 1e-5, 1.0, 0),
    ],
)
def test_rule_17_calibration_refuses_what_is_no_target(epsilon, delta, q, steps):
    with pytest.raises(ValueError, match="calibrate needs"):
        calibrate(epsilon, delta, q, steps)


# -- composition ----------------------------------------------------------------------------------------------

MIX = Event(37.0, 1.0, 100)
TUNE = Event(1.2, 0.03, 30)
MORE = Event(3.0, 0.1, 40)
DELTA = 1e-5


def by_dp_accounting(*events: Event) -> float:
    """Compose by dp-accounting's own accountant, on a grid of ours."""
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    for event in events:
        single = GaussianDpEvent(event.noise_multiplier)
        if event.sampling_rate < 1:
            single = PoissonSampledDpEvent(event.sampling_rate, single)
        accountant.compose(single, event.steps)
    return accountant.get_epsilon(DELTA)


def touch(event: Event, *parts: str, split: str = "seed=0") -> Touch:
    return Touch(event, frozenset(parts), split)


def test_nothing_touched_costs_nothing():
    assert guarantee([], DELTA)["epsilon"] == 0.0


def test_rule_21_disjoint_parts_cost_their_maximum():
    touches = [touch(MIX, "mixing"), touch(TUNE, "finetune"), touch(MORE, "test")]
    singles = [guarantee([each], DELTA)["epsilon"] for each in touches]
    together = guarantee(touches, DELTA)
    assert len(set(singles)) == 3
    assert together["epsilon"] == max(singles)
    assert together["composition"].startswith("parallel")
    for key in ("epsilon_at_delta", "delta_at_epsilon"):
        for point, value in together["curve"][key].items():
            assert value == max(guarantee([each], DELTA)["curve"][key][point] for each in touches)


def test_rule_21_overlapping_parts_compose_sequentially():
    touches = [touch(MIX, "mixing"), touch(TUNE, "mixing", "finetune"), touch(MORE, "finetune")]
    together = guarantee(touches, DELTA)
    expected = max(by_dp_accounting(MIX, TUNE), by_dp_accounting(TUNE, MORE))
    assert together["epsilon"] == pytest.approx(expected, rel=2e-3)
    assert together["composition"].startswith("sequential")
    assert together["epsilon"] < by_dp_accounting(MIX, TUNE, MORE) * 0.99, "mixing never meets the third touch"


def test_rule_21_split_keys_compose_sequentially_even_on_differently_named_parts():
    touches = [touch(TUNE, "mixing", split="seed=0"), touch(MORE, "finetune", split="seed=1")]
    together = guarantee(touches, DELTA)
    assert together["epsilon"] == pytest.approx(by_dp_accounting(TUNE, MORE), rel=2e-3)
    assert together["epsilon"] > 1.2 * max(guarantee([each], DELTA)["epsilon"] for each in touches)


def test_rule_21_five_seeds_of_a_full_batch_mechanism_cost_sqrt_5_in_mu():
    touches = [touch(MIX, "mixing", split=f"seed={seed}") for seed in range(5)]
    together = guarantee(touches, DELTA)
    assert together["curve"]["gaussian_mu"] == pytest.approx(math.sqrt(5 * 100) / 37)
    assert together["epsilon"] == pytest.approx(gaussian_epsilon(math.sqrt(500) / 37, DELTA))


def test_rule_21_mixed_full_batch_and_poisson_on_one_part():
    together = guarantee([touch(MIX, "mixing"), touch(TUNE, "mixing")], DELTA)
    assert together["epsilon"] == pytest.approx(by_dp_accounting(MIX, TUNE), rel=2e-3)
    assert together["curve"]["gaussian_mu"] is None


def test_worst_compositions_take_one_part_per_split_key():
    touches = [
        touch(MIX, "mixing", split="a"),
        touch(TUNE, "finetune", split="a"),
        touch(MORE, "mixing", "finetune", split="b"),
    ]
    found = {frozenset(composition.events) for composition in worst_compositions(touches)}
    assert found == {frozenset({MIX, MORE}), frozenset({TUNE, MORE})}


def test_curve_holds_every_reported_point_and_is_monotone():
    for composition in (Composition([MIX]), Composition([TUNE])):
        found = curve(composition)
        epsilons = [found["epsilon_at_delta"][f"{delta:g}"] for delta in REPORT_DELTAS]
        deltas = [found["delta_at_epsilon"][f"{epsilon:g}"] for epsilon in REPORT_EPSILONS]
        assert epsilons == sorted(epsilons)
        assert deltas == sorted(deltas, reverse=True)
        assert found["accountant"] == composition.accountant()


sigmas = st.floats(0.5, 50)
full_events = st.builds(Event, sigmas, st.just(1.0), st.integers(1, 50))
touches_of_one_run = st.lists(
    st.builds(
        Touch,
        full_events,
        st.sets(st.sampled_from(["mixing", "finetune", "test"]), min_size=1).map(frozenset),
        st.sampled_from(["a", "b"]),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(touches_of_one_run, st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_rule_17_one_more_touch_never_costs_less_and_epsilon_is_finite(touches, delta):
    before, after = guarantee(touches[:-1], delta), guarantee(touches, delta)
    assert 0 <= before["epsilon"] <= after["epsilon"] * (1 + 1e-12) < math.inf


@settings(max_examples=60, deadline=None)
@given(full_events, st.floats(1.01, 3), st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_more_noise_costs_less_and_more_steps_cost_more(event, factor, delta):
    epsilon = Composition([event]).epsilon(delta)
    noisier = Event(event.noise_multiplier * factor, 1.0, event.steps)
    longer = Event(event.noise_multiplier, 1.0, event.steps + 1)
    assert Composition([noisier]).epsilon(delta) <= epsilon <= Composition([longer]).epsilon(delta)


@settings(max_examples=12, deadline=None)
@given(st.floats(0.8, 20), st.floats(0.01, 0.5), st.integers(1, 100))
def test_sampling_more_often_costs_more_and_full_batch_most(sigma, q, steps):
    found = [Composition([Event(sigma, rate, steps)]).epsilon(DELTA) for rate in (q, min(1.2 * q, 1.0), 1.0)]
    assert found[0] <= found[1] * (1 + 1e-3)
    assert found[1] <= found[2] * (1 + 1e-3)


def test_an_optimistic_composition_would_fail_the_one_step_check():
    """Control: the lower bound really lies below, so the bracket says something."""
    event = Event(1.0, 0.1, 1)
    removed, _ = hockey_sticks(1.0, 0.1, 0.2)
    assert Composition([event], grid=1e-3, pessimistic=False).delta(0.2) < removed
    assert accounting.grid_for([event]) <= 1e-3
