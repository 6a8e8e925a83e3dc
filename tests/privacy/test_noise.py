"""Noise: independent coins, exact rounded Gaussians, and no seed anywhere (rules 1, 14, 15).

Tests that draw from the operating system state their false-alarm rate; the others are deterministic.
"""

import math
import random
from itertools import combinations

import mpmath
import numpy as np
import pytest
from scipy.special import ndtr, ndtri
from scipy.stats import binomtest, chisquare, norm

from dpmixmin.privacy import noise as noise_module
from dpmixmin.privacy.mechanisms import GridGaussian, ModelGaussian
from dpmixmin.privacy.noise import InsecureNoise, NoiseSource, _settle, noise_source

FALSE_ALARM = 1e-9


class Scripted(NoiseSource):
    """A source whose bytes the test writes."""

    private = False

    def __init__(self, data: bytes):
        self.data = data

    def random_bytes(self, count: int) -> bytes:
        assert count == len(self.data)
        return self.data


# -- coins (rule 1) -------------------------------------------------------------------------------------------

DRAWS, UNITS, RATE = 20_000, 6, 1 / 3


def inclusion_p_values(batches: np.ndarray) -> list[float]:
    """Exact p-values: each unit's inclusion, each pair's joint inclusion, and each unit's in consecutive draws."""
    count, units = batches.shape
    p_values = [binomtest(int(batches[:, i].sum()), count, RATE).pvalue for i in range(units)]
    for i, j in combinations(range(units), 2):
        p_values.append(binomtest(int((batches[:, i] & batches[:, j]).sum()), count, RATE**2).pvalue)
    for i in range(units):
        # Disjoint pairs of draws, so that the counts are binomial.
        twice = batches[0::2, i] & batches[1::2, i]
        p_values.append(binomtest(int(twice.sum()), len(twice), RATE**2).pvalue)
    return p_values


def test_rule_1_batches_are_independent_coins_marginally_and_pairwise():
    """False-alarm rate below 1e-9 (exact binomial tests, union bound)."""
    spec = ModelGaussian(1.0, 1.0, 1, RATE, 6, 1.0, 1e-5)
    batches = np.stack([spec.sample(UNITS, NoiseSource()) for _ in range(DRAWS)])
    p_values = inclusion_p_values(batches)
    assert min(p_values) > FALSE_ALARM / len(p_values)


def test_rule_1_the_same_check_rejects_batches_of_fixed_size(rng):
    """Control: shuffled batches have the right marginals and the wrong pairs."""
    fixed = np.stack([np.isin(np.arange(UNITS), rng.permutation(UNITS)[:2]) for _ in range(DRAWS)])
    p_values = inclusion_p_values(fixed)
    assert min(p_values[:UNITS]) > 1e-4
    assert max(p_values[UNITS : UNITS + 15]) < FALSE_ALARM / len(p_values)


def test_rule_1_full_batch_takes_everybody_and_draws_no_coin():
    spec = ModelGaussian(1.0, 1.0, 1, 1.0, 6, 1.0, 1e-5)
    assert spec.sample(5, Scripted(b"!")).all()


def test_coins_at_the_ends_of_the_range():
    assert not NoiseSource().coins(0.0, 1000).any()
    assert NoiseSource().coins(1.0, 1000).all()
    highest, lowest = b"\xff" * 8, b"\0" * 8
    assert Scripted(highest).coins(1.0, 1).all()
    assert not Scripted(highest).coins(math.nextafter(1.0, 0), 1).any()
    assert Scripted(lowest).coins(2.0**-63, 1).all()
    assert not Scripted(lowest).coins(2.0**-64, 1).any(), "the rate is rounded DOWN"
    for rate in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="rate"):
            NoiseSource().coins(rate, 1)


def test_coins_compare_63_bits_with_the_rate():
    threshold = int(0.25 * 2**63)
    words = np.asarray([threshold - 1, threshold], dtype="<u8") << np.uint64(1)
    assert Scripted(words.tobytes()).coins(0.25, 2).tolist() == [True, False]


# -- rounded Gaussian (rule 15) -------------------------------------------------------------------------------


def distance(sample: np.ndarray, scale: float) -> float:
    """Kolmogorov distance of integers to the law of ROUND(N(0, scale^2)), exact cell probabilities."""
    values, counts = np.unique(sample, return_counts=True)
    empirical = np.cumsum(counts) / len(sample)
    ideal = ndtr((values + 0.5) / scale)
    before = ndtr((values - 0.5) / scale)
    return float(max(np.abs(empirical - ideal).max(), np.abs(np.r_[0.0, empirical[:-1]] - before).max()))


