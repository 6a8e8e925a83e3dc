"""Where private randomness comes from.

A :class:`NoiseSource` has one primitive, ``random_bytes``; every distribution is built on it. Short requests read the
operating system's generator; long ones are AES-256-CTR keystream under keys that are read from it on the spot, used
once and forgotten. There is no seed and no state: a fork, a thread or a restored snapshot has nothing to repeat. The
global generators of numpy, torch and ``random`` are never touched, so third-party code that reseeds those cannot touch
private draws (docs/rules.md, rule 14).

What the guarantees rest on: the operating system's bytes, and AES-256 where it stretches them, cannot be told from
uniform ones. Given uniform bytes, ``integer_below``, ``bernoulli_exp`` and ``shuffled`` are exact; ``coins`` rounds
its rate down; ``rounded_gaussian`` and ``repetitions`` state their total variation; ``gaussian`` says what is not
proven. How long a draw takes depends on its value; timing is not protected.
"""

from __future__ import annotations

import hashlib
import math
import operator
import os
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

import numpy as np

_DIRECT_BYTES = 4096
"""Requests up to this size are read from the operating system; AES is the faster way for longer ones."""

_KEY_BYTES = 2**18
"""Keystream taken from one key: 2**14 blocks, whose absence of repeats tells them from uniform with 2**-101."""

_COUNT_BITS = 400
"""Working precision of the distribution functions behind :meth:`NoiseSource.repetitions`."""

_GAUSSIAN_BLOCK = 2**15
"""Coordinates of model-sized noise that are made at once: their temporaries stay in the cache."""

_PROBABILITY_BITS = 192
"""Bits of the uniform behind one rounded Gaussian; see :meth:`NoiseSource.rounded_gaussian`."""

NDTRI_ERROR = 1e-12
"""Bound on |computed - exact| / (1 + |x|) of the float64 inverse normal CDF; a thousand times what is observed."""

LOG2_TV_PER_DRAW = -130
"""Total variation between a rounded Gaussian draw and its ideal law is at most 2**-130.

The uniform has steps of 2**-192, so each integer's probability is off by at most that; with scales up to 2**50 fewer
than 2**56 integers can occur, and the cut beyond 16 standard deviations costs less than 2**-190.
"""

LOG2_TV_PER_COUNT = -150
"""Total variation between a draw of :meth:`NoiseSource.repetitions` and its ideal law is at most 2**-150."""

MAX_REPETITIONS = 2.0**20
"""Largest mean, and largest finite shape, of :meth:`NoiseSource.repetitions`; its total variation rests on them."""


