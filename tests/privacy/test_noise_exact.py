"""Exact draws for selection: integers, coins of probability exp(-x), permutations, repetition counts (rule 14).

Exactness is proven by enumeration: every outcome of the randomness that a draw reads is tried, with its weight. The
statistics are deterministic (InsecureNoise); a fresh seed would fail one in a thousand times.
"""

import math
from collections import Counter
from fractions import Fraction
from itertools import product

import mpmath
import numpy as np
import pytest
from scipy.stats import chisquare, geom, logser, nbinom, poisson

from dpmixmin.privacy.noise import MAX_REPETITIONS, InsecureNoise, NoiseSource, _count_at

FALSE_ALARM = 1e-3


class Exhausted(Exception):
    """The script of a draw ends; ``bound`` outcomes are possible next."""

    def __init__(self, bound: int):
        self.bound = bound


class Script(NoiseSource):
    """A source whose integers the test writes."""

    private = False

    def __init__(self, outcomes: tuple[int, ...]):
        self.outcomes = list(outcomes)

    def integer_below(self, bound):
        if not self.outcomes:
            raise Exhausted(bound)
        return self.outcomes.pop(0)


class Bytes(NoiseSource):
    """A source that repeats the test's bytes, then fails."""

    private = False

    def __init__(self, data: bytes):
        self.data = data

    def random_bytes(self, count):
        if count > len(self.data):
            raise Exhausted(0)
        taken, self.data = self.data[:count], self.data[count:]
        return taken


def law(draw, cut: float = 1e-9) -> tuple[dict, Fraction]:
    """Return the exact law of ``draw`` of a source, and the weight of the branches that were cut off."""
    masses, left, lost = {}, [((), Fraction(1))], Fraction(0)
    while left:
        outcomes, weight = left.pop()
        if weight < cut:
            lost += weight
            continue
        try:
            value = draw(Script(outcomes))
        except Exhausted as end:
            left += [((*outcomes, i), weight / end.bound) for i in range(end.bound)]
        else:
            masses[value] = masses.get(value, Fraction(0)) + weight
    return masses, lost


# -- integers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [1, 2, 3, 5, 6, 7, 8, 100, 255, 256])
def test_integer_below_gives_every_value_the_same_share_of_first_bytes(bound):
    """All 256 first bytes: accepted ones are spread evenly, at least half are accepted, the rest draw again."""
    results = Counter()
    for first in range(256):
        try:
            results[Bytes(bytes([first])).integer_below(bound)] += 1
        except Exhausted:
            results["again"] += 1
    rejected = results.pop("again", 0)
    assert sorted(results) == list(range(bound))
    assert len(set(results.values())) == 1
    assert rejected < 128


def test_integer_below_gives_every_value_the_same_share_of_two_bytes():
    bound, results = 1000, Counter()
    for high, low in product(range(256), range(256)):
        try:
            results[Bytes(bytes([high, low])).integer_below(bound)] += 1
        except Exhausted:
            continue
    assert sorted(results) == list(range(bound))
    assert set(results.values()) == {64}


def test_integer_below_of_a_huge_bound_reaches_both_ends():
    bound = 10**60
    draws = [InsecureNoise(seed).integer_below(bound) for seed in range(200)]
    assert 0 <= min(draws) < bound // 20
    assert bound - bound // 20 < max(draws) < bound
    with pytest.raises(ValueError, match="bound"):
        NoiseSource().integer_below(0)
    with pytest.raises(TypeError):
        NoiseSource().integer_below(2.5)


# -- coins of probability exp(-x) -----------------------------------------------------------------------------