def dkw(size: int) -> float:
    """Distance exceeded with probability at most FALSE_ALARM (Dvoretzky-Kiefer-Wolfowitz-Massart, any law)."""
    return math.sqrt(math.log(2 / FALSE_ALARM) / (2 * size))


@pytest.mark.parametrize("scale", [0.4, 2.0, 3.731 * 2**20])
def test_rule_15_rounded_gaussian_fits_its_exact_law(scale):
    """False-alarm rate 1e-9 a scale (DKW); a standard deviation 5 % off is rejected by the same check."""
    size = 200_000
    assert distance(NoiseSource().rounded_gaussian(scale, size), scale) < dkw(size)
    if scale > 1:
        assert distance(InsecureNoise(1).rounded_gaussian(scale * 1.05, size), scale) > dkw(size)


def test_rule_15_rounded_gaussian_cells_at_scale_2():
    """Deterministic: a seeded sample of 400k against the exact probability of every cell from -8 to 8."""
    sample = InsecureNoise(7).rounded_gaussian(2.0, 400_000)
    cells = np.arange(-8, 9)
    edges = np.r_[-np.inf, (cells[:-1] + 0.5) / 2, np.inf]
    expected = np.diff(norm.cdf(edges)) * len(sample)
    observed = np.asarray([(np.clip(sample, -8, 8) == cell).sum() for cell in cells])
    assert chisquare(observed, expected).pvalue > 1e-3
    floor_instead = np.asarray([(np.clip(sample - 1, -8, 8) == cell).sum() for cell in cells])
    assert chisquare(floor_instead, expected).pvalue < 1e-9


def test_rule_15_flipping_the_sign_bit_flips_the_draw(rng):
    data = bytearray(rng.bytes(24 * 1000))
    draws = Scripted(bytes(data)).rounded_gaussian(1e5, 1000)
    for start in range(0, len(data), 24):
        data[start] ^= 0x80
    assert np.array_equal(Scripted(bytes(data)).rounded_gaussian(1e5, 1000), -draws)


def test_rule_15_signs_of_os_draws_are_fair():
    """False-alarm rate 1e-9 (exact binomial)."""
    draws = NoiseSource().rounded_gaussian(1e6, 100_000)
    draws = draws[draws != 0]
    assert binomtest(int((draws > 0).sum()), len(draws)).pvalue > FALSE_ALARM


# -- _settle --------------------------------------------------------------------------------------------------


def is_exact(n: int, bits: int, scale: float) -> bool:
    """Say whether n is scale * Phi^-1(1 - tail), rounded; by the incomplete gamma function (no erfc, no inverse)."""
    with mpmath.workprec(500):
        tail = (mpmath.mpf(bits) + mpmath.mpf(1) / 2) / mpmath.mpf(2) ** 192

        def below(edge):
            """Is the exact value below ``edge`` + 1/2?"""
            x = (mpmath.mpf(edge) + mpmath.mpf(1) / 2) / mpmath.mpf(scale)
            return tail > mpmath.gammainc(mpmath.mpf(1) / 2, x * x / 2, regularized=True) / 2

        return below(n) and (n == 0 or not below(n - 1))


EXTREME_BITS = (0, 1, 2**60, 2**91, 2**92, 2**128 - 1, 2**147, 2**148, 2**190, 2**191 - 2, 2**191 - 1)
SCALES = (0.3, 2.0, 1234.5, 3.731 * 2**20, 2.0**50)


def boundary_bits(n: int, scale: float) -> list[int]:
    """Uniforms whose tail lies just on either side of the boundary between n and n + 1."""
    with mpmath.workprec(500):
        edge = mpmath.erfc((mpmath.mpf(n) + mpmath.mpf(1) / 2) / scale / mpmath.sqrt(2)) / 2
        middle = int(mpmath.floor(edge * mpmath.mpf(2) ** 192 - mpmath.mpf(1) / 2))
    return [middle - 1, middle, middle + 1, middle + 2]


def raw(bits: int) -> bytes:
    return bits.to_bytes(24, "big")


@pytest.mark.parametrize("scale", SCALES)
def test_rule_15_settle_is_exact_at_random_and_extreme_bits(scale, rng):
    random_bits = [int.from_bytes(rng.bytes(24), "big") >> int(rng.integers(1, 150)) for _ in range(12)]
    for bits in (*EXTREME_BITS, *random_bits):
        assert is_exact(_settle(bits, scale), bits, scale)
    assert not is_exact(_settle(1, scale) + 1, 1, scale)


@pytest.mark.parametrize(("scale", "n"), [(0.3, 0), (2.0, 0), (2.0, 9), (1234.5, 700), (3.731 * 2**20, 5_000_000)])
def test_rule_15_draws_next_to_a_rounding_boundary_are_exact(scale, n):
    """The public method, not only `_settle`, gets the last bit of the uniform right."""
    bits = boundary_bits(n, scale)
    draws = [int(Scripted(raw(each)).rounded_gaussian(scale, 1)[0]) for each in bits]
    assert draws == [n + 1, n + 1, n, n]
    assert all(is_exact(draw, each, scale) for draw, each in zip(draws, bits, strict=True))


