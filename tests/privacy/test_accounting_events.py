"""Adjacency, pure and selected events, groups, fallback and reports of the accountant (rules 16, 17, 21, 27)."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from hockey import hockey_stick, mixture
from scipy.stats import binom

from dpmixmin.privacy import accounting, pld, step_laws
from dpmixmin.privacy.accounting import REPORT_DELTAS, REPORT_EPSILONS, Composition, curve
from dpmixmin.privacy.events import ADD_REMOVE, REPLACE_ONE, ZERO_OUT, GaussianEvent, PureEvent, RepeatSelectEvent
from dpmixmin.privacy.gaussian import gaussian_epsilon
from dpmixmin.privacy.renyi import group_bound, renyi_delta

ALMOST_FULL = 1 - 1e-12
"""A Poisson rate so near to 1 that only the accountant's branch differs from a full batch."""

MIX = GaussianEvent(37.0, 1.0, 100)
TUNE = GaussianEvent(1.2, 0.03, 30)
MORE = GaussianEvent(3.0, 0.1, 40)
PURE = PureEvent(0.4, 0.8)
DELTA = 1e-5


# -- adjacency --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, math.sqrt(2), 2.0])
def test_replace_one_multiplies_mu_of_full_batches(factor):
    event = GaussianEvent(10.0, 1.0, 4, factor)
    assert Composition([event], adjacency=REPLACE_ONE).mu == pytest.approx(factor * 0.2)
    both = Composition([event, MIX], adjacency=REPLACE_ONE)
    assert both.mu == pytest.approx(math.hypot(factor * 0.2, 2 * 10 / 37))


def test_replace_one_of_sampled_steps_costs_between_once_and_twice_and_the_group_of_two():
    one = Composition([TUNE]).epsilon(DELTA)
    replaced = Composition([TUNE], adjacency=REPLACE_ONE).epsilon(DELTA)
    assert one < replaced < group_bound(Composition([TUNE]).delta, 2, DELTA)


@pytest.mark.parametrize("events", [(MIX,), (TUNE, MIX), (PURE,), (PURE, TUNE)])
def test_zero_out_costs_what_add_remove_costs(events):
    one, other = Composition(events), Composition(events, adjacency=ZERO_OUT)
    assert one.epsilon(DELTA) == other.epsilon(DELTA)
    assert one.group_epsilon(3, DELTA) == other.group_epsilon(3, DELTA)


# -- pure-DP events ---------------------------------------------------------------------------------------------


def test_one_pure_event_has_the_closed_form_of_randomised_response():
    keep = 1 / (1 + math.exp(-0.4))
    composition = Composition([PURE])
    for epsilon in (0.0, 0.1, 0.39, 0.4, 3.0):
        expected = max(0.0, keep - math.exp(epsilon) * (1 - keep))
        assert composition.delta(epsilon) == pytest.approx(expected, abs=1e-15)
    for delta in (0.0, 1e-9, 0.1):
        assert composition.delta(composition.epsilon(delta)) == pytest.approx(delta, abs=1e-15)
    assert composition.epsilon(0.0) == pytest.approx(0.4)
    assert composition.epsilon(0.9) == pytest.approx(0.0, abs=1e-12)
    assert composition.accountant() == "pure DP (exact)"


@pytest.mark.parametrize("adjacency", [ADD_REMOVE, REPLACE_ONE])
@pytest.mark.parametrize("times", [2, 5, 40])
def test_rule_21_pure_events_compose_as_randomised_response_and_below_the_sum(adjacency, times):
    """Kairouz et al. 1311.0776: the optimal composition is that of randomised responses, a binomial."""
    each = 0.4 if adjacency == ADD_REMOVE else 0.8
    composition = Composition([PURE] * times, adjacency=adjacency)
    keep = 1 / (1 + math.exp(-each))
    heads = np.arange(times + 1)
    losses, masses = (2 * heads - times) * each, binom.pmf(heads, times, keep)

    def exact(epsilon):
        return float(np.sum(masses * np.maximum(0, -np.expm1(epsilon - losses))))

    for epsilon in (0.3, 1.0, 2.0):
        # The grid moves epsilon upwards by at most a thousandth.
        assert exact(epsilon) * (1 - 1e-9) <= composition.delta(epsilon) <= exact(epsilon * 0.999 - 1e-3) * (1 + 1e-9)
    assert composition.epsilon(0.0) == pytest.approx(times * each)
    for delta in (1e-12, 1e-6, 1e-3):
        epsilon = composition.epsilon(delta)
        assert epsilon <= times * each * (1 + 1e-12)
        assert exact(epsilon) <= delta * (1 + 1e-9) <= exact(epsilon * 0.999) * (1 + 1e-9)


