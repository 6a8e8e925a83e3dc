"""Bounds on epsilon from counted errors: against independent computations, and never above the truth too often."""

import math

import numpy as np
import pytest
from scipy.stats import binom, binomtest, norm

from dpmixmin.audit import attacks, bounds
from dpmixmin.audit.attacks import Attack
from dpmixmin.audit.bounds import Errors
from dpmixmin.audit.tradeoff import Tradeoff, scaled_family
from dpmixmin.privacy.accounting import Composition
from dpmixmin.privacy.events import GaussianEvent
from dpmixmin.privacy.gaussian import gaussian_epsilon, gaussian_mu

DELTA = 1e-5


def grid_of_errors(runs: int) -> list[Errors]:
    return [Errors(fp, runs, fn, runs) for fp in range(runs + 1) for fn in range(runs + 1)]


def probability(errors: list[Errors], fpr: float, fnr: float, happens) -> float:
    """Return the exact probability, over the two binomial counts, of those errors for which something happens."""
    return sum(
        binom.pmf(each.false_positives, each.without, fpr) * binom.pmf(each.false_negatives, each.with_canary, fnr)
        for each in errors
        if happens(each)
    )


# -- Clopper-Pearson --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trials", [1, 7, 1000])
@pytest.mark.parametrize("tail", [0.5, 0.025, 5e-13])
def test_the_upper_end_is_where_so_few_errors_have_the_tail_s_probability(trials, tail):
    for errors in sorted({0, 1, trials // 2, trials - 1} - {trials}):
        end = bounds.upper(errors, trials, tail)
        assert binom.cdf(errors, trials, end) == pytest.approx(tail, rel=1e-7)
    assert bounds.upper(0, trials, tail) == pytest.approx(-math.expm1(math.log(tail) / trials), rel=1e-12)
    assert bounds.upper(trials, trials, tail) == 1.0
    ends = bounds.upper_ends(trials, tail)
    assert ends.tolist() == [bounds.upper(errors, trials, tail) for errors in range(trials + 1)]
    assert (np.diff(ends) > 0).all() or trials == 1


def test_the_upper_end_is_scipy_s_exact_interval():
    for errors, trials in ((0, 20), (3, 20), (400, 1000)):
        interval = binomtest(errors, trials).proportion_ci(0.95, "exact")
        assert bounds.upper(errors, trials, 0.025) == pytest.approx(interval.high, rel=1e-9)


def test_no_trial_bounds_nothing():
    assert bounds.upper(0, 0, 0.025) == 1.0
    nothing = Errors(0, 0, 3, 10)
    assert bounds.dp_bound(nothing, DELTA) == bounds.gaussian_bound(nothing, DELTA) == 0.0
    assert bounds.p_value(nothing, lambda confidence: bounds.dp_bound(nothing, DELTA, confidence) > 0) == 1.0


@pytest.mark.parametrize("rate", [0.0, 0.003, 0.2, 0.5, 0.97, 1.0])
def test_the_upper_end_is_below_the_rate_with_at_most_the_tail_s_probability(rate):
    for runs in (5, 60):
        ends, counts = bounds.upper_ends(runs, 0.025), np.arange(runs + 1)
        assert binom.pmf(counts[ends < rate], runs, rate).sum() <= 0.025


@pytest.mark.parametrize("wrong", [(-1, 5, 0, 5), (6, 5, 0, 5), (0, 5, 6, 5), (0.5, 5, 0, 5), (0, -1, 0, 5)])
def test_errors_must_be_counts(wrong):
    with pytest.raises(ValueError, match="whole numbers"):
        Errors(*wrong)


def test_what_is_out_of_range_is_refused():
    some = Errors(1, 10, 1, 10)
    for confidence in (1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="confidence"):
            bounds.rates(some, confidence)
    for call in (
        lambda: bounds.dp_bound(some, 1.0),
        lambda: bounds.gaussian_bound(some, 0.0),
        lambda: bounds.upper(3, 2, 0.1),
        lambda: bounds.bonferroni(0.95, 0),
    ):
        with pytest.raises(ValueError, match=r"must lie|needs"):
            call()


# -- the bounds against their definitions -----------------------------------------------------------------------------


def test_the_paper_s_bound_by_hand():
    high, low = (binomtest(errors, 1000).proportion_ci(0.95, "exact").high for errors in (700, 3))
    expected = math.log((1 - high - DELTA) / low)
    assert bounds.dp_bound(Errors(3, 1000, 700, 1000), DELTA) == pytest.approx(expected, rel=1e-9)
    assert bounds.dp_bound(Errors(700, 1000, 3, 1000), DELTA) == pytest.approx(expected, rel=1e-9)
    assert bounds.dp_bound(Errors(500, 1000, 480, 1000), DELTA) == 0.0
    assert bounds.dp_bound(Errors(1000, 1000, 0, 1000), DELTA) == 0.0


def test_ceilings():
    assert bounds.dp_ceiling(1000, DELTA) == pytest.approx(5.60, abs=0.005)
    end = 1 - 0.025 ** (1 / 1000)
    assert bounds.dp_ceiling(1000, 0.0) == pytest.approx(math.log((1 - end) / end), rel=1e-12)
    perfect = Errors(0, 1000, 0, 1000)
    assert bounds.gaussian_mu(perfect) == pytest.approx(2 * norm.isf(end), rel=1e-9)
    assert bounds.gaussian_ceiling(1000, DELTA) == gaussian_epsilon(bounds.gaussian_mu(perfect), DELTA)
    for errors in grid_of_errors(12):
        assert bounds.dp_bound(errors, DELTA) <= bounds.dp_ceiling(12, DELTA)
        assert bounds.gaussian_bound(errors, DELTA) <= bounds.gaussian_ceiling(12, DELTA)


MANY = 10**10
"""So many runs that counts are rates: the bounds stay below the truth by what they know no better, not by more."""


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (2.0, 0.0), (1.0, 0.05)])
def test_with_many_runs_the_dp_bound_is_the_epsilon_of_randomised_response(epsilon, delta):
    # Sometimes the response betrays the unit's absence; reading it, nothing is ever falsely positive there.
    wrong = (1 - delta) / (1 + math.exp(epsilon))
    errors = Errors(round(MANY * wrong), MANY, round(MANY * (1 - delta - math.exp(epsilon) * wrong)), MANY)
    assert epsilon - 1e-3 < bounds.dp_bound(errors, delta) < epsilon


