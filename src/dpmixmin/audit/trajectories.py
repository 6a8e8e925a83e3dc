"""Thousands of runs of a mixture learner at once: world ``without`` (D), and world ``with`` (D and a canary).

Everything that the guarantee rests on goes through the shipped code: the coins (``spec.sample``), the choice of
records, the canary's vector with its clipping and grid rounding (``canaries.py``), and the noise (``spec.add_noise``).
Two things are written anew, for speed: the sum of all OTHER units at many weights at once, in closed form with matrix
products, and the learner's steps after a release, for many runs side by side. :func:`simulate` therefore repeats one
run of each world with the shipped learner, on the same randomness, and raises if the two part.

The adversary is the one of the proof. It knows D and the coins of all units but the canary, so each step has ONE
batch, and one subset of everybody's records, for all runs and both worlds: the guarantee holds for every value of
them. It also knows what D contributes at the weights that were released so far. The twin's own sum of D is not
rounded unit by unit, so it is up to a grid point a unit away from the shipped one; that is a function of D and of
earlier releases too, which the adversary knows, and changes nothing about what the canary can show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from dpmixmin.audit.canaries import Canary, Learner, joined
from dpmixmin.audit.others import Others
from dpmixmin.audit.replay import Taped
from dpmixmin.audit.silent import Silent
from dpmixmin.mixing.learners import learn, learn_private
from dpmixmin.mixing.objective import UnitGradients
from dpmixmin.privacy.noise import NoiseSource
from dpmixmin.privacy.subsample import SECRET_BYTES

WITHOUT = "without"
"""Name of the world without a canary; the others have their canary's."""

_FLOOR = 1e-4
"""Least weight of a source in expectation maximisation, as in ``learners.py``."""


class TwinDiffers(AssertionError):
    """The fast runs and the shipped learner do different things: what the audit shows is not about the mechanism."""


@dataclass(frozen=True)
class Runs:
    """Many runs of each world.

    Attributes:
        weights: world to released weights, shape (runs, k).
        ratios: (canary, world) to the log-likelihood ratio of the T noisy sums, shape (runs,); without noise, the
            sums' correlation with the canary's vectors.
    """

    weights: dict[str, np.ndarray]
    ratios: dict[tuple[str, str], np.ndarray]


def simulate(
    mechanism: Learner,
    others: UnitGradients,
    canaries: Sequence[Canary],
    runs: int,
    noise: NoiseSource,
    *,
    silent: bool = False,
    workers: int = 1,
) -> Runs:
    """Run a learner many times in world ``without`` and in the world of each canary.

    The log-likelihood ratio of a step is that of x = (released minus D's sum) under v + N(0, s^2) against N(0, s^2),
    with v the canary's vector at the run's weights: <x, v>/s^2 - |v|^2/(2 s^2), and log(1 - q + q exp(of that)) where
    the canary enters with probability q. Steps add up.

    Args:
        mechanism: what is audited.
        others: the units of D, prepared by the mechanism.
        canaries: units that are not in D.
        runs: of each world.
        noise: source of coins, secrets and noise.
        silent: switch the noise off (not the coins): the control.
        workers: threads for the sums; they change nothing but the speed.

    Raises:
        TwinDiffers: the first run of a world is not what the shipped learner does with the same randomness.
    """
    spec, k, source = mechanism.spec, others.table.k, Silent(noise) if silent else noise
    steps = _LEARNERS[spec.statistic](mechanism, k, runs * (1 + len(canaries)))
    sums = Others(mechanism, others)
    tapes = [_Tape() for _ in range(1 + len(canaries))]
    ratios = {(canary.name, world): np.zeros(runs) for canary in canaries for world in (WITHOUT, canary.name)}
    with ThreadPoolExecutor(workers) as pool:
        for _ in range(spec.steps):
            secret = None if mechanism.records_per_step is None else source.random_bytes(SECRET_BYTES)
            batch = spec.sample(others.count, source)
            known = np.rint(sums(steps.weights, batch, secret, pool) / spec.grid).astype(np.int64)
            total, entered = known.copy(), [np.zeros(0, dtype=bool)]
            vectors = []
            for world, canary in enumerate(canaries, start=1):
                own = slice(world * runs, (world + 1) * runs)
                at = np.concatenate([steps.weights[:, :runs], steps.weights[:, own]], axis=1)
                vectors.append(canary.vectors(mechanism, at, secret))
                coins = spec.sample(runs, source)
                total[own] += vectors[-1][runs:] * coins[:, None]
                entered.append(coins[:1])
            released = spec.add_noise(total.ravel(), source).reshape(total.shape)
            beyond = (released - known) * spec.grid
            for world, (canary, both) in enumerate(zip(canaries, vectors, strict=True), start=1):
                for name, start, v in ((WITHOUT, 0, both[:runs]), (canary.name, world, both[runs:])):
                    x = beyond[start * runs : (start + 1) * runs]
                    ratios[canary.name, name] += _log_ratio(x, v * spec.grid, mechanism, silent)
            for world, tape in enumerate(tapes):
                run = world * runs
                tape.append(secret, np.concatenate([batch, entered[world]]), released[run], total[run])
            steps.update(released.T * spec.grid / spec.expected_batch)
    weights = dict(zip([WITHOUT, *(canary.name for canary in canaries)], steps.released(runs), strict=True))
    for canary, (world, found), tape in zip([None, *canaries], weights.items(), tapes, strict=True):
        _compare(mechanism, others, canary, found[0], tape, world)
    return Runs(weights, ratios)