def test_rule_21_a_pure_and_a_sampled_event_compose_below_the_sum_and_above_each():
    together = Composition([PURE, TUNE]).epsilon(DELTA)
    assert max(0.4, Composition([TUNE]).epsilon(DELTA)) < together < 0.4 + Composition([TUNE]).epsilon(DELTA)
    grid = 1e-4
    law = privacy_loss_distribution.from_gaussian_mechanism(
        TUNE.noise_multiplier, sampling_prob=TUNE.sampling_rate, value_discretization_interval=grid
    ).self_compose(TUNE.steps)
    parameters = dp_accounting.pld.common.DifferentialPrivacyParameters(0.4, 0.0)
    law = law.compose(privacy_loss_distribution.from_privacy_parameters(parameters, grid))
    assert together == pytest.approx(law.get_epsilon_for_delta(DELTA), rel=2e-3)


# -- repeat and select --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, math.inf])
def test_repeat_and_select_equals_dp_accountings_own(shape):
    base = (GaussianEvent(5.0, 1.0, 2), GaussianEvent(4.0, 0.1, 10))
    event = RepeatSelectEvent(base, 8.0, shape, 1e-6)
    inner = dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(5.0), 2),
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(4.0)), 10
            ),
        ]
    )
    expected = RdpAccountant().compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(inner, 8.0, shape))
    composition = Composition([event])
    # With delta well above the share only the closed form of an (epsilon, share) mechanism is left.
    assert composition.epsilon(1e-6 * (1 + 1e-9)) == pytest.approx(expected.get_epsilon(1e-6), rel=2e-4)
    assert composition.epsilon(1e-6) == math.inf
    assert composition.epsilon(1e-7) == math.inf
    assert composition.delta_share == 1e-6
    assert "repeat-and-select" in composition.accountant()


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("adjacency", [ADD_REMOVE, REPLACE_ONE])
def test_repeating_a_pure_base_costs_at_most_2_plus_shape(shape, adjacency):
    event = RepeatSelectEvent((PureEvent(0.1, 0.15),), 20.0, shape, 1e-9)
    epsilon = Composition([event], adjacency=adjacency).epsilon(2e-9)
    assert 0 < epsilon <= (2 + shape) * (0.1 if adjacency == ADD_REMOVE else 0.15)


def test_selection_by_brute_force_stays_within_the_guarantee():
    """Randomised response repeated a geometric number of times, the best of which is released: its law in closed form.

    A run says 1 with probability p on D and 1 - p on D′. The maximum of K runs is 1 unless all say 0.
    """
    base, mean = 0.3, 5.0
    p = 1 / (1 + math.exp(-base))
    generating = lambda z: (z / mean) / (1 - (1 - 1 / mean) * z)  # noqa: E731
    zero, zero_neighbour = generating(1 - p), generating(p)
    worst = max(abs(math.log(zero / zero_neighbour)), abs(math.log((1 - zero) / (1 - zero_neighbour))))
    epsilon = Composition([RepeatSelectEvent((PureEvent(base, base),), mean, 1.0, 1e-9)]).epsilon(2e-9)
    assert base < worst <= epsilon


def test_rule_21_repeat_and_select_composes_and_its_share_adds_up():
    event = RepeatSelectEvent((GaussianEvent(5.0, 1.0, 1),), 10.0, math.inf, 1e-6)
    alone, together = Composition([event]), Composition([event, TUNE, event])
    assert together.delta_share == 2e-6
    assert together.epsilon(2e-6) == math.inf
    assert alone.epsilon(DELTA) < together.epsilon(DELTA)
    parts = 2 * alone.epsilon(1.5e-6) + Composition([TUNE]).epsilon(DELTA - 3e-6)
    assert together.epsilon(DELTA) <= parts


def test_repeat_and_select_under_replace_one_is_sound():
    full = RepeatSelectEvent((GaussianEvent(5.0, 1.0, 1),), 10.0, 1.0, 1e-6)
    doubled = RepeatSelectEvent((GaussianEvent(2.5, 1.0, 1),), 10.0, 1.0, 1e-6)
    assert Composition([full], adjacency=REPLACE_ONE).epsilon(DELTA) == Composition([doubled]).epsilon(DELTA)
    # Sampled: a removal and an addition, so at least twice the epsilon.
    sampled = RepeatSelectEvent((GaussianEvent(5.0, 0.1, 10),), 10.0, 1.0, 1e-6)
    replaced = Composition([sampled], adjacency=REPLACE_ONE).epsilon(1e-6 * (1 + 1e-9))
    assert replaced >= 2 * Composition([sampled]).epsilon(1e-6 * (1 + 1e-9))