@pytest.mark.parametrize("mu", [0.3, 1.5, 4.0])
def test_with_many_runs_the_gaussian_bound_is_mu_at_every_threshold(mu):
    for threshold in (-0.5, mu / 2, mu):
        errors = Errors(round(MANY * norm.sf(threshold)), MANY, round(MANY * norm.cdf(threshold - mu)), MANY)
        assert mu - 5e-3 < bounds.gaussian_mu(errors) < mu
        assert bounds.gaussian_bound(errors, DELTA) == pytest.approx(gaussian_epsilon(mu, DELTA), rel=5e-3)


def test_a_claim_is_rejected_exactly_where_its_bound_exceeds_it():
    """Over all outcomes of a small audit; and refutation of a curve can come from either direction."""
    for claim in (0.2, 1.0):
        pure, gaussian = Tradeoff.pure(claim, 0.01), Tradeoff.gaussian(claim)
        for errors in grid_of_errors(25):
            assert bounds.rejects(errors, pure, 0.9) == (bounds.dp_bound(errors, 0.01, 0.9) > claim)
            assert bounds.rejects(errors, gaussian, 0.9) == (bounds.gaussian_mu(errors, 0.9) > claim)

    class OneSided:
        """1 - fpr - fnr is allowed to be large only if fpr is small: its mirror image is another curve."""

        @staticmethod
        def beta(alpha):
            return 0.0 if alpha > 0.2 else 1 - alpha

    assert bounds.rejects(Errors(0, 1000, 300, 1000), OneSided(), 0.95)
    assert bounds.rejects(Errors(300, 1000, 0, 1000), OneSided(), 0.95)
    assert not bounds.rejects(Errors(300, 1000, 300, 1000), OneSided(), 0.95)


# -- a family of curves -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(0, 0), (1, 990), (150, 400), (400, 150)])
def test_in_the_family_of_gaussians_the_tradeoff_bound_is_the_gaussian_bound(counts):
    errors = Errors(counts[0], 1000, counts[1], 1000)
    exact, asked = bounds.gaussian_mu(errors), []

    def family(theta):
        asked.append(theta)
        return Tradeoff.gaussian(theta)

    found = bounds.tradeoff_bound(errors, family, DELTA)
    assert gaussian_epsilon(exact / 1.0101, DELTA) <= found <= bounds.gaussian_bound(errors, DELTA)
    assert len(set(asked)) <= 20


def test_a_tradeoff_bound_ends_where_its_search_ends():
    perfect, guessing = Errors(0, 1000, 0, 1000), Errors(500, 1000, 500, 1000)
    assert bounds.tradeoff_bound(perfect, lambda theta: Tradeoff.gaussian(theta / 1e4), DELTA) == pytest.approx(
        gaussian_epsilon(0.1024, DELTA)
    )
    assert bounds.tradeoff_bound(perfect, lambda theta: Tradeoff.gaussian(theta * 1e5), DELTA) == 0.0
    assert bounds.tradeoff_bound(guessing, lambda theta: pytest.fail("asked for a curve"), DELTA) == 0.0


