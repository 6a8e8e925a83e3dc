"""The noise source of controls: an attack that shows nothing without noise proves nothing with it."""

from __future__ import annotations

import numpy as np

from dpmixmin.privacy.noise import NoiseSource


class Silent(NoiseSource):
    """Another source's bytes and coins, and no noise.

    Args:
        source: the other source.
    """

    private = False

    def __init__(self, source: NoiseSource):
        self._source = source

    def random_bytes(self, count: int) -> bytes:
        """Return the other source's bytes."""
        return self._source.random_bytes(count)

    def gaussian(self, std: float, size: int) -> np.ndarray:
        """Return zeros."""
        return np.zeros(size)

    def rounded_gaussian(self, scale: float, size: int) -> np.ndarray:
        """Return zeros."""
        return np.zeros(size, dtype=np.int64)