# -- groups -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [2, 3, 10])
def test_groups_of_a_full_batch_multiply_mu(members):
    exact = gaussian_epsilon(members * MIX.steps**0.5 / 37, DELTA)
    assert Composition([MIX]).group_epsilon(members, DELTA) == pytest.approx(exact)
    sampled = Composition([GaussianEvent(37.0, ALMOST_FULL, 100)]).group_epsilon(members, DELTA)
    assert exact * (1 - 1e-9) <= sampled <= exact * 1.001


@pytest.mark.parametrize("members", [2, 5])
def test_groups_of_one_sampled_step_against_the_binomial_mixture(members):
    sigma, q, epsilon = 0.8, 0.1, 1.0
    weights = binom.pmf(range(members + 1), members, q)
    exact = max(
        hockey_stick(mixture(weights, range(members + 1), sigma), mixture([1], [0], sigma), epsilon, sigma),
        hockey_stick(mixture([1], [0], sigma), mixture(weights, range(members + 1), sigma), epsilon, sigma),
    )
    found = Composition([GaussianEvent(sigma, q, 1)]).group_epsilon(members, exact)
    assert epsilon * (1 - 1e-9) <= found <= epsilon * 1.001


@pytest.mark.parametrize("events", [(TUNE,), (TUNE, MIX), (TUNE, PURE), (GaussianEvent(0.7, 0.004, 50),)])
@pytest.mark.parametrize("members", [2, 5])
def test_groups_never_cost_more_than_the_bound_for_every_mechanism(events, members):
    composition = Composition(events)
    found = composition.group_epsilon(members, DELTA)
    single = Composition(events, tolerance=3e-3)
    assert composition.epsilon(DELTA) < found <= group_bound(single.delta, members, DELTA)


def test_groups_multiply_mu_of_full_batches_beside_sampled_steps_too():
    quiet = GaussianEvent(50.0, 0.01, 1)
    found = Composition([quiet, GaussianEvent(5.0, 1.0, 4)]).group_epsilon(3, DELTA)
    assert gaussian_epsilon(3 * 0.4, DELTA) <= found <= 1.01 * gaussian_epsilon(3 * 0.4, DELTA)


def test_group_bound_of_a_pure_mechanism_is_members_times_epsilon():
    composition = Composition([PURE])
    assert composition.group_epsilon(5, 1e-12) == pytest.approx(5 * 0.4, rel=1e-3)
    assert group_bound(composition.delta, 5, 1e-12) == pytest.approx(5 * 0.4, rel=1e-3)


def test_groups_where_only_the_general_bound_is_known():
    replaced = Composition([TUNE], adjacency=REPLACE_ONE)
    bound = group_bound(replaced.delta, 2, DELTA)
    assert replaced.group_epsilon(2, DELTA) == pytest.approx(bound, rel=5e-3)
    selected = Composition([RepeatSelectEvent((GaussianEvent(20.0, 1.0, 1),), 10.0, 1.0, 1e-9)])
    assert 2 * selected.epsilon(DELTA) <= selected.group_epsilon(2, DELTA) < math.inf
    assert selected.group_epsilon(2, 1.5e-9) == math.inf


@pytest.mark.parametrize("members", [0, -1, 1.5])
def test_groups_have_a_whole_number_of_members(members):
    with pytest.raises(ValueError, match="group"):
        Composition([MIX]).group_epsilon(members, DELTA)


# -- laws of single steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [1, 3])
def test_group_laws_equal_dp_accountings_mixture_of_gaussians(members):
    grid, sigma, q = 0.01, 0.9, 0.07
    ours = step_laws.group_step(sigma, q, 1, members, grid)
    shifts = list(range(members + 1))
    theirs = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        sigma, shifts, binom.pmf(shifts, members, q).tolist(), value_discretization_interval=grid
    )
    for step, pmf in zip(ours, (theirs._pmf_remove, theirs._pmf_add), strict=True):
        assert step.probabilities.sum() + step.infinite == pytest.approx(1.0, abs=1e-12)
        mine = {step.lowest + i: mass for i, mass in enumerate(step.probabilities)}
        dense = pmf.to_dense_pmf()
        yours = {dense._lower_loss + i: mass for i, mass in enumerate(dense._probs)}
        for index in mine.keys() | yours.keys():
            assert mine.get(index, 0.0) == pytest.approx(yours.get(index, 0.0), abs=1e-10)


