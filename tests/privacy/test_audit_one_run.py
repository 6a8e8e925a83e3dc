"""Auditing in one run: the tests never over-report, and they find what is broken.

False alarms: a p-value may lie at or below 5 % in at most 5 % of audits of a mechanism that keeps its claim. Where
audits are simulated, a test fails if that happens in more than 21 of 200, which a valid 5 % test does with probability
5e-4 (binomial).
"""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import binom, norm

from dpmixmin.audit import one_run
from dpmixmin.audit.one_run import (
    LEAST_P,
    OneRun,
    detectable_epsilon,
    epsilon_dp,
    epsilon_tradeoff,
    evaluate,
    guesses,
    p_value_dp,
    p_value_tradeoff,
)
from dpmixmin.audit.tradeoff import Tradeoff, scaled_family
from dpmixmin.privacy.accounting import Composition
from dpmixmin.privacy.events import GaussianEvent
from dpmixmin.privacy.gaussian import gaussian_delta, gaussian_mu

DELTA = 1e-5
REPETITIONS, ALLOWED = 200, 21


@pytest.fixture(autouse=True)
def remembered(monkeypatch):
    """A p-value depends on counts and claim alone, and simulated audits repeat them."""
    for name in ("p_value_dp", "p_value_tradeoff"):
        monkeypatch.setattr(one_run, name, functools.cache(getattr(one_run, name)))


def test_the_stated_rate_of_false_alarms():
    assert binom.sf(ALLOWED, REPETITIONS, 0.05) == pytest.approx(5e-4, rel=0.1)


def tail(law: np.ndarray) -> np.ndarray:
    """P[W >= v] for v = 0, 1, ... from P[W = v]."""
    return np.cumsum(law[::-1])[::-1]


# -- guesses ----------------------------------------------------------------------------------------------------------


def test_the_highest_are_guessed_in_and_the_lowest_out():
    scores = np.array([0.3, -2.0, 5.0, 1.0, -1.0, 0.0])
    included = np.array([True, False, False, True, True, True])
    assert guesses(scores, included, 2) == (2, 1)  # 5.0 is not in, -2.0 is not in
    assert guesses(scores, included, 4) == (4, 2)
    assert guesses(scores, included, 6) == (6, 3)
    assert guesses(np.where(included, 1.0, -np.inf), included, 4) == (4, 4)


def test_equal_scores_are_ordered_by_index_and_say_nothing():
    included = np.random.default_rng(5).random(4000) < 0.5
    _, correct = guesses(np.zeros(4000), included, 4000)
    assert correct == np.count_nonzero(~included[:2000]) + np.count_nonzero(included[2000:])
    assert abs(correct - 2000) < 4 * math.sqrt(1000)  # fails with probability 6e-5, and the seed is fixed
    assert evaluate(np.zeros(4000), included).epsilon_dp(DELTA) < 0.2


def test_numbers_of_guesses_are_even_and_different():
    scores, included = np.arange(21.0), np.arange(21) > 9
    assert [made for made, _ in evaluate(scores, included).guesses] == [2, 4, 10, 20]
    assert evaluate(scores, included).guesses[-1] == (20, 20)
    assert [made for made, _ in evaluate(np.arange(2.0), np.array([False, True])).guesses] == [2]


def test_wrong_arguments_are_refused():
    scores, included = np.arange(4.0), np.array([True, False, True, False])
    for k in (0, 1, 3, 6):
        with pytest.raises(ValueError, match="guesses"):
            guesses(scores, included, k)
    with pytest.raises(ValueError, match="NaN"):
        guesses(np.array([0.0, np.nan, 1.0, 2.0]), included, 2)
    for bad in (included[:3], included.astype(int)):
        with pytest.raises(ValueError, match="coins"):
            evaluate(scores, bad)
    for fractions in ((), (0.0,), (1.5,)):
        with pytest.raises(ValueError, match="fractions"):
            evaluate(scores, included, fractions)
    with pytest.raises(ValueError, match="correct"):
        p_value_dp(10, 4, 5, 1.0, DELTA)
    with pytest.raises(ValueError, match="correct"):
        p_value_tradeoff(10, 12, 5, Tradeoff.pure(1.0))
    with pytest.raises(ValueError, match="at least one"):
        OneRun(10, 5, ())


