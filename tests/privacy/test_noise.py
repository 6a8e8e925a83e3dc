"""Noise: independent coins, exact rounded Gaussians, and no seed anywhere (rules 1, 14, 15).

Tests that draw from the operating system state their false-alarm rate; the others are deterministic.
"""

import copy
import math
import os
import pickle
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import mpmath
import numpy as np
import pytest
from scipy.special import ndtr, ndtri
from scipy.stats import binomtest, chi2, chisquare, norm

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


# -- model-sized noise ----------------------------------------------------------------------------------------


def farthest(draws: np.ndarray) -> float:
    """Kolmogorov distance of a sample to the standard Gaussian."""
    ideal = ndtr(np.sort(draws))
    ranks = np.arange(len(draws) + 1) / len(draws)
    return float(max(np.abs(ideal - ranks[1:]).max(), np.abs(ideal - ranks[:-1]).max()))


def variance_p_value(draws: np.ndarray) -> float:
    """Two-sided exact p-value of the sum of squares of standard Gaussians."""
    total = float((draws**2).sum())
    return 2 * min(chi2.cdf(total, len(draws)), chi2.sf(total, len(draws)))


def test_model_sized_noise_is_gaussian_with_the_asked_for_deviation():
    """False-alarm rate 1e-9 (DKW); a deviation 5 % off is rejected by the same check."""
    size = 200_000
    draws = NoiseSource().gaussian(3.0, size)
    assert draws.dtype == np.float64
    assert farthest(draws / 3.0) < dkw(size)
    assert farthest(draws * 1.05 / 3.0) > dkw(size)
    assert len(np.unique(draws)) == size


def test_model_sized_noise_has_the_exact_variance():
    """False-alarm rate 1e-9 (chi-square); a deviation 1 % off is rejected by the same check."""
    draws = NoiseSource().gaussian(0.25, 1_000_000) / 0.25
    assert variance_p_value(draws) > FALSE_ALARM
    assert variance_p_value(draws * 1.01) < FALSE_ALARM


def test_model_sized_noise_has_gaussian_tails():
    """False-alarm rate 1e-9 (exact binomial, union of 8): counts beyond 2 to 4.5 deviations, both sides."""
    size = 1_000_000
    draws = NoiseSource().gaussian(1.0, size)
    for edge in (2.0, 3.0, 4.0, 4.5):
        for side in (draws, -draws):
            assert binomtest(int((side > edge).sum()), size, norm.sf(edge)).pvalue > FALSE_ALARM / 8


def test_model_sized_noise_is_independent_across_coordinates_and_calls():
    """False-alarm rate 1e-9: correlations of values and of squares have variance 1 / size, and size is large.

    The two halves of a block share their radii, so they are looked at as well, aligned. (|z| > 6.5 has probability
    8e-11, times 10.)
    """
    source, size = NoiseSource(), noise_module._GAUSSIAN_BLOCK
    blocks = source.gaussian(1.0, 8 * size).reshape(8, 2, size // 2)
    cosines, sines = blocks[:, 0].ravel(), blocks[:, 1].ravel()
    again = source.gaussian(1.0, 8 * size)
    pairs = [
        (cosines, sines),
        (blocks.ravel(), again),
        (again[:-1], again[1:]),
        (again[: 4 * size], again[4 * size :]),
    ]
    pairs += [(again[:size], blocks[0].ravel())]
    for one, other in pairs:
        assert abs((one * other).mean()) * math.sqrt(len(one)) < 6.5
        assert abs(((one**2 - 1) * (other**2 - 1)).mean() / 2) * math.sqrt(len(one)) < 6.5


def test_flipping_the_sign_bits_flips_model_sized_noise_exactly(rng):
    data = rng.bytes(64 * 500)
    flipped = bytes(byte ^ (0x80 if place % 8 == 7 else 0) for place, byte in enumerate(data))
    assert np.array_equal(Scripted(flipped).gaussian(1.5, 1000), -Scripted(data).gaussian(1.5, 1000))


def test_the_range_of_model_sized_noise_is_the_stated_one():
    """The farthest draws: all radii at their largest, all angles at one end; never infinite, never NaN."""
    low, high = b"\0" * 8, b"\xff" * 7 + b"\x7f"
    far = Scripted(low * 4 + low * 4).gaussian(1.0, 2)
    assert far[0] == pytest.approx(2 * math.sqrt(2 * 64 * math.log(2)))
    assert 18.8 < far[0] < 18.9
    assert 0 < far[1] < 1e-17
    near = Scripted(high * 4 + low * 4).gaussian(1.0, 2)
    assert np.abs(near).max() < 1e-8
    for words in (low + high, high + low, b"\xff" * 16):
        assert np.isfinite(Scripted(words[:8] * 4 + words[8:] * 4).gaussian(1.0, 2)).all()


@pytest.mark.parametrize("size", [0, 1, 2, 7, 2**15 - 1, 2**15 + 1])
def test_model_sized_noise_of_any_size(size):
    draws = NoiseSource().gaussian(2.0, size)
    assert draws.shape == (size,)
    assert len(np.unique(draws)) == size
    assert not NoiseSource().gaussian(0.0, size).any()


def test_model_sized_noise_refuses_a_deviation_that_is_none():
    for std in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="std"):
            NoiseSource().gaussian(std, 1)


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
        model.release_sum(np.zeros(20), source),
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