# -- fallback -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [MemoryError("too large"), FloatingPointError("not finite")])
def test_rule_16_a_failed_pld_falls_back_to_renyi_loudly_and_stays_above(error, monkeypatch, capsys):
    events = (TUNE, PURE, MIX)
    expected = Composition(events).epsilon(DELTA)

    def fail(*args):
        raise error

    monkeypatch.setattr(step_laws, "gaussian_step", fail)
    monkeypatch.setattr(step_laws, "group_step", fail)
    for adjacency, factor in ((ADD_REMOVE, 1.5), (REPLACE_ONE, 6.0)):
        composition = Composition(events, adjacency=adjacency)
        epsilon = composition.epsilon(DELTA)
        assert expected < epsilon < factor * expected
        assert composition.delta(epsilon) == pytest.approx(DELTA, rel=0.02)
        assert composition.group_epsilon(2, DELTA) > 2 * epsilon
        assert "FALLBACK" in composition.accountant()
        assert type(error).__name__ in curve(composition, DELTA)["accountant"]
        printed = capsys.readouterr().err
        assert "FALLBACK" in printed
        assert printed.count("\n") == 1, "once, in one line"


def test_renyi_of_sampled_steps_under_replace_one_is_a_removal_and_an_addition():
    one, replaced = renyi_delta([TUNE], ADD_REMOVE), renyi_delta([TUNE], REPLACE_ONE)
    for epsilon in (0.5, 1.0, 2.0):
        assert replaced(2 * epsilon) == pytest.approx((1 + math.exp(epsilon)) * one(epsilon))


@pytest.mark.parametrize("adjacency", [ADD_REMOVE, REPLACE_ONE])
def test_renyi_of_many_pure_events_lies_above_their_exact_composition(adjacency):
    events = [PureEvent(0.1, 0.2)] * 100
    bound, exact = renyi_delta(events, adjacency), Composition(events, adjacency=adjacency)
    for epsilon in (3.0, 4.0, 6.0):
        assert exact.delta(epsilon) < bound(epsilon) < 30 * exact.delta(epsilon)


def test_rule_16_a_failed_lower_bound_is_no_number(monkeypatch):
    monkeypatch.setattr(pld, "MAX_POINTS", 4)
    with pytest.raises(ArithmeticError, match="no lower bound"):
        Composition([TUNE], pessimistic=False).epsilon(DELTA)


def test_a_grid_that_does_not_fit_is_coarsened_before_falling_back(monkeypatch):
    exact = Composition([TUNE]).epsilon(DELTA)
    monkeypatch.setattr(pld, "MAX_POINTS", 2000)
    composition = Composition([TUNE])
    assert exact < composition.epsilon(DELTA) < 1.3 * exact
    assert "FALLBACK" not in composition.accountant()


# -- reports --------------------------------------------------------------------------------------------------------


def test_curve_holds_every_reported_point_and_is_monotone():
    for composition in (Composition([MIX]), Composition([TUNE]), Composition([TUNE, PURE])):
        found = curve(composition, DELTA)
        epsilons = [found["epsilon_at_delta"][f"{delta:g}"] for delta in REPORT_DELTAS]
        deltas = [found["delta_at_epsilon"][f"{epsilon:g}"] for epsilon in REPORT_EPSILONS]
        assert epsilons == sorted(epsilons)
        assert deltas == sorted(deltas, reverse=True)
        assert found["accountant"] == composition.accountant()
        assert found["gaussian_mu"] == composition.mu
        groups = [found["group_epsilon"][members] for members in ("2", "5", "10")]
        assert [composition.epsilon(DELTA), *groups] == sorted([composition.epsilon(DELTA), *groups])


def test_curve_has_null_for_infinity():
    import json

    event = RepeatSelectEvent((GaussianEvent(5.0, 1.0, 1),), 10.0, math.inf, 1e-6)
    found = json.loads(json.dumps(curve(Composition([event, TUNE]), DELTA), allow_nan=False))
    assert found["epsilon_at_delta"]["1e-06"] is None
    assert found["epsilon_at_delta"]["1e-05"] > 0
    assert found["group_epsilon"]["10"] is None


def test_epsilon_and_delta_are_inverse_up_to_the_grid():
    composition = Composition([TUNE, MORE, MIX])
    for delta in (1e-3, 1e-6, 1e-10):
        assert composition.delta(composition.epsilon(delta)) == pytest.approx(delta, rel=0.02)


def test_the_report_constants_are_public():
    assert accounting.REPORT_DELTAS[2] == 1e-5
    assert accounting.REPORT_EPSILONS[2] == 1.0