# -- (epsilon, delta)-DP ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "made", "correct"), [(5, 5, 5), (30, 12, 9), (1000, 100, 80), (10, 4, 0), (10, 0, 0)])
@pytest.mark.parametrize("epsilon", [0.0, 0.7, 3.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 0.01])
def test_the_p_value_is_the_theorem_of_steinke_nasr_and_jagielski(m, made, correct, epsilon, delta):
    """Summed term by term in integers' binomials, with the worst i searched up to m as in the theorem."""
    rate = 1 / (1 + math.exp(-epsilon))
    law = [math.comb(made, x) * rate**x * (1 - rate) ** (made - x) for x in range(made + 1)]

    def reached(v):
        return math.fsum(law[max(v, 0) :])

    worst = max((reached(correct - i) - reached(correct)) / i for i in range(1, m + 1))
    expected = min(1.0, reached(correct) + 2 * m * delta * worst)
    assert p_value_dp(m, made, correct, epsilon, delta) == pytest.approx(expected, rel=1e-9, abs=1e-13)


def test_without_delta_it_is_the_binomial_test_and_uses_its_level_up():
    """False alarms of all 2^m outcomes of randomised response, counted exactly: at most 5 %, and not far less."""
    rate = 1 / (1 + math.exp(-1.0))
    law = binom.pmf(np.arange(201), 200, rate)
    rejected = [p_value_dp(200, 200, v, 1.0, 0.0) <= 0.05 for v in range(201)]
    assert 0.02 < law[rejected].sum() <= 0.05
    above = [epsilon_dp(200, 200, v, 0.0) > 1.0 for v in range(201)]
    assert 0.02 < law[above].sum() <= 0.05


@pytest.mark.parametrize(
    ("m", "made", "correct", "delta"), [(1000, 100, 93, 1e-5), (100, 100, 100, 0.02), (50, 10, 9, 0)]
)
def test_the_bound_is_where_the_p_value_crosses_the_level(m, made, correct, delta):
    found = epsilon_dp(m, made, correct, delta)
    if found:
        assert p_value_dp(m, made, correct, found, delta) <= 0.05
    assert p_value_dp(m, made, correct, found + 2e-6, delta) > 0.05


def test_the_bound_grows_with_right_guesses_and_falls_with_delta_and_confidence():
    bounds = [epsilon_dp(1000, 100, v, DELTA) for v in range(40, 101, 4)]
    assert bounds == sorted(bounds)
    assert bounds[0] == 0 < 3 < bounds[-1]
    assert epsilon_dp(1000, 100, 95, 1e-6) > epsilon_dp(1000, 100, 95, 1e-3) > 0
    assert epsilon_dp(1000, 100, 95, DELTA, 0.9) > epsilon_dp(1000, 100, 95, DELTA, 0.99) > 0
    assert epsilon_dp(1000, 100, 95, 0.5) == 0


# -- trade-off curves -------------------------------------------------------------------------------------------------


def worst_law(m: int, made: int, correct: int, epsilons, deltas, every: bool = False) -> float:
    """Largest P[W >= correct] under the theorem's inequalities for T = {i, ...}, as a linear programme.

    With ``every``, for all i; else for i <= correct only, which is all that the recursion uses.
    """
    levels = np.arange(made + 1)
    right, wrong = levels / m, (made - levels) / m
    rows, limits = [], []
    for i in range(made if every else correct):
        above, from_here = (levels >= i + 1) * right, (levels >= i) * wrong
        for epsilon, delta in zip(epsilons, deltas, strict=True):
            rows.append(above - math.exp(epsilon) * from_here)
            limits.append(delta)
            rows.append(above - math.exp(-epsilon) * from_here)
            limits.append(1 - math.exp(-epsilon) * (1 - delta))
    found = linprog(
        -(levels >= correct).astype(float),
        A_ub=np.array(rows) if rows else None,
        b_ub=np.array(limits) if rows else None,
        A_eq=np.ones((1, made + 1)),
        b_eq=[1.0],
    )
    assert found.status == 0
    return -found.fun