def test_only_model_sized_noise_needs_torch():
    """The stages that work on arrays do without it, and start a second faster."""
    code = """
import sys
from dpmixmin.privacy.noise import NoiseSource
source = NoiseSource()
source.coins(0.5, 10**4), source.rounded_gaussian(1e6, 14), source.shuffled(9), source.repetitions(2.0, 1.0)
assert "torch" not in sys.modules
source.gaussian(1.0, 1)
assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# -- long requests: AES-256-CTR under the operating system's keys (rule 14) -----------------------------------

LONG = noise_module._DIRECT_BYTES + 1


def test_rule_14_long_requests_are_aes_256_of_a_counter(monkeypatch):
    """Known answers: AES-256 under the zero key, of the blocks 0 and 1."""
    monkeypatch.setattr(noise_module.os, "urandom", bytes)
    stream = NoiseSource().random_bytes(LONG)
    assert stream[:16].hex() == "dc95c078a2408989ad48a21492842087"
    assert stream[16:32].hex() == "530f8afbc74536b9a963b4f1c4cb738b"


@pytest.mark.parametrize("count", [0, 1, LONG - 1, LONG, 2**18, 2**18 + 1, 2**20 + 5])
def test_rule_14_a_key_comes_from_the_operating_system_for_every_piece(count, monkeypatch):
    asked = []
    monkeypatch.setattr(noise_module.os, "urandom", lambda n, real=os.urandom: asked.append(n) or real(n))
    source = NoiseSource()
    assert len(source.random_bytes(count)) == count
    assert asked == ([count] if count < LONG else [32] * math.ceil(count / 2**18))
    assert vars(source) == {}, "no key and no stream is kept"


def test_rule_14_no_block_of_a_long_request_repeats():
    """False-alarm rate below 2**-90: equal 16-byte blocks within and across calls and keys."""
    source = NoiseSource()
    data = b"".join(source.random_bytes(2**19) for _ in range(4))
    assert len(set(zip(*[iter(data)] * 16, strict=True))) == len(data) // 16


def test_rule_14_bits_of_a_long_request_are_fair():
    """False-alarm rate 1e-9 (exact binomial over 8 bit positions, union bound)."""
    data = np.frombuffer(NoiseSource().random_bytes(2**21), dtype=np.uint8)
    for bit in range(8):
        assert binomtest(int((data >> bit & 1).sum()), len(data)).pvalue > FALSE_ALARM / 8


@pytest.mark.parametrize("count", [64, 2**16])
def test_rule_14_a_forked_child_does_not_repeat_its_parent(count):
    """Two generations, all after the parent's first draw; false-alarm rate below 2**-500."""
    source = NoiseSource()
    source.random_bytes(count)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        grandchild = os.fork()
        os.write(writer, source.random_bytes(count)[:64])
        if grandchild:
            os.waitpid(grandchild, 0)
        os._exit(0)
    mine = source.random_bytes(count)[:64]
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        theirs = pipe.read()
    assert len(theirs) == 128
    assert len({mine, theirs[:64], theirs[64:]}) == 3


def test_rule_14_threads_share_a_source_without_repeating():
    source = NoiseSource()
    with ThreadPoolExecutor(4) as pool:
        draws = list(pool.map(lambda _: source.random_bytes(2**16), range(64)))
    assert len(set(draws)) == 64
    assert {len(draw) for draw in draws} == {2**16}


@pytest.mark.parametrize("source", [NoiseSource(), InsecureNoise(1)], ids=["os", "insecure"])
@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_rule_14_a_source_cannot_be_copied(source, duplicate):
    with pytest.raises(TypeError, match=f"{type(source).__name__} cannot be pickled or copied"):
        duplicate(source)


def test_insecure_streams_reproduce_at_any_length_and_separate_purposes():
    for count in (32, LONG, 2**18 + 1):
        streams = [InsecureNoise(seed, purpose) for seed, purpose in ((5, "a"), (5, "a"), (6, "a"), (5, "b"))]
        first, same, other_seed, other_purpose = (stream.random_bytes(count) for stream in streams)
        assert first == same
        assert len({first[:32], other_seed[:32], other_purpose[:32], streams[0].random_bytes(count)[:32]}) == 4
        assert first[:32] != first[-32:] or count == 32