@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_with_many_runs_the_bound_of_a_sampled_gaussian_finds_its_noise(rate):
    """One Poisson-sampled step of half the claimed noise: theta is 2, known from the rates of a threshold on it."""
    event, shift = GaussianEvent(1.5, rate, 1), 2 / 1.5
    threshold = 2.2
    fnr = (1 - rate) * norm.cdf(threshold) + rate * norm.cdf(threshold - shift)
    errors = Errors(round(MANY * norm.sf(threshold)), MANY, round(MANY * fnr), MANY)
    family = scaled_family(event)
    found, truth = bounds.tradeoff_bound(errors, family, DELTA), family(2.0).epsilon(DELTA)
    # 1 % of theta is 1 to 2 % of epsilon here; the curve's grid of epsilons costs less.
    assert 0.96 * truth < found < truth
    assert bounds.rejects(errors, family(1.0))


def test_the_gaussian_bound_is_not_valid_for_sampled_steps():
    """Far out, a sampled Gaussian looks like the whole Gaussian: the bound lies above its epsilon."""
    rate, shift, threshold = 0.1, 4 / 3, 5.0
    fnr = (1 - rate) * norm.cdf(threshold) + rate * norm.cdf(threshold - shift)
    errors = Errors(round(MANY * norm.sf(threshold)), MANY, round(MANY * fnr), MANY)
    truth = Composition([GaussianEvent(1 / shift, rate, 1)]).epsilon(DELTA)
    assert bounds.dp_bound(errors, DELTA) < truth < bounds.gaussian_bound(errors, DELTA)


# -- p-values ---------------------------------------------------------------------------------------------------------


def exceeds_dp(errors, claim, delta=0.0):
    return lambda confidence: bounds.dp_bound(errors, delta, confidence) > claim


def test_a_p_value_is_where_the_bound_crosses_the_claim():
    for errors in (Errors(3, 400, 360, 400), Errors(30, 300, 380, 500), Errors(0, 50, 20, 50)):
        exceeds = exceeds_dp(errors, 0.8)
        found = bounds.p_value(errors, exceeds)
        assert bounds.LEAST_P < found < 1
        assert exceeds(1 - found)
        assert not exceeds(1 - found / 1.0011)


def test_the_p_value_of_no_error_in_closed_form():
    # u = 1 - (alpha / 2)^(1 / n), and the claim is ln((1 - u) / u).
    perfect, claim = Errors(0, 100, 0, 100), 2.5
    expected = 2 * (1 - 1 / (1 + math.exp(claim))) ** 100
    assert bounds.p_value(perfect, exceeds_dp(perfect, claim)) == pytest.approx(expected, rel=1.1e-3)


def test_p_values_end_at_one_and_at_the_least():
    guessing, perfect = Errors(50, 100, 50, 100), Errors(0, 10**6, 0, 10**6)
    assert bounds.p_value(guessing, exceeds_dp(guessing, 0.5)) == 1.0
    assert bounds.p_value(perfect, exceeds_dp(perfect, 1.0)) == bounds.LEAST_P


@pytest.mark.parametrize("level", [0.3, 0.05, 0.001])
def test_under_a_true_claim_a_p_value_is_below_a_level_with_at_most_that_probability(level):
    """Exact, over all outcomes: randomised response, the least private mechanism with its epsilon."""
    claim, runs = 1.0, 25
    errors = grid_of_errors(runs)
    wrong = 1 / (1 + math.exp(claim))
    p_values = {each: bounds.p_value(each, exceeds_dp(each, claim)) for each in errors}
    assert 0 < probability(errors, wrong, wrong, lambda each: p_values[each] <= level) <= level


def test_bonferroni():
    assert bounds.bonferroni(0.95, 1) == pytest.approx(0.95)
    assert bounds.bonferroni(0.95, 5) == pytest.approx(0.99)


# -- never above the truth too often ----------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.0, 0.7, 2.0])
def test_the_dp_bound_exceeds_the_epsilon_of_randomised_response_in_at_most_one_of_20_audits(epsilon):
    """Exact, over all counts of 80 runs a world, for the mechanism where the bound has nothing to give away."""
    runs, wrong = 80, 1 / (1 + math.exp(epsilon))
    ends, weights = bounds.upper_ends(runs, 0.025), binom.pmf(np.arange(runs + 1), runs, wrong)
    above = bounds.dp_epsilon(ends[:, None], ends[None, :], 0.0) > epsilon
    assert 0 < weights @ above @ weights <= 0.05