GRID = np.linspace(0, 6, 25)
CLAIMS = {
    "pure": ([1.0], [0.0]),
    "strong": ([0.1], [0.0]),
    "one pair": ([0.5], [0.03]),
    "gaussian": (GRID, [gaussian_delta(1.0, each) for each in GRID]),
}


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize(("m", "made"), [(1, 1), (4, 4), (9, 6), (40, 12)])
def test_the_recursion_finds_the_worst_law_of_right_guesses(claim, m, made):
    """Against a linear programme over all laws: the docstring's exchange argument, checked."""
    for correct in range(made + 1):
        expected = worst_law(m, made, correct, *CLAIMS[claim])
        found = p_value_tradeoff(m, made, correct, Tradeoff(*CLAIMS[claim]))
        assert found == pytest.approx(expected, rel=5e-3, abs=1e-9)
        assert found >= expected * (1 - 1e-6) - 1e-9
        assert expected >= worst_law(m, made, correct, *CLAIMS[claim], every=True) - 1e-9


def cells(m: int) -> list[np.ndarray]:
    return [np.array(bits) for bits in itertools.product((0, 1), repeat=m)]


def law_of_right_guesses(m: int, made: int, mechanism, attack) -> np.ndarray:
    """P[W = i], exactly: fair coins u, a mechanism u -> {output: probability}, an attack output -> {j: guess}."""
    law = np.zeros(made + 1)
    for u in cells(m):
        for output, probability in mechanism(u).items():
            guessed = attack(output)
            assert len(guessed) == made
            law[sum(u[j] == guess for j, guess in guessed.items())] += probability / 2**m
    assert law.sum() == pytest.approx(1)
    return law


def betraying_response(epsilon: float, delta: float):
    """Each canary by itself: told as it is ('in', 'out') with probability delta, else randomised response."""
    truth = (1 - delta) / (1 + math.exp(-epsilon))

    def mechanism(u):
        options = [{2 + bit: delta, bit: truth, 1 - bit: 1 - delta - truth} for bit in u]
        return {
            output: math.prod(option[each] for option, each in zip(options, output, strict=True))
            for output in itertools.product(*options)
        }

    return mechanism


def guess_the_betrayed_first(made: int):
    def attack(output):
        order = sorted(range(len(output)), key=lambda j: output[j] < 2)
        return {j: output[j] % 2 for j in order[:made]}

    return attack


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.1), (1.0, 0.0), (0.5, 0.02), (1.0, 0.2)])
@pytest.mark.parametrize("made", [1, 2, 3, 5])
def test_no_tail_of_independent_canaries_exceeds_the_p_values(epsilon, delta, made):
    """All outcomes enumerated; with abstentions (made < m) that depend on the output."""
    law = law_of_right_guesses(5, made, betraying_response(epsilon, delta), guess_the_betrayed_first(made))
    for correct, exact in enumerate(tail(law)):
        assert exact <= p_value_dp(5, made, correct, epsilon, delta) + 1e-12
        assert exact <= p_value_tradeoff(5, made, correct, Tradeoff.pure(epsilon, delta)) + 1e-12


def test_the_number_of_canaries_matters_where_the_attack_abstains():
    """Control: with the guesses in place of the canaries as divisor both p-values would be wrong."""
    law = law_of_right_guesses(5, 1, betraying_response(0.0, 0.2), guess_the_betrayed_first(1))
    exact = tail(law)[1]
    assert exact > 1.1 * p_value_tradeoff(1, 1, 1, Tradeoff.pure(0.0, 0.2))
    assert exact <= p_value_tradeoff(5, 1, 1, Tradeoff.pure(0.0, 0.2))