@pytest.mark.parametrize(("numerator", "denominator"), [(0, 1), (1, 3), (1, 2), (2, 3), (1, 1), (3, 2), (2, 1)])
def test_bernoulli_exp_is_exact(numerator, denominator):
    """The enumerated probability encloses exp(-x) with a gap below 1e-6."""
    masses, lost = law(lambda source: source.bernoulli_exp(numerator, denominator))
    true = masses.get(True, Fraction(0))
    with mpmath.workprec(200):
        ideal = mpmath.exp(-mpmath.mpf(numerator) / denominator)
        assert mpmath.mpf(true.numerator) / true.denominator <= ideal
        assert ideal <= mpmath.mpf((true + lost).numerator) / (true + lost).denominator
    assert lost < 1e-6


@pytest.mark.parametrize(("numerator", "denominator"), [(123_456_789, 10**9), (10**30 + 1, 10**30), (37, 10)])
def test_bernoulli_exp_frequencies(numerator, denominator):
    """Large fractions cannot be enumerated."""
    source, size = InsecureNoise(11), 20_000
    heads = sum(source.bernoulli_exp(numerator, denominator) for _ in range(size))
    chance = math.exp(-numerator / denominator)
    assert chisquare([heads, size - heads], [size * chance, size * (1 - chance)]).pvalue > FALSE_ALARM


def test_bernoulli_exp_refuses_what_is_no_fraction():
    source = NoiseSource()
    assert not source.bernoulli_exp(10**9, 1), "a probability of exp(-10**9) is over at once"
    assert type(source.bernoulli_exp(np.int64(1), np.int64(2))) is bool
    for numerator, denominator in ((-1, 2), (1, 0), (1, -2)):
        with pytest.raises(ValueError, match="exponent"):
            source.bernoulli_exp(numerator, denominator)
    with pytest.raises(TypeError):
        source.bernoulli_exp(0.5, 1)


# -- permutations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5])
def test_every_permutation_has_the_same_exact_probability(count):
    masses, lost = law(lambda source: tuple(source.shuffled(count).tolist()))
    assert lost == 0
    assert len(masses) == math.factorial(count)
    assert set(masses.values()) == {Fraction(1, math.factorial(count))}


def test_a_long_permutation_holds_everything_once():
    order = NoiseSource().shuffled(1000)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(1000))
    assert not np.array_equal(order, NoiseSource().shuffled(1000))


# -- repetitions ----------------------------------------------------------------------------------------------


def gamma_of(mean: float, shape: float) -> float:
    """dp_accounting's own inversion, which the RDP of RepeatAndSelect is computed with."""
    from dp_accounting.rdp.rdp_privacy_accountant import _gamma_truncated_negative_binomial

    return _gamma_truncated_negative_binomial(shape, mean, tolerance=1e-14)


def probabilities(mean: float, shape: float, count: int) -> np.ndarray:
    """Return P(0), ..., P(count - 1) by scipy's laws."""
    k = np.arange(count)
    if shape == math.inf:
        return poisson.pmf(k, mean)
    if shape == 1:
        return geom.pmf(k, 1 / mean)
    if shape == 0:
        return logser.pmf(k, 1 - gamma_of(mean, shape))
    gamma = gamma_of(mean, shape)
    return np.where(k > 0, nbinom.pmf(k, shape, gamma) / (1 - gamma**shape), 0.0)


LAWS = [
    (1.0, math.inf),
    (10.0, math.inf),
    (300.0, math.inf),
    (1.5, 1.0),
    (10.0, 1.0),
    (10.0, 0.0),
    (3.0, 0.5),
    (10.0, 0.5),
    (10.0, 2.0),
    (10.0, 30.0),
    (1.0001, 0.5),
]


@pytest.mark.parametrize(("mean", "shape"), LAWS)
def test_repetitions_sit_on_the_steps_of_the_exact_distribution_function(mean, shape):
    """Uniforms a relative 1e-9 on either side of every step of scipy's CDF give the two neighbours."""
    mass = probabilities(mean, shape, 800)
    steps = np.cumsum(mass)
    checked = 0
    for k in np.flatnonzero((mass[:-1] > 1e-6) & (mass[1:] > 1e-6) & (steps[:-1] < 1 - 1e-6))[::7]:
        step = int(steps[k] * 2**53) << (192 - 53)
        margin = int(mass[k : k + 2].min() * 1e-4 * 2**192)
        assert _count_at(step - margin, mean, shape) == k
        assert _count_at(step + margin, mean, shape) == k + 1
        checked += 1
    assert checked >= 1


