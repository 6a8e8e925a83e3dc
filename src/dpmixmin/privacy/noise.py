"""Where private randomness comes from.

A :class:`NoiseSource` has one primitive, ``random_bytes``; every distribution is built on it. The default reads the
operating system's generator. It never uses a seed, and never touches the global generators of numpy, torch or
``random``, so third-party code that reseeds those cannot touch it (docs/rules.md, rule 14).
"""

from __future__ import annotations

import hashlib
import os
from fractions import Fraction

import numpy as np

_PROBABILITY_BITS = 192
"""Bits of the uniform behind one rounded Gaussian; see :meth:`NoiseSource.rounded_gaussian`."""

NDTRI_ERROR = 1e-12
"""Bound on |computed - exact| / (1 + |x|) of the float64 inverse normal CDF; a thousand times what is observed."""

LOG2_TV_PER_DRAW = -130
"""Total variation between a rounded Gaussian draw and its ideal law is at most 2**-130.

The uniform has steps of 2**-192, so each integer's probability is off by at most that; with scales up to 2**50 fewer
than 2**56 integers can occur, and the cut beyond 16 standard deviations costs less than 2**-190.
"""


class NoiseSource:
    """Randomness for private mechanisms, from the operating system.

    Attributes:
        private: True only where an adversary cannot reproduce the draws.
    """

    private = True

    def random_bytes(self, count: int) -> bytes:
        """Return ``count`` bytes that nobody can predict."""
        return os.urandom(count)

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
        """Draw ``size`` Gaussians of standard deviation ``std`` as float64 (for model-sized noise).

        Each is the sum of four draws, halved: the set of reachable float values is then far too dense for the
        known floating-point attacks (2107.10138). What stays unproven is said in the README, "Limits".
        """
        from scipy.special import ndtri

        raw = np.frombuffer(self.random_bytes(8 * 4 * size), dtype="<u8")
        # Odd multiples of 2**-54 in (0, 1): symmetric, never 0 or 1.
        uniforms = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return ndtri(uniforms).reshape(4, size).sum(axis=0) * (std / 2)

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


class InsecureNoise(NoiseSource):
    """TESTS ONLY: a reproducible stream from a seed. Whatever it makes is stamped NOT PRIVATE.

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
        self._block += 1
        return hashlib.shake_256(self._key + self._block.to_bytes(8, "big")).digest(count)


def noise_source(insecure_seed: int | None, purpose: str) -> NoiseSource:
    """Return the operating system's source, or the stamped test source where the config asks for one."""
    return NoiseSource() if insecure_seed is None else InsecureNoise(insecure_seed, purpose)