def dependent_mechanisms(m: int, epsilon: float):
    """Exactly epsilon-DP mechanisms whose right guesses depend on one another, with attacks of m guesses."""
    everything = [tuple(bits) for bits in cells(m)]

    def towards(threshold):
        # Outputs with many matches are preferred; their number is the same for every u, so the normaliser cancels.
        def mechanism(u):
            weights = {
                output: math.exp(epsilon * (sum(a == b for a, b in zip(u, output, strict=True)) >= threshold))
                for output in everything
            }
            total = math.fsum(weights.values())
            return {output: weight / total for output, weight in weights.items()}

        return mechanism

    for threshold in range(1, m + 1):
        yield f"at least {threshold}", towards(threshold), lambda output: dict(enumerate(output))

    def noisy_count(u):
        # Two-sided geometric noise, its tails in the two end points (post-processing).
        count, ratio = int(u.sum()), math.exp(-epsilon)
        law = {}
        for output in range(-2, m + 3):
            if output in (-2, m + 2):
                law[output] = ratio ** abs(output - count) / (1 + ratio)
            else:
                law[output] = ratio ** abs(output - count) * (1 - ratio) / (1 + ratio)
        return law

    yield "noisy count", noisy_count, lambda output: {j: int(output > m / 2) for j in range(m)}


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.5])
def test_no_tail_of_dependent_canaries_exceeds_the_p_values(epsilon):
    m, tight = 6, 0.0
    for name, mechanism, attack in dependent_mechanisms(m, epsilon):
        law = tail(law_of_right_guesses(m, m, mechanism, attack))
        for correct, exact in enumerate(law):
            assert exact <= p_value_dp(m, m, correct, epsilon, 0.0) + 1e-12, name
            found = p_value_tradeoff(m, m, correct, Tradeoff.pure(epsilon))
            assert exact <= found + 1e-12, name
            tight = max(tight, exact / found if correct == m else 0)
    assert tight > 0.1  # the mechanism that prefers to be all right comes near: the check can fail


@pytest.mark.parametrize(("made", "epsilon"), [(20, 0.5), (200, 1.0), (200, 4.0)])
def test_the_p_value_of_a_curve_is_at_least_the_binomial_tail_of_randomised_response(made, epsilon):
    rate = 1 / (1 + math.exp(-epsilon))
    for correct in range(0, made + 1, made // 10):
        exact = binom.sf(correct - 1, made, rate)
        assert p_value_tradeoff(made, made, correct, Tradeoff.pure(epsilon)) >= min(exact, 1.0) * (1 - 1e-9)


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.0])
def test_the_p_value_of_a_curve_is_at_least_the_tail_of_independent_gaussians(mu):
    """Each canary guessed by the sign of its score: right with probability Phi(mu / 2)."""
    for correct in range(100, 201, 10):
        exact = binom.sf(correct - 1, 200, norm.cdf(mu / 2))
        assert p_value_tradeoff(200, 200, correct, Tradeoff.gaussian(mu)) >= exact


def test_the_p_value_of_a_curve_is_monotone_and_has_a_floor():
    values = [p_value_tradeoff(300, 100, v, Tradeoff.gaussian(0.5)) for v in range(101)]
    assert values == sorted(values, reverse=True)
    assert values[0] == 1.0
    assert p_value_tradeoff(2000, 1000, 1000, Tradeoff.gaussian(0.1)) == pytest.approx(LEAST_P, rel=1e-9, abs=0)
    values = [p_value_tradeoff(300, 100, 90, Tradeoff.gaussian(mu)) for mu in (0.1, 0.5, 1.0, 2.0, 4.0)]
    assert values == sorted(values)
    assert values[0] < 1e-6 < values[-1] == 1.0


def test_the_bound_of_a_family_is_where_its_curves_are_no_longer_refuted():
    found = epsilon_tradeoff(300, 100, 90, Tradeoff.gaussian, DELTA)
    mu = gaussian_mu(found, DELTA)
    assert p_value_tradeoff(300, 100, 90, Tradeoff.gaussian(mu * (1 - 1e-9))) <= 0.05
    assert p_value_tradeoff(300, 100, 90, Tradeoff.gaussian(mu * 1.011)) > 0.05
    assert epsilon_tradeoff(300, 100, 50, Tradeoff.gaussian, DELTA) < 0.01
    assert epsilon_tradeoff(300, 100, 20, Tradeoff.gaussian, DELTA) == 0
    bounds = [epsilon_tradeoff(300, 100, v, Tradeoff.gaussian, DELTA) for v in range(60, 101, 5)]
    assert bounds == sorted(bounds)
    assert bounds[0] > 0
    assert epsilon_tradeoff(300, 100, 90, Tradeoff.gaussian, DELTA, 0.999) < found