ALLOWED, AUDITS = 22, 200
"""If a bound is above the truth with probability 0.05, more than 22 of 200 are with probability 2.1e-4."""


def test_so_many_bounds_above_the_truth_are_unlikely():
    assert binom.sf(ALLOWED, AUDITS, 0.05) < 2.2e-4


def audit(generator, epsilon: float, objective: str, runs: int = 1000, noise: float = 1.0) -> Errors:
    """Audit a Gaussian mechanism of this epsilon: the test is chosen on one half, errors are counted on the other."""
    mu = gaussian_mu(epsilon, DELTA) / noise
    select, evaluate = (
        {"score": (generator.standard_normal(runs), generator.standard_normal(runs) + mu)} for _ in range(2)
    )
    return attacks.count(attacks.choose(select, DELTA, objective), evaluate)


@pytest.mark.parametrize("epsilon", [1, 2, 4, 8])
@pytest.mark.parametrize(("objective", "bound"), [("dp", bounds.dp_bound), ("gaussian", bounds.gaussian_bound)])
def test_the_bound_of_a_gaussian_exceeds_its_epsilon_in_at_most_22_of_200_audits(epsilon, objective, bound):
    """Both halves of the audit, as in the pipeline. Fails by chance with probability 2.1e-4 at most."""
    generator = np.random.default_rng(epsilon)
    above = sum(bound(audit(generator, epsilon, objective), DELTA) > epsilon for _ in range(AUDITS))
    assert above <= ALLOWED


def test_errors_counted_where_the_test_was_chosen_would_bound_nothing():
    """Why there are two halves: the best of many blind tests looks good on the runs that it was chosen on."""
    generator = np.random.default_rng(1)
    above = {"select": 0, "evaluate": 0}
    for _ in range(AUDITS):
        select, evaluate = ({str(i): tuple(generator.standard_normal((2, 100))) for i in range(20)} for _ in range(2))
        chosen = attacks.choose(select, DELTA, "gaussian")
        for half, scores in (("select", select), ("evaluate", evaluate)):
            above[half] += bounds.gaussian_mu(attacks.count(chosen, scores)) > 0
    assert above["select"] > ALLOWED >= above["evaluate"]


def test_half_of_the_noise_is_seen():
    generator = np.random.default_rng(2)
    assert all(bounds.dp_bound(audit(generator, 4, "dp", noise=0.25), DELTA) > 4 for _ in range(5))
    assert all(bounds.gaussian_bound(audit(generator, 2, "gaussian", noise=0.5), DELTA) > 2 for _ in range(5))


# -- attacks ----------------------------------------------------------------------------------------------------------


def best_by_hand(without, with_canary, delta, objective):
    """Return the best bound over every threshold and side, test by test."""
    values = sorted({*without, *with_canary})
    cuts = [-math.inf, *values]
    found = []
    for cut in cuts:
        for above in (True, False):
            attack = Attack("score", cut, above)
            errors = attacks.count(attack, {"score": (np.array(without), np.array(with_canary))})
            rates = bounds.rates(errors, attacks.CONFIDENCE)
            epsilon, shift = float(bounds.dp_epsilon(*rates, delta)), float(bounds.gaussian_shift(*rates))
            found.append((shift, shift) if objective == "gaussian" else (epsilon, shift))
    return max(found)


@pytest.mark.parametrize("objective", attacks.OBJECTIVES)
def test_the_choice_is_the_best_of_all_thresholds_and_sides(objective):
    generator = np.random.default_rng(4)
    for trial in range(40):
        # Few distinct values: many scores are equal, within a world and between them.
        without = generator.integers(0, 6, size=generator.integers(1, 40)).astype(float)
        with_canary = generator.integers(trial % 5, 6, size=generator.integers(1, 40)).astype(float)
        if trial % 2:
            without, with_canary = -without, -with_canary
        select = {"score": (without, with_canary)}
        chosen = attacks.choose(select, 0.01, objective)
        rates = bounds.rates(attacks.count(chosen, select), attacks.CONFIDENCE)
        shift = bounds.gaussian_shift(*rates)
        found = (shift, shift) if objective == "gaussian" else (bounds.dp_epsilon(*rates, 0.01), shift)
        assert found == pytest.approx(best_by_hand(without, with_canary, 0.01, objective))