@pytest.mark.parametrize(("mean", "shape"), LAWS)
def test_repetitions_follow_their_law(mean, shape):
    """Chi-square over cells of at least 5 expected counts, and the mean; the law moved by a cell is rejected."""
    source, size = InsecureNoise(3, f"{mean} {shape}"), 3000 if mean < 100 else 500
    draws = np.asarray([source.repetitions(mean, shape) for _ in range(size)])
    expected = probabilities(mean, shape, 4000) * size
    edges, total = [0], 0.0
    for k, cell in enumerate(expected):
        total += cell
        if total >= 5 and expected[k + 1 :].sum() >= 5:
            edges.append(k + 1)
            total = 0.0
    cells = np.add.reduceat(expected, edges)
    cells[-1] += size - cells.sum()
    observed = np.histogram(draws, bins=[*edges, np.inf])[0]
    if len(cells) > 1:
        assert chisquare(observed, cells).pvalue > FALSE_ALARM
    if 1 < len(cells) < 50:
        assert chisquare(np.roll(observed, 1), cells).pvalue < FALSE_ALARM
    k = np.arange(4000)
    mass = probabilities(mean, shape, 4000)
    assert (mass * k).sum() == pytest.approx(mean, rel=1e-6)
    deviation = math.sqrt((mass * (k - mean) ** 2).sum() / size)
    assert abs(draws.mean() - mean) <= 5 * deviation + 1e-12


def test_only_poisson_repetitions_can_be_zero():
    assert _count_at(0, 2.0, math.inf) == 0
    for shape in (0.0, 0.3, 1.0, 7.0):
        assert _count_at(0, 2.0, shape) == 1
        assert _count_at(2**192 - 1, 1.0, shape) == 1, "mean 1: exactly once"


@pytest.mark.parametrize("shape", [0.0, 5e-324, 1e-9, 1.0, 1e6, math.inf])
@pytest.mark.parametrize("mean", [math.nextafter(1.0, 2), 1.5, 50.0])
def test_repetitions_end_at_the_last_uniform(mean, shape):
    """The farthest tail, 2**-193, is reached, and small shapes approach the logarithmic law."""
    farthest = _count_at(2**192 - 1, mean, shape)
    assert 1 < farthest < 2**16
    if shape < 1e-6:
        assert farthest == _count_at(2**192 - 1, mean, 0.0)


def test_the_mean_of_repetitions_is_never_above_the_accounted_one():
    from dpmixmin.privacy.noise import _log_inverse_gamma

    for mean, shape in ((1.001, 0.0), (10.0, 0.5), (10.0, 3.0), (MAX_REPETITIONS, 0.0)):
        with mpmath.workprec(400):
            gamma, eta = mpmath.exp(-_log_inverse_gamma(mean, shape)), mpmath.mpf(shape)
            drawn = (1 / gamma - 1) / -mpmath.log(gamma) if shape == 0 else eta * (1 / gamma - 1) / (1 - gamma**eta)
            assert mean * (1 - mpmath.mpf(2) ** -250) < drawn <= mean * (1 + mpmath.mpf(2) ** -380)
        assert float(gamma) == pytest.approx(gamma_of(mean, shape), rel=1e-9)


def test_repetitions_refuse_parameters_out_of_range():
    for mean, shape in (
        (0.5, 1.0),
        (math.nan, 1.0),
        (math.inf, 1.0),
        (2e6, 1.0),
        (2.0, -0.5),
        (2.0, math.nan),
        (2.0, 2e6),
    ):
        with pytest.raises(ValueError, match=r"mean|shape"):
            NoiseSource().repetitions(mean, shape)
