"""Accounting against independent formulas and accountants (rules 16, 17, 21)."""

import itertools
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from hockey import hockey_stick, mixture
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from dpmixmin.privacy import pld, step_laws
from dpmixmin.privacy.accounting import Composition
from dpmixmin.privacy.events import ADD_REMOVE, REPLACE_ONE, GaussianEvent, PureEvent
from dpmixmin.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu

ALMOST_FULL = 1 - 1e-12
"""A Poisson rate so near to 1 that only the accountant's branch differs from a full batch."""

MIX = GaussianEvent(37.0, 1.0, 100)
TUNE = GaussianEvent(1.2, 0.03, 30)
MORE = GaussianEvent(3.0, 0.1, 40)
PURE = PureEvent(0.4, 0.8)
DELTA = 1e-5


def exact_gaussian_delta(mu: float, epsilon: float) -> mpmath.mpf:
    """Balle & Wang 2018, Theorem 8, with 60 digits."""
    with mpmath.workdps(60):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


# -- the Gaussian mechanism -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [1e-4, 1e-3, 0.01, 0.268, 1.0, 5.0, 20.0, 100.0])
@pytest.mark.parametrize("epsilon", [0.0, 1e-4, 0.01, 0.5, 5.0, 50.0, 5000.0])
def test_rule_16_gaussian_delta_equals_the_formula_in_60_digits(mu, epsilon):
    exact = exact_gaussian_delta(mu, epsilon)
    if exact < 1e-290:
        assert gaussian_delta(mu, epsilon) < 1e-280
    else:
        assert gaussian_delta(mu, epsilon) == pytest.approx(float(exact), rel=1e-11)


@pytest.mark.parametrize(("epsilon", "sigma"), [(1, 3.731), (2, 1.994), (5, 0.892)])
def test_rule_16_published_noise_at_delta_1e_5(epsilon, sigma):
    """The noise multipliers that the mixture uses at epsilon 1, 2 and 5."""
    assert 1 / gaussian_mu(epsilon, 1e-5) == pytest.approx(sigma, abs=6e-4)


@pytest.mark.parametrize(
    ("epsilon", "delta"), [*itertools.product((0.01, 1.0, 50.0), (1e-12, 1e-5, 1e-2)), (0.0, 1e-5), (0.0, 1e-2)]
)
def test_gaussian_inverses_stand_on_the_safe_side(epsilon, delta):
    mu = gaussian_mu(epsilon, delta)
    assert exact_gaussian_delta(mu, epsilon) <= delta
    assert exact_gaussian_delta(mu * (1 + 1e-8), epsilon) > delta
    found = gaussian_epsilon(mu, delta)
    assert found == 0 or exact_gaussian_delta(mu, found) <= delta
    assert found == pytest.approx(epsilon, rel=1e-8, abs=1e-12)


def test_gaussian_epsilon_at_the_ends():
    assert gaussian_epsilon(1e-6, 1e-5) == 0.0
    assert gaussian_delta(0.0, 0.0) == 0.0
    assert gaussian_epsilon(0.0, 0.0) == 0.0
    assert gaussian_epsilon(1.0, 0.0) == math.inf
    assert gaussian_epsilon(1e-4, 1e-12) > 0


# -- Poisson sampling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.1), (3.0, 0.5), (0.6, 0.01)])
def test_rule_16_one_poisson_step_against_the_hockey_stick(sigma, q):
    composition = Composition([GaussianEvent(sigma, q, 1)])
    without, with_unit = mixture([1], [0], sigma), mixture([1 - q, q], [0, 1], sigma)
    for epsilon in (0.05, 0.2, 0.5):
        removed = hockey_stick(with_unit, without, epsilon, sigma)
        added = hockey_stick(without, with_unit, epsilon, sigma)
        assert removed > added
        assert removed * (1 - 1e-9) <= composition.delta(epsilon) <= removed * 1.003


@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.1), (3.0, 0.5), (0.6, 0.01)])
def test_one_poisson_step_under_replace_one_against_the_pair_of_mixtures(sigma, q):
    event = GaussianEvent(sigma, q, 1)
    composition = Composition([event], adjacency=REPLACE_ONE)
    one, other = mixture([1 - q, q], [0, 1], sigma), mixture([1 - q, q], [0, -1], sigma)
    for epsilon in (0.05, 0.3, 1.0):
        exact = hockey_stick(one, other, epsilon, sigma)
        assert exact * (1 - 1e-9) <= composition.delta(epsilon) <= exact * 1.02
        # A replacement is a removal and an addition.
        half = Composition([event]).delta(epsilon / 2)
        assert composition.delta(epsilon) <= half * (1 + math.exp(epsilon / 2))


