"""Replay (rule 3): with the randomness frozen, one unit more or less moves a release by at most its sensitivity.

:func:`replay` runs a real mechanism on D and on D'. Later steps depend on earlier outputs, so on D' every released
value is recorded and then REPLACED by the one from D: everything after a release is post-processing, so both runs see
the same state at every step. The mechanism needs no hook for this: it is given a :class:`Taped` spec in place of its
own, and a :class:`FrozenNoise`.

A replay check proves nothing about the noise itself (its law has tests of its own); it finds wrong clipping, means
over the private batch, records counted as units, NaN, and anything else that makes a declared sensitivity false.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpmixmin.privacy.mechanisms import MechanismSpec
from dpmixmin.privacy.noise import NoiseSource
from dpmixmin.privacy.selection import NoisyMax

ROUNDING = 1 + 1e-12
"""Float64 rounding of the difference of two releases: the only slack a check may give."""


class FrozenNoise(NoiseSource):
    """The same bytes for the same call, whoever asks: the j-th call gives a prefix of one fixed stream.

    So the first n coins of a step are the same for n and for n + 1 units, and so is the noise that follows.
    """

    private = False

    def __init__(self):
        self._calls = 0

    def random_bytes(self, count: int) -> bytes:
        """Return the first ``count`` bytes of this call's stream."""
        self._calls += 1
        return hashlib.shake_256(b"frozen %d" % self._calls).digest(count)


class Taped:
    """A spec that records what it releases, or plays what another run released.

    Args:
        spec: any spec of ``privacy/``; its values and methods are passed through.
        tape: releases to return instead of the run's own.
    """

    def __init__(self, spec: MechanismSpec | NoisyMax, tape: list | None = None):
        self._spec, self._tape = spec, tape
        self.recorded: list[np.ndarray] = []

    def __getattr__(self, name: str):
        return getattr(self._spec, name)

    def release_sum(self, *args, **options) -> np.ndarray:
        """Release a noisy sum, recorded."""
        released = self._spec.release_sum(*args, **options)
        self.recorded.append(np.array(released, dtype=np.float64))
        return released if self._tape is None else self._tape[len(self.recorded) - 1]

    def release(self, scores: np.ndarray, noise: NoiseSource) -> int:
        """Select; what is recorded are the qualities, because the choice itself is a random function of them."""
        self.recorded.append(self._spec.qualities(scores))
        return self._spec.release(scores, noise)


@dataclass(frozen=True)
class Replay:
    """Distances of two runs, release by release.

    Attributes:
        ratios: distance over declared sensitivity, shape (releases,); at most 1 where the claim holds.
    """

    ratios: np.ndarray

    @property
    def worst(self) -> float:
        """The largest ratio."""
        return float(self.ratios.max(initial=0.0))

    @property
    def holds(self) -> bool:
        """Whether every release stayed within the declared sensitivity."""
        return bool(np.isfinite(self.ratios).all()) and self.worst <= ROUNDING


def replay(run: Callable[[Any, Any, NoiseSource], Any], spec: MechanismSpec | NoisyMax, data, neighbour) -> Replay:
    """Run a mechanism on two neighbours and measure how far its releases move.

    Args:
        run: ``run(data, spec, noise)`` runs the real mechanism and returns its final public state (compared too).
        spec: the spec that ``run`` uses.
        data: D. A unit that only one side has must come last, so that the others keep their coins.
        neighbour: D'.

    Raises:
        AssertionError: the two runs made different numbers of releases, or ended in different public states: the
            mechanism looked at private data outside its releases.
    """
    first = Taped(spec)
    one = run(data, first, FrozenNoise())
    second = Taped(spec, first.recorded)
    other = run(neighbour, second, FrozenNoise())
    if len(first.recorded) != len(second.recorded):
        raise AssertionError("neighbours made different numbers of releases")
    if not isinstance(spec, NoisyMax) and not _equal(one, other):
        raise AssertionError("the same releases led to different public states")
    distances = [_distance(spec, a, b) for a, b in zip(first.recorded, second.recorded, strict=True)]
    return Replay(np.asarray(distances) / spec.sensitivity)


def _distance(spec, one: np.ndarray, other: np.ndarray) -> float:
    """Return the L2 distance of two sums, or the range of the change of two quality vectors."""
    difference = one - other
    return float(np.ptp(difference)) if isinstance(spec, NoisyMax) else float(np.linalg.norm(difference))


def _equal(one, other) -> bool:
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))
    return np.array_equal(np.asarray(one), np.asarray(other))


# -- constructed worst cases ----------------------------------------------------------------------------------


def worst_probabilities(k: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield named units as rows of source probabilities, shape (records, k): what could break a mixture release."""

    def one(**values: float) -> np.ndarray:
        row = np.zeros((1, k))
        for name, value in values.items():
            row[0, int(name.removeprefix("at"))] = value
        return row

    half = np.full((1, k), 0.5)
    yield "nothing predicts it", one()
    yield "one source predicts it", one(at1=1.0)
    yield "one source, hardly", one(at2=1e-30)
    yield "smallest float32", one(at0=1e-45)
    yield "nearly all sources", np.r_[np.ones(k - 1), 0.0][None]
    yield "all sources", np.ones((1, k))
    yield "NaN", np.full((1, k), np.nan)
    yield "one NaN", np.where(np.arange(k) == 1, np.nan, half)
    yield "infinity", np.where(np.arange(k) == 1, np.inf, half)
    yield "huge", one(at0=1e200, at1=1e-200)
    yield "negative", one(at0=-1.0, at1=1.0, at2=0.5)
    yield "1000 equal records", np.tile(one(at1=1.0), (1000, 1))
    yield "a record of every source, and NaN", np.concatenate([np.eye(k), np.full((2, k), np.nan)])
    yield "many hardly predicted", np.tile(one(at2=1e-45), (50, 1))


def worst_records(width: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield named units as (features, labels): what could break a clipped gradient sum."""
    ones = np.ones((1, width))
    yield "plain", ones, np.ones(1)
    yield "huge features", np.full((1, width), 1e18), np.zeros(1)
    yield "overflowing features", np.full((1, width), 3e38), np.zeros(1)
    yield "NaN feature", np.where(np.arange(width) == 1, np.nan, ones), np.ones(1)
    yield "NaN label", ones, np.full(1, np.nan)
    yield "1000 equal records", np.tile(ones, (1000, 1)), np.zeros(1000)
    yield "1000 records, one NaN", np.r_[np.ones((999, width)), np.full((1, width), np.nan)], np.zeros(1000)
    yield "records of both labels", np.ones((10, width)) * np.arange(10)[:, None], np.arange(10.0) % 2