@pytest.mark.parametrize("scale", [0.5, 2.0, 1e5, 3.9e6])
def test_rule_15_settling_every_draw_changes_none(scale, monkeypatch):
    """The float64 fast path and the exact path agree on the same bytes."""
    fast = InsecureNoise(3).rounded_gaussian(scale, 150)
    calls = []
    monkeypatch.setattr(noise_module, "NDTRI_ERROR", 1e9)
    monkeypatch.setattr(noise_module, "_settle", lambda bits, s: calls.append(bits) or _settle(bits, s))
    exact = InsecureNoise(3).rounded_gaussian(scale, 150)
    assert len(calls) == 150
    assert np.array_equal(fast, exact)


def test_rule_15_the_error_bound_of_the_inverse_cdf_holds_with_room(rng):
    """Tails down to 2**-44, where the exact path takes over: the observed error is a thousandth of the bound."""
    tails = np.r_[2.0 ** -rng.uniform(1, 44, 150), 0.5 - 2.0 ** -rng.uniform(2, 40, 50), 2.0**-44]
    with mpmath.workprec(200):
        for tail, x in zip(tails, -ndtri(tails), strict=True):
            # One Newton step from x: the distance to the root, up to its square.
            excess = mpmath.erfc(mpmath.mpf(x) / mpmath.sqrt(2)) / 2 - mpmath.mpf(tail)
            error = abs(float(excess / mpmath.npdf(mpmath.mpf(x))))
            assert error <= noise_module.NDTRI_ERROR / 1000 * (1 + abs(x))


def test_rounded_gaussian_edges():
    assert NoiseSource().rounded_gaussian(0.0, 3).tolist() == [0, 0, 0]
    assert NoiseSource().rounded_gaussian(1e3, 0).shape == (0,)
    for scale in (-1.0, 2.0**51, math.nan):
        with pytest.raises(ValueError, match="scale"):
            NoiseSource().rounded_gaussian(scale, 1)


def test_model_sized_noise_is_gaussian_with_the_asked_for_deviation():
    """False-alarm rate 1e-9 (DKW); a deviation 5 % off is rejected by the same check."""
    size = 200_000

    def farthest(draws):
        ideal = ndtr(np.sort(draws) / 3.0)
        ranks = np.arange(size + 1) / size
        return max(np.abs(ideal - ranks[1:]).max(), np.abs(ideal - ranks[:-1]).max())

    draws = NoiseSource().gaussian(3.0, size)
    assert draws.dtype == np.float64
    assert farthest(draws) < dkw(size)
    assert farthest(draws * 1.05) > dkw(size)
    assert len(np.unique(draws)) == size


# -- where randomness comes from (rule 14) --------------------------------------------------------------------


def reseed():
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def releases(source) -> list[np.ndarray]:
    """One of everything that a mechanism draws."""
    grid = GridGaussian(13.0, 3.0, 1, 0.5, 100, 1.0, 1e-5)
    model = ModelGaussian(1.0, 3.0, 1, 0.5, 100, 1.0, 1e-5)
    return [
        grid.release_sum(np.zeros((0, 14)), source),
        model.noise_for(20, source),
        model.sample(256, source),
    ]


def test_rule_14_global_seeds_do_not_touch_private_draws():
    """False-alarm rate below 2**-200: equal releases need equal bytes from the operating system."""
    reseed()
    first = releases(NoiseSource())
    reseed()
    second = releases(NoiseSource())
    for one, other in zip(first, second, strict=True):
        assert not np.array_equal(one, other)


def test_rule_14_private_draws_do_not_touch_the_global_generators():
    import torch

    reseed()
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    releases(NoiseSource())
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert before == after


def test_rule_14_insecure_seed_reproduces_and_is_not_private():
    first, second = releases(noise_source(5, "cell")), releases(noise_source(5, "cell"))
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(one, other)
    for other in (noise_source(6, "cell"), noise_source(5, "another cell")):
        assert not np.array_equal(first[0], releases(other)[0])
    assert not noise_source(5, "cell").private
    source = InsecureNoise(5)
    assert source.random_bytes(32) != source.random_bytes(32), "one stream, not one block"


def test_rule_14_the_default_source_is_the_operating_system(monkeypatch):
    source = noise_source(None, "cell")
    assert source.private
    monkeypatch.setattr(noise_module.os, "urandom", lambda count: b"\x40" * count)
    assert source.random_bytes(3) == b"@@@"