def test_rule_16_an_optimistic_composition_would_fail_the_one_step_check():
    """Control: the lower bound really lies below, so the bracket says something."""
    removed = hockey_stick(mixture([0.9, 0.1], [0, 1], 1.0), mixture([1], [0], 1.0), 0.2, 1.0)
    for grid in (1e-3, 0.05, 0.5):
        lower = Composition([GaussianEvent(1.0, 0.1, 1)], grid=grid, pessimistic=False)
        assert lower.delta(0.2) < removed
        assert lower.epsilon(removed) < 0.2
    assert "LOWER" in lower.accountant()


@pytest.mark.parametrize(("sigma", "steps"), [(3.731, 1), (37.31, 100), (0.892, 1), (50.0, 3)])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-12])
def test_rule_16_poisson_with_rate_1_is_the_gaussian_mechanism(sigma, steps, delta):
    exact = Composition([GaussianEvent(sigma, 1.0, steps)])
    sampled = Composition([GaussianEvent(sigma, ALMOST_FULL, steps)])
    assert exact.mu == pytest.approx(math.sqrt(steps) / sigma)
    assert sampled.mu is None
    assert 1 - 1e-9 <= sampled.epsilon(delta) / exact.epsilon(delta) <= 1.001
    epsilon = exact.epsilon(delta)
    assert 1 - 1e-9 <= sampled.delta(epsilon) / exact.delta(epsilon) <= 1.05


@pytest.mark.parametrize(("delta", "log_tail"), [(1e-12, 1.0), (1e-20, 1.0)])
def test_rule_16_tiny_deltas_after_many_steps_keep_their_digits(delta, log_tail):
    """36,000 steps: a plain Fourier transform has an absolute error near 1e-13, a tilted one a relative error."""
    sigma = 36_000**0.5 / gaussian_mu(1.0, delta)
    sampled = Composition([GaussianEvent(sigma, ALMOST_FULL, 36_000)])
    assert 1.0 - 1e-9 <= sampled.epsilon(delta) <= 1.001


BRACKETS = [  # sigma, q, steps, delta
    (1.1, 0.03, 30, 1e-5),
    (3.94, 0.1, 100, 1e-5),
    (2.0, 0.01, 1000, 1e-6),
    (2.0, 0.01, 1000, 1e-12),
    (1000.0, 0.5, 10, 1e-5),
    (0.3, 0.01, 10, 1e-5),
    (0.33, 0.01, 100, 1e-8),
    (0.6, 1e-3, 10, 1e-6),
    (0.6, 1e-4, 10, 1e-7),
    (0.15, 1e-4, 1, 1e-12),
    (4.7, 1e-4, 36_000, 1e-5),
    (272.0, 0.0025, 36_000, 1e-12),
    pytest.param(1.9, 0.0025, 36_000, 1e-5, marks=pytest.mark.slow),
    (33.0, 0.9, 36_000, 1e-12),
]


@pytest.mark.parametrize(("sigma", "q", "steps", "delta"), BRACKETS)
@pytest.mark.parametrize("adjacency", [ADD_REMOVE, REPLACE_ONE])
def test_rule_16_bracket_of_upper_and_lower_bound_is_within_1_percent(sigma, q, steps, delta, adjacency):
    event = GaussianEvent(sigma, q, steps)
    upper = Composition([event], adjacency=adjacency).epsilon(delta)
    lower = Composition([event], adjacency=adjacency, pessimistic=False, tolerance=4e-3).epsilon(delta)
    assert 0 < lower <= upper <= 1.01 * lower


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
    ours = Composition([GaussianEvent(sigma, q, steps)]).epsilon(delta)
    assert low <= ours <= high
    assert ours == pytest.approx(estimate, rel=1e-3)


@pytest.mark.parametrize("epsilon", [0.01, 50.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-12])
def test_rule_16_the_ends_of_the_range_compose_to_the_gaussian_limit(epsilon, delta):
    """At rate 1/2 and 36,000 steps of much noise the central limit is reached: mu = q sqrt(T (e^(1/sigma²) - 1))."""
    mu = gaussian_mu(epsilon, delta)
    sigma = 1 / math.sqrt(math.log1p((mu / 0.5) ** 2 / 36_000))
    assert Composition([GaussianEvent(sigma, 0.5, 36_000)]).epsilon(delta) == pytest.approx(epsilon, rel=0.02)


def test_a_given_grid_is_an_upper_bound_and_a_coarse_one_costs_more():
    found = [Composition([TUNE], grid=grid).epsilon(DELTA) for grid in (1e-3, 0.05, 0.5)]
    best = Composition([TUNE]).epsilon(DELTA)
    assert best * 0.999 < found[0] < found[1] < found[2]


# -- composition ----------------------------------------------------------------------------------------------


def by_dp_accounting(*events: GaussianEvent, delta: float = DELTA) -> float:
    """Compose by dp-accounting's own accountant, on a grid of ours."""
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    for event in events:
        single = dp_accounting.GaussianDpEvent(event.noise_multiplier)
        if event.sampling_rate < 1:
            single = dp_accounting.PoissonSampledDpEvent(event.sampling_rate, single)
        accountant.compose(single, event.steps)
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize("events", [(TUNE,), (TUNE, MORE), (MIX, TUNE), (MIX, TUNE, MORE), (TUNE, TUNE)])
def test_rule_21_composition_equals_dp_accountings_own(events):
    assert Composition(events).epsilon(DELTA) == pytest.approx(by_dp_accounting(*events), rel=2e-3)


