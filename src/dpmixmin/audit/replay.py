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

from dpmixmin.privacy.mechanisms import GridGaussian, MechanismSpec
from dpmixmin.privacy.noise import NoiseSource
from dpmixmin.privacy.selection import NoisyMax

ROUNDING = 1 + 1e-12
"""Float64 rounding of the difference of two releases: the only slack a check may give."""


class Diverged(AssertionError):
    """Neighbours that released the same went different ways: private data left the mechanism outside its releases."""


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


class OftenPresent(FrozenNoise):
    """Frozen noise under which every unit enters the first sampled step, and each of the others with probability 1/2.

    The claimed sensitivity is that of a unit which entered the step, and at a small sampling rate it never might.
    """

    def __init__(self):
        super().__init__()
        self._sampled = 0

    def coins(self, rate: float, count: int) -> np.ndarray:
        """Return the coins of one step, whatever the rate."""
        self._sampled += 1
        return super().coins(1.0 if self._sampled == 1 else 0.5, count)


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
        if self._tape is None:
            return released
        if len(self.recorded) > len(self._tape):
            raise Diverged("neighbours made different numbers of releases")
        return self._tape[len(self.recorded) - 1]

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


@dataclass(frozen=True)
class Recording:
    """One run: its releases, and the public state that it ended in."""

    releases: list[np.ndarray]
    state: Any


Run = Callable[[Any, Any, NoiseSource], Any]
"""``run(data, spec, noise)`` runs the real mechanism and returns its final public state."""


def record(
    run: Run, spec: MechanismSpec | NoisyMax, data, noise: Callable[[], NoiseSource] = FrozenNoise
) -> Recording:
    """Run a mechanism on D; for :func:`replay`, where D has several neighbours."""
    taped = Taped(spec)
    return Recording(taped.recorded, run(data, taped, noise()))


def replay(
    run: Run,
    spec: MechanismSpec | NoisyMax,
    data,
    neighbour,
    noise: Callable[[], NoiseSource] = FrozenNoise,
) -> Replay:
    """Run a mechanism on two neighbours and measure how far its releases move.

    Args:
        run: the mechanism; the states that it returns are compared too.
        spec: the spec that ``run`` uses.
        data: D, or the :class:`Recording` of D. A unit that only one side has must come last, so that the others keep
            their coins.
        neighbour: D'.
        noise: makes the frozen randomness of one run.

    Raises:
        Diverged: the two runs made different numbers of releases, or ended in different public states: the
            mechanism looked at private data outside its releases.
    """
    one = data if isinstance(data, Recording) else record(run, spec, data, noise)
    taped = Taped(spec, one.releases)
    state = run(neighbour, taped, noise())
    if len(one.releases) != len(taped.recorded):
        raise Diverged("neighbours made different numbers of releases")
    if not isinstance(spec, NoisyMax) and not _equal(one.state, state):
        raise Diverged("the same releases led to different public states")
    distances = [_distance(spec, a, b) for a, b in zip(one.releases, taped.recorded, strict=True)]
    return Replay(np.asarray(distances) / spec.sensitivity)


def _distance(spec, one: np.ndarray, other: np.ndarray) -> float:
    """Return the L2 distance of two sums, or the range of the change of two quality vectors."""
    if isinstance(spec, NoisyMax):
        return float(np.ptp(one - other))
    if isinstance(spec, GridGaussian):
        # In grid points, which is exact: the noise can be so large that the difference of two floats is not.
        return float(np.linalg.norm(np.rint(one / spec.grid) - np.rint(other / spec.grid))) * spec.grid
    return float(np.linalg.norm(one - other))


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
            row[0, int(name.removeprefix("at")) % k] = value
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


def worst_texts(width: int) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield named users as (tokens of shape (rows, width), scored tokens of each row, record of each row).

    Their tokens are the first three of any vocabulary.
    """
    copies = 50
    same, mixed = np.zeros(width, dtype=np.int64), np.arange(width) % 3
    each, one = np.arange(copies), np.zeros(copies, dtype=int)
    full = width - 1
    for name, row, length, of_record in (
        ("nothing to predict", same, [0], one[:1]),
        ("one token", same, [1], one[:1]),
        ("one token over and over", same, [full], one[:1]),
        (f"{copies} equal texts", mixed, [full] * copies, each),
        (f"one text of {copies} windows", mixed, [full] * copies, one),
        (f"{copies} texts, most of them empty", mixed, [full] + [0] * (copies - 1), each),
    ):
        yield name, np.tile(row, (len(length), 1)), np.asarray(length), of_record


def worst_logits() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield named units as (logit of each record, its label): what could break the measuring of a label model."""
    for name, logits, labels in (
        ("right", [9.0], [1.0]),
        ("as wrong as can be", [-3e38], [1.0]),
        ("NaN score", [np.nan], [1.0]),
        ("infinite score", [np.inf], [0.0]),
        ("no label", [1.0], [np.nan]),
        ("1000 equal records", [9.0] * 1000, [1.0] * 1000),
        ("records of both labels, one NaN", [1.0, -2.0, np.nan], [0.0, 1.0, 1.0]),
    ):
        yield name, np.asarray(logits), np.asarray(labels)


def worst_token_scores() -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yield named users as the tokens' log-probabilities of each text: what could break the measuring of a model."""
    for name, texts in (
        ("certain", [[0.0] * 5]),
        ("as unlikely as can be", [[-3e38] * 5]),
        ("NaN score", [[-1.0, np.nan]]),
        ("infinite score", [[-np.inf]]),
        ("no token", [[]]),
        ("1000 equal texts", [[0.0] * 3] * 1000),
        ("one text of 100,000 tokens", [[-1.0] * 100_000]),
        ("1000 texts, one NaN", [[-1.0]] * 999 + [[np.nan]]),
    ):
        yield name, [np.asarray(values, dtype=np.float64) for values in texts]