# -- audits of known mechanisms ---------------------------------------------------------------------------------------


def gaussian_audit(generator, m: int, mu: float) -> OneRun:
    included = generator.random(m) < 0.5
    return evaluate(generator.standard_normal(m) + mu * included, included)


def response_audit(generator, m: int, epsilon: float) -> OneRun:
    included = generator.random(m) < 0.5
    told = included ^ (generator.random(m) > 1 / (1 + math.exp(-epsilon)))
    return evaluate(told + 0.0, included)


@pytest.mark.parametrize("epsilon", [1.0, 2.0, 4.0, 8.0])
def test_95_percent_bounds_of_known_mechanisms_are_rarely_too_high(epsilon):
    generator = np.random.default_rng(int(epsilon))
    mu = gaussian_mu(epsilon, DELTA)
    too_high = {"response": 0, "gaussian": 0, "gaussian, curve": 0}
    for _ in range(REPETITIONS):
        too_high["response"] += response_audit(generator, 400, epsilon).p_value_dp(epsilon, 0.0) <= 0.05
        audit = gaussian_audit(generator, 400, mu)
        too_high["gaussian"] += audit.p_value_dp(epsilon, DELTA) <= 0.05
        too_high["gaussian, curve"] += audit.p_value(Tradeoff.gaussian(mu)) <= 0.05
    assert max(too_high.values()) <= ALLOWED, too_high
    # The bound exceeds the truth exactly where the true claim is refuted.
    for found in (audit, gaussian_audit(generator, 400, 3 * mu)):
        assert (found.epsilon_dp(DELTA) > epsilon) == (found.p_value_dp(epsilon, DELTA) <= 0.05)
        refuted = found.p_value(Tradeoff.gaussian(mu)) <= 0.05
        assert refuted or found.epsilon_tradeoff(Tradeoff.gaussian, DELTA) <= epsilon


@pytest.mark.parametrize("epsilon", [2.0, 4.0, 8.0])
def test_the_curve_finds_more_than_one_pair_does_on_gaussian_canaries(epsilon):
    generator = np.random.default_rng(17)
    audits = [gaussian_audit(generator, 1000, gaussian_mu(epsilon, DELTA)) for _ in range(10)]
    pair = np.median([audit.epsilon_dp(DELTA) for audit in audits])
    curve = np.median([audit.epsilon_tradeoff(Tradeoff.gaussian, DELTA) for audit in audits])
    assert 0 < 1.15 * pair < curve < epsilon