def test_rule_21_full_batches_compose_in_mu():
    composition = Composition([MIX] * 5)
    assert composition.mu == pytest.approx(math.sqrt(500) / 37)
    assert composition.epsilon(DELTA) == pytest.approx(gaussian_epsilon(math.sqrt(500) / 37, DELTA))


def test_nothing_composes_to_nothing():
    empty = Composition([])
    assert (empty.epsilon(DELTA), empty.delta(0.0), empty.mu, empty.delta_share) == (0.0, 0.0, 0.0, 0)
    assert empty.group_epsilon(7, DELTA) == 0.0


def test_unknown_events_and_adjacencies_are_refused():
    with pytest.raises(ValueError, match="kinds"):
        Composition([(1.0, 0.1, 3)])
    with pytest.raises(ValueError, match="adjacency"):
        Composition([], adjacency="swap")
    with pytest.raises(ValueError, match="lower bounds"):
        Composition([PURE], pessimistic=False)
    with pytest.raises(ValueError, match="lower bounds"):
        Composition([TUNE], pessimistic=False).group_epsilon(2, DELTA)


sigmas = st.floats(0.5, 50)
full_events = st.builds(GaussianEvent, sigmas, st.just(1.0), st.integers(1, 50))


@settings(max_examples=60, deadline=None)
@given(full_events, st.floats(1.01, 3), st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_more_noise_costs_less_and_more_steps_cost_more(event, factor, delta):
    epsilon = Composition([event]).epsilon(delta)
    noisier = GaussianEvent(event.noise_multiplier * factor, 1.0, event.steps)
    longer = GaussianEvent(event.noise_multiplier, 1.0, event.steps + 1)
    assert Composition([noisier]).epsilon(delta) <= epsilon <= Composition([longer]).epsilon(delta)


@settings(max_examples=15, deadline=None)
@given(
    st.floats(0.5, 20), st.floats(0.005, 0.5), st.integers(1, 100), st.sampled_from([1e-3, 1e-5, 1e-9]), st.booleans()
)
def test_rule_17_sampled_steps_cost_more_with_rate_and_steps_and_less_with_noise(sigma, q, steps, delta, replace):
    """Up to what the grid may cost."""

    def cost(sigma, rate, steps):
        adjacency = REPLACE_ONE if replace else ADD_REMOVE
        return Composition([GaussianEvent(sigma, rate, steps)], adjacency=adjacency).epsilon(delta)

    base = cost(sigma, q, steps)
    assert 0 <= base < math.inf
    for larger in (cost(sigma, min(1.3 * q, 1.0), steps), cost(sigma, q, 2 * steps), cost(sigma / 1.2, q, steps)):
        assert base <= larger * (1 + 1e-3) + 1e-6
    assert base <= cost(sigma, 1.0, steps) * (1 + 1e-3)


@pytest.mark.parametrize(("steps", "chance", "infinite"), [(1000, 0.5, 0.0), (36_000, 0.501, 1e-12), (50, 0.6, 1e-4)])
def test_rule_16_windows_never_undercount_an_exact_binomial(steps, chance, infinite):
    """Coins as privacy losses of ±0.01: their sum is known in closed form, also far out."""
    law = step_laws.Step(-1, np.array([1 - chance, 0.0, chance]) * (1 - infinite), infinite, steps)
    direction = pld.Direction([law], 0.01, pessimistic=True)
    heads = np.arange(steps + 1)
    losses = (2 * heads - steps) * 0.01
    logs = binom.logpmf(heads, steps, chance)
    lost = -math.expm1(steps * math.log1p(-infinite))
    for epsilon in np.linspace(0.005, 0.01 * 12 * steps**0.5, 60):
        above = losses > epsilon
        exact = math.fsum(np.exp(logs[above]) * -np.expm1(epsilon - losses[above]))
        exact = lost + (1 - lost) * exact
        found, _ = direction.delta(float(epsilon))
        # scipy's log masses are good to about 1e-10; a plain transform is off by 1e-15 and more, absolutely.
        assert exact * (1 - 1e-9) <= found <= exact * (1 + 1e-5) + 1e-39
        again, _ = direction.epsilon(found * (1 + 1e-9))
        assert again <= epsilon + 1e-6


def test_rule_16_rounding_of_the_transform_is_counted_against_privacy():
    law = step_laws.Step(-1, np.array([0.499, 0.0, 0.501]), 0.0, 36_000)
    careful, careless = (pld.Direction([law], 0.01, pessimistic=flag).window(2.0) for flag in (True, False))
    assert careless.rounding == 0
    assert (careful.tilted >= careless.tilted + careful.rounding).all()
    assert careful.rounding > 36_000 * np.finfo(float).eps * careful.tilted.max()