@pytest.mark.parametrize("sign", [1, -1])
def test_worlds_that_separate_are_told_apart_in_the_middle_of_the_gap(sign):
    select = {"score": (sign * np.array([0.0, 1.0, 1.0] * 9), sign * np.array([3.0, 4.0] * 9))}
    chosen = attacks.choose(select, DELTA)
    assert chosen == Attack("score", sign * 2.0, above_means_with=sign > 0)
    assert attacks.count(chosen, select) == Errors(0, 27, 0, 18)
    evaluate = {"score": (sign * np.array([2.5, 0.0]), sign * np.array([1.9, 2.1, 9.0]))}
    assert attacks.count(chosen, evaluate) == Errors(1, 2, 1, 3)


@pytest.mark.parametrize("objective", attacks.OBJECTIVES)
def test_scores_that_are_all_equal_show_nothing(objective):
    """A deterministic mechanism that the canary does not move."""
    equal = {"score": (np.full(30, 0.1), np.full(30, 0.1))}
    errors = attacks.count(attacks.choose(equal, DELTA, objective), equal)
    assert sorted([errors.false_positives, errors.false_negatives]) == [0, 30]
    assert bounds.dp_bound(errors, DELTA) == bounds.gaussian_bound(errors, DELTA) == 0


@pytest.mark.parametrize(
    ("low", "high"),
    [(1.0, math.nextafter(1.0, 2.0)), (-math.inf, 3.0), (2.0, math.inf), (-math.inf, math.inf), (1e308, 1.7e308)],
)
def test_thresholds_lie_between_neighbouring_and_infinite_scores(low, high):
    for sign in (1, -1):
        select = {"score": (sign * np.full(20, low), sign * np.full(20, high))}
        assert attacks.count(attacks.choose(select, DELTA), select) == Errors(0, 20, 0, 20)


def test_the_statistic_that_shows_most_is_chosen():
    generator = np.random.default_rng(5)
    noise = {name: (generator.standard_normal(300), generator.standard_normal(300)) for name in "abc"}
    weak = (generator.standard_normal(300), generator.standard_normal(300) + 2)
    strong = (generator.standard_normal(300), generator.standard_normal(300) - 4)
    for objective in attacks.OBJECTIVES:
        chosen = attacks.choose({**noise, "weak": weak, "strong": strong}, DELTA, objective)
        assert chosen.statistic == "strong"
        assert not chosen.above_means_with


def test_scores_that_cannot_be_read_are_refused():
    good = np.zeros(3)
    for select in (
        {},
        {"score": (good, np.array([1.0, math.nan]))},
        {"score": (good, np.zeros((3, 1)))},
    ):
        with pytest.raises(ValueError, match=r"statistic|scores"):
            attacks.choose(select, DELTA)
    with pytest.raises(ValueError, match="objectives"):
        attacks.choose({"score": (good, good)}, DELTA, "best")
    with pytest.raises(KeyError):
        attacks.count(Attack("other", 0.0, True), {"score": (good, good)})


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0)])
def test_a_world_without_runs_shows_nothing(sizes):
    select = {"score": (np.zeros(sizes[0]), np.ones(sizes[1]))}
    errors = attacks.count(attacks.choose(select, DELTA), select)
    assert bounds.dp_bound(errors, DELTA) == 0.0


def test_the_curve_has_every_threshold_once():
    generator = np.random.default_rng(6)
    without, with_canary = generator.integers(0, 8, 50).astype(float), generator.integers(2, 10, 70).astype(float)
    fpr, fnr = attacks.curve(without, with_canary)
    cuts = sorted({*without, *with_canary}, reverse=True)
    assert fpr.tolist() == [(without > cut).mean() for cut in cuts] + [1.0]
    assert fnr.tolist() == pytest.approx([(with_canary <= cut).mean() for cut in cuts] + [0.0])
    assert (fpr[0], fnr[0]) == (0.0, 1.0)
    # The area below it is the probability that a score without the canary is the larger one.
    larger = (without[:, None] > with_canary).mean() + (without[:, None] == with_canary).mean() / 2
    assert np.trapezoid(fnr, fpr) == pytest.approx(larger)


def test_a_unit_that_may_never_be_sampled_ends_the_search():
    """(1 - q)**T = 0.12 of false negatives stay however little noise there is: few errors then reject every theta."""
    asked = []
    family = scaled_family(GaussianEvent(0.85, 0.1, 20))

    def watched(theta: float):
        asked.append(theta)
        return family(theta)

    found = bounds.tradeoff_bound(Errors(0, 1000, 0, 1000), watched, DELTA)
    assert 50 < found <= bounds.LARGEST_EPSILON
    assert max(asked) <= 8  # at 256 a curve takes a minute