def sampled_scores(generator, event: GaussianEvent, noise: float, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Canaries in coordinates of their own, under Poisson sampling: exact likelihood ratios of the claimed event."""
    included = generator.random(m) < 0.5
    enters = (generator.random((m, event.steps)) < event.sampling_rate) & included[:, None]
    seen = enters + noise * generator.standard_normal((m, event.steps))
    ratio = np.exp((seen - 0.5) / event.noise_multiplier**2)
    return np.log1p(event.sampling_rate * (ratio - 1)).sum(axis=1), included


def test_an_audit_of_sampled_steps_holds_for_the_true_noise_and_finds_too_little():
    event = GaussianEvent(3.0, 0.3, 20)  # epsilon 2 at 1e-5
    generator = np.random.default_rng(3)
    claim, family = Tradeoff.of(Composition([event])), scaled_family(event)
    too_high = sum(
        evaluate(*sampled_scores(generator, event, 3.0, 200)).p_value(claim) <= 0.05 for _ in range(REPETITIONS)
    )
    assert too_high <= ALLOWED
    broken = evaluate(*sampled_scores(generator, event, 0.6, 1000))
    assert broken.p_value(claim) < 1e-5
    claimed = Composition([event]).epsilon(DELTA)
    assert claimed < broken.epsilon_tradeoff(family, DELTA) < family(5.0).epsilon(DELTA)


# -- several numbers of guesses ---------------------------------------------------------------------------------------


def test_several_numbers_of_guesses_share_the_level():
    audit = OneRun(1000, 500, ((50, 40), (100, 92), (1000, 620)))
    curve = Tradeoff.gaussian(0.2)
    assert audit.p_value(curve) == min(1, 3 * min(p_value_tradeoff(1000, *each, curve) for each in audit.guesses))
    assert audit.p_value_dp(0.4, DELTA) == 3 * min(p_value_dp(1000, *each, 0.4, DELTA) for each in audit.guesses)
    assert audit.p_value_dp(9.0, DELTA) == 1.0
    level = 1 - 0.05 / 3
    assert audit.epsilon_dp(DELTA) == max(epsilon_dp(1000, *each, DELTA, level) for each in audit.guesses)
    each = [epsilon_tradeoff(1000, *one, Tradeoff.gaussian, DELTA, level) for one in audit.guesses]
    assert audit.epsilon_tradeoff(Tradeoff.gaussian, DELTA) == pytest.approx(max(each), rel=0.02)
    assert audit.counts() == "40 of 50, 92 of 100, 620 of 1000 guesses right, 1000 canaries"


def test_choosing_the_best_number_of_guesses_without_paying_would_over_report():
    """Control: at 40 numbers of guesses and no correction, more than 5 % of true claims would be refuted."""
    generator = np.random.default_rng(8)
    fractions = tuple(np.arange(1, 41) / 40)
    paid = free = 0
    for _ in range(REPETITIONS):
        included = generator.random(80) < 0.5
        audit = evaluate(generator.standard_normal(80), included, fractions)
        p = audit.p_value_dp(0.0, 0.0)
        paid, free = paid + (p <= 0.05), free + (p <= 0.05 * len(audit.guesses))
    assert paid <= ALLOWED < free


def test_a_perfect_attack_is_the_ceiling():
    included = np.random.default_rng(4).random(1000) < 0.5
    truth = evaluate(included + 0.0, included)
    assert truth.perfect() == truth
    weak = evaluate(np.zeros(1000), included)
    assert weak.perfect() == truth
    assert weak.guesses != truth.guesses
    assert truth.epsilon_dp(DELTA) == pytest.approx(4.6, abs=0.2)
    assert truth.p_value_dp(1.0, DELTA) > 2 * DELTA
    assert truth.p_value(Tradeoff.gaussian(0.3)) < 1e-20
    rare = evaluate(np.zeros(10), np.arange(10) == 3, (1.0,))
    assert rare.perfect().guesses == ((10, 6),)  # five guesses IN, and one canary that is


# -- power ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curve", [False, True])
def test_the_detectable_epsilon_is_detected_with_the_stated_probability(curve):
    """A simulation of its own: 400 audits; 0.8 within 0.09 is more than four standard deviations of both, together."""
    claim, m = 1.0, 500
    tradeoff = Tradeoff.gaussian(gaussian_mu(claim, DELTA))
    found = detectable_epsilon(m, claim, DELTA, tradeoff=tradeoff if curve else None, repetitions=400)
    generator = np.random.default_rng(99)
    mu = gaussian_mu(found, DELTA)
    audits = [gaussian_audit(generator, m, mu) for _ in range(400)]
    caught = [(audit.p_value(tradeoff) if curve else audit.p_value_dp(claim, DELTA)) <= 0.05 for audit in audits]
    assert np.mean(caught) == pytest.approx(0.8, abs=0.09)
    assert found > claim


def test_power_grows_with_canaries_and_ends_at_the_ceiling():
    more = [detectable_epsilon(m, 1.0, DELTA) for m in (100, 500, 2000)]
    assert more == sorted(more, reverse=True)
    assert more[-1] > 1
    claims = [detectable_epsilon(500, claim, DELTA) for claim in (0.5, 1.0, 2.0)]
    assert claims == sorted(claims)
    assert detectable_epsilon(500, 8.0, DELTA) is None
    assert detectable_epsilon(500, 1.0, DELTA, tradeoff=Tradeoff.gaussian(gaussian_mu(1.0, DELTA))) < more[1]
    assert detectable_epsilon(500, 1.0, DELTA, seed=0) == detectable_epsilon(500, 1.0, DELTA, seed=0)


def test_an_audit_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OneRun(10, 5, ((2, 1),)).m = 11