def _log_ratio(x: np.ndarray, v: np.ndarray, mechanism: Learner, silent: bool) -> np.ndarray:
    """Return one step's log-likelihood ratio of each run; see :func:`simulate`."""
    inner, variance = (x * v).sum(axis=1), mechanism.spec.noise_std**2
    if silent:
        return inner
    entered, q = (inner - (v * v).sum(axis=1) / 2) / variance, mechanism.spec.sampling_rate
    return np.logaddexp(math.log1p(-q), math.log(q) + entered) if q < 1 else entered


# -- after a release ------------------------------------------------------------------------------------------


class _Steps:
    """What a learner makes of its releases, for many runs: weights of shape (k, runs)."""

    def __init__(self, mechanism: Learner, k: int, columns: int):
        self._rate, spec = mechanism.learning_rate, mechanism.spec
        average = mechanism.learner != "algorithm1" and spec.steps > 1
        self._from = 1 + spec.steps // 2 if average else spec.steps
        self._done, self._total = 0, np.zeros((k, columns))
        self.weights = np.full((k, columns), 1 / k)

    def update(self, released: np.ndarray) -> None:
        """Make one step from noisy sums over the expected batch, shape (k, runs)."""
        self._done += 1
        self.weights = self._next(released)
        if self._done >= self._from:
            self._total += self.weights

    def released(self, runs: int) -> list[np.ndarray]:
        """Return the final weights of each world, shape (runs, k)."""
        final = (self._total / self._total.sum(axis=0)).T
        return [final[start : start + runs] for start in range(0, len(final), runs)]


class _Descent(_Steps):
    def __init__(self, mechanism: Learner, k: int, columns: int):
        super().__init__(mechanism, k, columns)
        self._log = np.zeros((k, columns))

    def _next(self, released: np.ndarray) -> np.ndarray:
        self._log = self._log - self._rate * released
        self._log -= self._log.max(axis=0)
        exponentials = np.exp(self._log)
        return exponentials / exponentials.sum(axis=0)


class _Maximisation(_Steps):
    _mass: np.ndarray | float = 0.0

    def _next(self, released: np.ndarray) -> np.ndarray:
        self._mass = self._mass + released.sum(axis=0)
        mean = released / np.maximum(self._mass / self._done, 0.1)
        return _to_simplex(self.weights + self._rate * (mean - self.weights))


def _to_simplex(points: np.ndarray) -> np.ndarray:
    """Return the nearest points of the floored simplex, shape (k, runs): ``learners.py`` for many runs."""
    k = len(points)
    shifted = np.sort(points - _FLOOR, axis=0)[::-1]
    excess = (np.cumsum(shifted, axis=0) - (1 - k * _FLOOR)) / np.arange(1, k + 1)[:, None]
    last = k - 1 - (shifted > excess)[::-1].argmax(axis=0)
    return np.maximum(points - _FLOOR - np.take_along_axis(excess, last[None], axis=0), 0.0) + _FLOOR


_LEARNERS = {"gradients": _Descent, "responsibilities": _Maximisation}


# -- against the shipped learner ------------------------------------------------------------------------------


class _Tape(NoiseSource):
    """The randomness of one run, played to the shipped learner in the order in which it asks."""

    private = False

    def __init__(self):
        self._secrets: list[bytes | None] = []
        self._batches: list[np.ndarray] = []
        self._noise: list[np.ndarray] = []
        self.released: list[np.ndarray] = []
        self.units = 0

    def append(self, secret: bytes | None, batch: np.ndarray, released: np.ndarray, total: np.ndarray) -> None:
        """Remember a step: its secret and batch, and its sum with and without noise, in grid units."""
        self._secrets.append(secret)
        self._batches.append(batch)
        self._noise.append(released - total)
        self.released.append(released)
        self.units = len(batch)

    def random_bytes(self, count: int) -> bytes:
        """Return the step's secret."""
        return _taken(self._secrets)

    def coins(self, rate: float, count: int) -> np.ndarray:
        """Return the step's batch."""
        return _taken(self._batches)

    def rounded_gaussian(self, scale: float, size: int) -> np.ndarray:
        """Return the step's noise."""
        return _taken(self._noise)[:size]


def _taken(values: list):
    if not values:
        raise TwinDiffers("mixture audit: the shipped learner asks for more randomness than its steps need")
    return values.pop(0)


def _compare(
    mechanism: Learner, others: UnitGradients, canary: Canary | None, found: np.ndarray, tape: _Tape, world: str
) -> None:
    """Repeat one run with the shipped learner, given the twin's releases step by step.

    Each step's own release may be two grid points a unit away from the twin's (rounding of every unit toward zero, and
    shrinking by an ulp at the clip), far less than what one unit can contribute. What follows from the same releases
    may differ by floating-point rounding only.

    Raises:
        TwinDiffers: it is more.
    """
    spec, rate, limit = mechanism.spec, mechanism.learning_rate, mechanism.records_per_step
    shipped = Taped(spec, [sums * spec.grid for sums in tape.released])
    units = others if canary is None else joined(others, canary.gradients)
    if canary is None or canary.direction is None:
        learned = learn(mechanism.learner, units.table, shipped, rate, tape, limit)
    else:
        average = mechanism.learner != "algorithm1"
        learned = learn_private(units, shipped, rate, tape, average=average, records_per_step=limit)
    distance = np.abs(np.rint(np.asarray(shipped.recorded) / spec.grid) - np.asarray(tape.released)).max()
    if not distance <= 2 * (tape.units + 1):
        raise TwinDiffers(f"mixture audit, world {world}: the sums are not those of the shipped learner")
    if not np.abs(learned.weights - found).max() <= 1e-9:
        raise TwinDiffers(f"mixture audit, world {world}: the weights are not those of the shipped learner")