class NoiseSource:
    """Randomness for private mechanisms, from the operating system.

    Safe to share among threads and to use after a fork: there is no state. A source can still not be pickled or
    copied, because a copy of a source that has state (a subclass) is repeated noise.

    Attributes:
        private: True only where an adversary cannot reproduce the draws.
    """

    private = True

    def __reduce_ex__(self, protocol):
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied: a copied source repeats its noise")

    def random_bytes(self, count: int) -> bytes:
        """Return ``count`` bytes that nobody can predict."""
        return _stretch(os.urandom, count)

    def coins(self, rate: float, count: int) -> np.ndarray:
        """Draw ``count`` independent coins, each True with probability ``rate`` (rounded down to 2**-63).

        Args:
            rate: probability in [0, 1].
            count: number of coins.

        Returns:
            Boolean array of shape (count,).
        """
        if not 0 <= rate <= 1:
            raise ValueError("rate must be in [0, 1]")
        threshold = np.uint64(int(Fraction(rate) * 2**63))
        draws = np.frombuffer(self.random_bytes(8 * count), dtype="<u8") >> np.uint64(1)
        return draws < threshold

    def gaussian(self, std: float, size: int) -> np.ndarray:
        """Draw ``size`` independent Gaussians of standard deviation ``std``, for model-sized noise.

        Each is the sum of four Box-Muller draws from four different pairs, halved. The set of reachable float values
        is then far too dense for the known attacks on floating-point noise (2107.10138, 2112.05307).

        Proven: with real arithmetic and uniforms, the law is exactly the Gaussian. Signs are bits of their own, so
        the law is exactly symmetric. The uniforms have 63 bits: a draw's radius reaches 9.42 standard deviations
        (two-dimensional tail 2**-64), the sum 18.8. Not proven: that float64 rounding, here and in the sum that the
        noise is added to, costs no privacy; nobody has a theorem for that. :meth:`rounded_gaussian` has one.

        Args:
            std: standard deviation, at least 0 and finite.
            size: number of draws.

        Returns:
            float64 of shape (size,). The global generators are not touched.
        """
        if not 0 <= std < math.inf:
            raise ValueError("std must be finite and at least 0")
        draws = np.empty(size)
        for start in range(0, size, _GAUSSIAN_BLOCK):
            block = draws[start : start + _GAUSSIAN_BLOCK]
            # Eight words make two coordinates.
            block[:] = _box_muller(self.random_bytes(64 * ((len(block) + 1) // 2)))[: len(block)]
        return draws * (std / 2)

    def rounded_gaussian(self, scale: float, size: int) -> np.ndarray:
        """Draw ROUND(N(0, scale**2)) as int64: the continuous Gaussian, post-processed (rule 15).

        A 192-bit uniform goes through the inverse CDF in float64 with an error bound; where the bound leaves the
        rounding open, the uniform is compared with the exact CDF at the boundary (:func:`_settle`). The uniform's
        granularity and the cut at its smallest value give a total variation below 2**-130 a draw.

        Args:
            scale: standard deviation in grid units, at most 2**50.
            size: number of draws.

        Returns:
            Integers, int64, shape (size,).
        """
        from scipy.special import ndtri

        if not 0 <= scale <= 2.0**50:
            raise ValueError("scale must be in [0, 2**50] grid units")
        if scale == 0:
            return np.zeros(size, dtype=np.int64)
        width = _PROBABILITY_BITS // 8
        raw = self.random_bytes(size * width)
        words = np.frombuffer(raw, dtype=">u8").reshape(size, width // 8)
        negative = (words[:, 0] >> np.uint64(63)).astype(bool)
        # The first bit is the sign; the other 191, plus one half, are the tail probability times 2**192.
        magnitude = words[:, 0] & np.uint64(2**63 - 1)
        tails = magnitude.astype(np.float64) * 2.0**-64 + (words[:, 1].astype(np.float64) + 0.5) * 2.0**-128
        x = -ndtri(tails)
        value = scale * x
        error = scale * NDTRI_ERROR * (1 + np.abs(x)) + np.abs(value) * 2.0**-50
        result = np.rint(value)
        ambiguous = np.abs(np.abs(value - np.floor(value)) - 0.5) <= error
        # Tails with fewer than 53 significant bits in the first two words are read exactly as well.
        ambiguous |= magnitude < 2**20
        integers = result.astype(np.int64)
        for index in np.flatnonzero(ambiguous):
            bits = int.from_bytes(raw[index * width : (index + 1) * width], "big") & (2**191 - 1)
            integers[index] = _settle(bits, scale)
        return np.where(negative, -integers, integers)

    def integer_below(self, bound: int) -> int:
        """Draw an integer from 0 .. bound - 1, each with probability exactly 1 / bound (by rejection).

        Args:
            bound: at least 1, of any size.
        """
        bound = operator.index(bound)
        if bound < 1:
            raise ValueError("bound must be at least 1")
        bits = (bound - 1).bit_length()
        count = (bits + 7) // 8
        while True:
            # The highest bits: at least half of the candidates are below the bound.
            candidate = int.from_bytes(self.random_bytes(count), "big") >> (8 * count - bits)
            if candidate < bound:
                return candidate

    def bernoulli_exp(self, numerator: int, denominator: int) -> bool:
        """Return True with probability exactly exp(-numerator / denominator) (2004.00010, algorithm 1).

        Args:
            numerator: at least 0.
            denominator: at least 1.
        """
        numerator, denominator = operator.index(numerator), operator.index(denominator)
        if numerator < 0 or denominator < 1:
            raise ValueError("the exponent must be a fraction of an integer >= 0 and an integer >= 1")
        whole, rest = divmod(numerator, denominator)
        for _ in range(whole):
            if not self._bernoulli_exp_below_one(1, 1):
                return False
        return self._bernoulli_exp_below_one(rest, denominator)

    def _bernoulli_exp_below_one(self, numerator: int, denominator: int) -> bool:
        """Count coins of probability x/1, x/2, x/3, ... until one fails: an odd number has probability exp(-x)."""
        count = 1
        while self.integer_below(denominator * count) < numerator:
            count += 1
        return count % 2 == 1

    def shuffled(self, count: int) -> np.ndarray:
        """Draw an order of 0 .. count - 1, each with probability exactly 1 / count! (Fisher and Yates).

        Returns:
            int64 of shape (count,).
        """
        order = np.arange(count, dtype=np.int64)
        for last in range(count - 1, 0, -1):
            other = self.integer_below(last + 1)
            order[[last, other]] = order[[other, last]]
        return order

    def repetitions(self, mean: float, shape: float) -> int:
        """Draw how often a mechanism is repeated before its best output is selected (2110.03620).

        The parameters are those of dp_accounting's ``RepeatAndSelectDpEvent``: shape infinity is the Poisson law
        (which can be 0: nothing is run, and nothing is released), 1 the geometric law, 0 the logarithmic law, and
        anything between the negative binomial law truncated to 1, 2, ... (definition 1 there), whose parameter gamma
        follows from the mean.

        The smallest k with CDF(k) > U, for a 192-bit uniform U: no k is off by more than 2**-191, and a k above 2**35
        needs a tail below 2**-192, so the total variation is below 2**-150.

        Args:
            mean: expected number, from 1 to MAX_REPETITIONS.
            shape: from 0 to MAX_REPETITIONS, or infinity.

        Returns:
            The number of repetitions.

        Raises:
            ValueError: a parameter is out of its range.
        """
        if not 1 <= mean <= MAX_REPETITIONS:
            raise ValueError(f"mean must be in [1, {MAX_REPETITIONS:g}]")
        if not (0 <= shape <= MAX_REPETITIONS or shape == math.inf):
            raise ValueError(f"shape must be in [0, {MAX_REPETITIONS:g}] or infinite")
        bits = int.from_bytes(self.random_bytes(_PROBABILITY_BITS // 8), "big")
        return _count_at(bits, mean, shape)


def _stretch(draw: Callable[[int], bytes], count: int) -> bytes:
    """Return ``count`` bytes: drawn, or AES-256-CTR keystream with a newly drawn key for each _KEY_BYTES."""
    if count <= _DIRECT_BYTES:
        return draw(count)
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    pieces = []
    for start in range(0, count, _KEY_BYTES):
        # A key is used once, so its counter may start at zero.
        encryptor = Cipher(algorithms.AES(draw(32)), modes.CTR(bytes(16))).encryptor()
        pieces.append(encryptor.update(bytes(min(_KEY_BYTES, count - start))))
    return b"".join(pieces)


def _box_muller(raw: bytes) -> np.ndarray:
    """Turn 8 words of 64 bits per pair of coordinates into sums of four standard Gaussians (deviation 2).

    A word's first bit is a sign, the other 63 a uniform. Four words give radii, four give angles in the first
    quadrant; the cosines make one coordinate of the pair, the sines the other.

    Args:
        raw: random bytes, a multiple of 64.

    Returns:
        float64 of shape (2 * pairs,).
    """
    import torch

    words = torch.from_numpy(np.frombuffer(raw, dtype="<i8").reshape(2, 4, -1).copy())
    signs = words.view(torch.float64)
    # Integers above 2**53 are rounded to floats: relative precision in the tail of the radius, none needed elsewhere.
    uniforms = (words & (2**63 - 1)).double().add_(0.5)
    radii = uniforms[0].mul_(2.0**-63).log_().mul_(-2).sqrt_()
    angles = uniforms[1].mul_(2.0**-64 * math.pi)
    cosines = angles.cos().mul_(radii).copysign_(signs[0])
    sines = angles.sin_().mul_(radii).copysign_(signs[1])
    return torch.cat([cosines.sum(dim=0), sines.sum(dim=0)]).numpy()


def _settle(bits: int, scale: float) -> int:
    """Return the exact rounding of ``scale * Phi^-1(1 - tail)``, with tail = (bits + 1/2) / 2**192.

    The integer n is right when the upper tail probabilities at n - 1/2 and n + 1/2 enclose ``tail``.
    """
    import mpmath

    with mpmath.workprec(320):
        tail = (mpmath.mpf(bits) + mpmath.mpf(1) / 2) / mpmath.mpf(2) ** _PROBABILITY_BITS

        def upper(boundary: mpmath.mpf) -> mpmath.mpf:
            return mpmath.erfc(boundary / mpmath.mpf(scale) / mpmath.sqrt(2)) / 2

        guess = mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * tail) if tail > mpmath.mpf(2) ** -100 else _tail_inverse(tail)
        n = int(mpmath.nint(guess * mpmath.mpf(scale)))
        half = mpmath.mpf(1) / 2
        while n > 0 and tail > upper(n - half):
            n -= 1
        while tail <= upper(n + half):
            n += 1
        return n


def _tail_inverse(tail):
    """Solve erfc(x / sqrt 2) / 2 = tail far in the tail by Newton's method."""
    import mpmath

    x = mpmath.sqrt(-2 * mpmath.log(tail))
    for _ in range(60):
        step = (mpmath.erfc(x / mpmath.sqrt(2)) / 2 - tail) / mpmath.npdf(x)
        x += step
        if abs(step) < mpmath.mpf(2) ** -200:
            break
    return x


def _count_at(bits: int, mean: float, shape: float) -> int:
    """Return the smallest k with CDF(k) > (bits + 1/2) / 2**192; see :meth:`NoiseSource.repetitions`.

    Sums of at most 2**35 terms with 400 bits are exact to 2**-300, far below the distance of two uniforms.
    """
    import mpmath

    with mpmath.workprec(_COUNT_BITS):
        uniform = (mpmath.mpf(bits) + mpmath.mpf(1) / 2) / mpmath.mpf(2) ** _PROBABILITY_BITS
        if shape == math.inf:
            count, probability = 0, mpmath.exp(-mpmath.mpf(mean))
        elif mean == 1:
            return 1
        else:
            # With t = log(1 / gamma): P(1) = (1 - gamma) shape / (gamma^-shape - 1), or (1 - gamma) / t at shape 0.
            t, eta = _log_inverse_gamma(mean, shape), mpmath.mpf(shape)
            count, fail = 1, -mpmath.expm1(-t)
            probability = fail * (eta / mpmath.expm1(eta * t) if shape > 0 else 1 / t)
        below = probability
        while below <= uniform:
            count += 1
            probability *= mpmath.mpf(mean) / count if shape == math.inf else fail * (count - 1 + eta) / count
            below += probability
        return count


@lru_cache(maxsize=64)
def _log_inverse_gamma(mean: float, shape: float):
    """Solve mean = shape (1 / gamma - 1) / (1 - gamma^shape) for log(1 / gamma) by bisection; mean > 1.

    The limit at shape 0 is (1 / gamma - 1) / log(1 / gamma). The mean grows with 1 / gamma, and the lower end is
    returned, so the drawn law's mean is never above the one that is accounted for.
    """
    import mpmath

    with mpmath.workprec(_COUNT_BITS):
        eta = mpmath.mpf(shape)

        def mean_at(t):
            return mpmath.expm1(t) / t if shape == 0 else eta * mpmath.expm1(t) / -mpmath.expm1(-eta * t)

        low, high = mpmath.mpf(0), mpmath.mpf(1)
        while mean_at(high) <= mean:
            low, high = high, 2 * high
        # t is at least 2**-72 (the mean is a float above 1, the shape at most 2**20): 400 halvings leave 2**-320.
        for _ in range(400):
            middle = (low + high) / 2
            low, high = (middle, high) if mean_at(middle) <= mean else (low, middle)
        return low


class InsecureNoise(NoiseSource):
    """TESTS ONLY: a reproducible stream from a seed, for one thread. Whatever it makes is stamped NOT PRIVATE.

    Args:
        seed: the seed.
        purpose: a name that separates streams of one seed (a cell's path, for instance).
    """

    private = False

    def __init__(self, seed: int, purpose: str = ""):
        self._key = hashlib.sha256(f"insecure {seed} {purpose}".encode()).digest()
        self._block = 0

    def random_bytes(self, count: int) -> bytes:
        """Return the next ``count`` bytes of the seeded stream."""
        return _stretch(self._draw, count)

    def _draw(self, count: int) -> bytes:
        self._block += 1
        return hashlib.shake_256(self._key + self._block.to_bytes(8, "big")).digest(count)


def noise_source(insecure_seed: int | None, purpose: str) -> NoiseSource:
    """Return the operating system's source, or the stamped test source where the config asks for one."""
    return NoiseSource() if insecure_seed is None else InsecureNoise(insecure_seed, purpose)
