"""Composing privacy loss distributions: laws of single steps, composed with exponential tilting.

The law of one step's privacy loss on a grid comes from :mod:`dpmixmin.privacy.step_laws`. The law of a sum of steps is
a convolution. A plain Fourier transform computes it with an absolute error near 1e-13, which is a good part of delta
where delta is 1e-12 and there are 36,000 steps. So each law p is tilted first,

    w(l) = p(l) e^(order l) / M(order),

which moves the bulk of the sum to where the wanted delta is decided (a saddle point, as in the Chernoff bound). The
tilted laws are convolved in a window around their mean and the tilt is taken back. Errors are then RELATIVE to delta.

Everything that the window leaves out is counted against privacy:

* what lies right of it is added to delta by Chernoff's bound;
* what lies outside wraps around to a place inside it, where it only adds mass (the laws are not negative);
* the transform's rounding error is bounded by :data:`ROUNDING` and added.

The grid is chosen by :class:`Law` from what it costs: connect-the-dots spreads a loss over two grid points, which adds
at most about grid² / 6 to its variance, and (slope + 1) grid² / 12 to epsilon, a step; slope is that of -log delta.
Any grid gives a valid upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import fft

from dpmixmin.privacy.step_laws import Step

MAX_POINTS = 1 << 23
"""Largest transform; a grid that needs more is refused (64 MiB an array)."""

ROUNDING = 3e-16
"""Error of the transform per step and per doubling of its length, relative to the largest probability of the sum."""

NEGLIGIBLE = 1e-40
"""Below this, delta is bounded by Chernoff's bound alone."""

_SHIFTS = (1e-4, 1e-3, 0.01, 0.05, 0.2, 0.5, 1, 2, 3, 4.5, 6, 7.5, 9, 12, 20)
"""Shifts of the order that a window's Chernoff bounds are tried at, over the deviation; small ones for long tails."""

_LOG_LEFT, _LOG_RIGHT = -32.0, -40.0
"""Log of the tilted mass that may lie left and right of the window."""


@dataclass(frozen=True)
class Window:
    """The composed law, tilted, near the losses that decide delta; for one direction.

    Attributes:
        losses: float64 of shape (n,), ascending.
        tilted: tilted probabilities of the losses, rounding errors included.
        rounding: what of each is for rounding errors.
        order: the tilt.
        log_moment: log of the tilt's normaliser.
        mean: tilted mean.
        extra: probability that always counts: infinite losses and what lies right of the window.
    """

    losses: np.ndarray
    tilted: np.ndarray
    rounding: float
    order: float
    log_moment: float
    mean: float
    extra: float

    def _scaled(self, first: int, center: float) -> tuple[float, np.ndarray, np.ndarray]:
        """Return (scale, p, p e^(center - loss)) from an index on; p times scale are the probabilities of losses."""
        scale = math.exp(self.log_moment - self.order * center)
        behind = center - self.losses[first:]
        probabilities = self.tilted[first:] * np.exp(self.order * behind)
        return scale, probabilities, probabilities * np.exp(behind)

    def delta(self, epsilon: float) -> tuple[float, float]:
        """Return (delta at ``epsilon``, its log's downward slope)."""
        first = int(np.searchsorted(self.losses, epsilon, side="right"))
        scale, above, discounted = self._scaled(first, epsilon)
        falling = scale * float(discounted.sum())
        found = self.extra + max(scale * float(above.sum()) - falling, 0.0)
        return found, falling / found if found else 0.0

    def epsilon(self, delta: float) -> tuple[float, float, bool]:
        """Return the smallest epsilon of any sign at ``delta``, delta's slope there, and if rounding is small there.

        Where everything in the window meets ``delta``, the window's first loss is returned: an upper bound.
        """
        center = min(self.mean, self.losses[-1])
        reach = 500 / (self.order + 1)  # exponentials further left of the center would overflow
        while True:
            start = int(np.searchsorted(self.losses, center - reach))
            scale, probabilities, discounted = self._scaled(start, center)
            above = np.cumsum(probabilities[::-1])[::-1]
            below = np.cumsum(discounted[::-1])[::-1]
            wanted = (delta - self.extra) / scale
            # At each loss, only the losses above it count.
            with np.errstate(over="ignore", invalid="ignore"):  # far right of the center both terms are 0
                gained = above[1:] - np.exp(self.losses[start:-1] - center) * below[1:]
            meets = np.flatnonzero(np.append(np.nan_to_num(np.maximum(gained, 0.0)), 0.0) <= wanted)
            if not meets.size:
                return math.inf, 0.0, True
            index = int(meets[0])
            if index > 0:
                break
            if start == 0:
                return float(self.losses[0]), self.order, False
            center -= reach / 2
        here, previous = self.losses[start + index], self.losses[start + index - 1]
        excess = above[index] - wanted
        found = previous if excess <= 0 else min(max(center + math.log(excess / below[index]), previous), here)
        return float(found), float(scale * excess / delta), self.tilted[start + index] > 100 * self.rounding


class Direction:
    """The composition of steps in one direction.

    Args:
        steps: laws of the steps, all on one grid.
        grid: distance of two losses.
        pessimistic: count what is left out against privacy; False leaves it out, for lower bounds.
    """

    def __init__(self, steps: Sequence[Step], grid: float, pessimistic: bool):
        self._steps, self._grid, self._pessimistic = steps, grid, pessimistic
        with np.errstate(divide="ignore"):
            self._logs = [np.log(step.probabilities) for step in steps]
        self._indices = [step.lowest + np.arange(step.probabilities.size, dtype=np.float64) for step in steps]
        self.infinite = -math.expm1(sum(step.steps * math.log1p(-min(step.infinite, 1 - 1e-16)) for step in steps))
        self.lowered = sum(step.steps * step.lowered for step in steps)
        self._lowest = sum(step.steps * step.lowest for step in steps)
        self._highest = sum(step.steps * (step.lowest + step.probabilities.size - 1) for step in steps)
        # Laws with atoms (pure DP) reach their largest loss with large probability: tilting further is of no use.
        self._ceiling = self._highest * grid
        self._ceiling -= 1e-3 * (self._ceiling - self._tilt(0.0)[1])

    def _tilt(self, order: float) -> tuple[float, float, float, list[np.ndarray], list[float]]:
        """Return log moment, mean, variance of the tilted sum, the tilted laws and their mean indices."""
        log_moment = mean = variance = 0.0
        laws, means = [], []
        for step, logs, indices in zip(self._steps, self._logs, self._indices, strict=True):
            exponents = logs + (order * self._grid) * indices
            top = exponents.max()
            law = np.exp(exponents - top)
            total = law.sum()
            law /= total
            first = float(law @ indices)
            second = float(law @ (indices - first) ** 2)
            log_moment += step.steps * (top + math.log(total))
            mean += step.steps * first * self._grid
            variance += step.steps * second * self._grid**2
            laws.append(law)
            means.append(first)
        return float(log_moment), mean, variance, laws, means

    def _log_moment(self, order: float) -> float:
        found = 0.0
        for step, logs, indices in zip(self._steps, self._logs, self._indices, strict=True):
            exponents = logs + (order * self._grid) * indices
            top = exponents.max()
            found += step.steps * (top + math.log(np.exp(exponents - top).sum()))
        return found

    def _order_where(self, too_low: Callable[[float, float, float], bool]) -> float:
        """Return about the order in [0, 30 / grid] where a predicate of (order, log moment, mean) turns false."""
        high = 1.0
        limit = 30 / self._grid
        while high < limit and too_low(high, *self._tilt(high)[:2]):
            high *= 4
        low = high / 4 if high > 1 else 0.0
        for _ in range(12):
            middle = math.sqrt(low * high) if low else high / 8
            if too_low(middle, *self._tilt(middle)[:2]):
                low = middle
            else:
                high = middle
            if high < 1.05 * low or high < 1e-6:
                break
        return high

    def order_for_delta(self, delta: float) -> float:
        """Return the order whose Chernoff bound meets ``delta`` at the tilted mean."""
        target = math.log(delta)
        return self._order_where(
            lambda order, log_moment, mean: log_moment - order * mean > target and mean < self._ceiling
        )

    def order_for_epsilon(self, epsilon: float) -> float:
        """Return the order whose tilted mean is ``epsilon``, or 0 where the untilted mean lies above."""
        if self._tilt(0.0)[1] >= epsilon:
            return 0.0
        wanted = min(epsilon, self._ceiling)
        return self._order_where(lambda order, log_moment, mean: mean < wanted)

    def window(self, order: float) -> Window:
        """Compose the steps, tilted by ``order``.

        Raises:
            MemoryError: the window needs more than MAX_POINTS points.
            FloatingPointError: a result is not finite.
        """
        log_moment, mean, variance, laws, means = self._tilt(order)
        deviation = max(math.sqrt(variance), self._grid)
        # Chernoff bounds of the tilted sum on either side; every shift gives a valid one, the best is taken.
        shifts = [factor / deviation for factor in _SHIFTS]
        right = [(self._log_moment(order + shift) - log_moment - _LOG_RIGHT) / shift for shift in shifts]
        left = [-(self._log_moment(order - shift) - log_moment - _LOG_LEFT) / shift for shift in shifts]
        last = min(math.ceil(min(right) / self._grid), self._highest)
        start = max(math.floor(max(left) / self._grid), self._lowest)
        length = fft.next_fast_len(last - start + 1, real=True)
        if length > MAX_POINTS:
            raise MemoryError(f"a window of {length} points")

        transform = np.ones(length // 2 + 1, dtype=np.complex128)
        offset = 0
        for step, law, first in zip(self._steps, laws, means, strict=True):
            # Rolled to its mean, so that the phases that the power multiplies stay small.
            center = round(first) - step.lowest
            folded = np.zeros(-(-law.size // length) * length)
            folded[: law.size] = law
            folded = np.roll(folded.reshape(-1, length).sum(axis=0), -center)
            transform *= fft.rfft(folded) ** step.steps
            offset += step.steps * (step.lowest + center)
        composed = np.maximum(np.roll(fft.irfft(transform, length), offset - start), 0.0)
        if not np.isfinite(composed).all():
            raise FloatingPointError("the composed privacy loss is not finite")
        rounding = beyond = 0.0
        if self._pessimistic:
            rounding = composed.max() * ROUNDING * sum(step.steps for step in self._steps) * math.log2(2 * length)
            if start + length <= self._highest:
                beyond = math.exp(min(log_moment - order * last * self._grid + _LOG_RIGHT, 0.0))
        losses = (start + np.arange(length)) * self._grid
        return Window(losses, composed + rounding, rounding, order, log_moment, mean, self.infinite + beyond)

    def epsilon(self, delta: float) -> tuple[float, float]:
        """Return (epsilon >= 0 at ``delta``, the downward slope of log delta there)."""
        if delta <= self.infinite:
            return math.inf, 0.0
        order, best = self.order_for_delta(delta - self.infinite), (math.inf, 0.0)
        low, high = 0.0, math.inf
        for _ in range(10):
            window = self.window(order)
            found, slope, good = window.epsilon(delta)
            found -= self.lowered
            agrees = abs(found - best[0]) <= 1e-4 * found
            best = min(best, (max(found, 0.0), slope))  # every tilt gives an upper bound
            if good or agrees or found <= 0 or math.isinf(found):
                break
            # The law has several modes (a unit that is hardly ever sampled), and the tilt went to a wrong one.
            if window.mean > found or found + self.lowered <= window.losses[0]:
                high = order
            else:
                low = order
            order = (low + high) / 2 if high < math.inf else 1.2 * order
            if high < 1.001 * low:
                break
        return best

    def delta(self, epsilon: float) -> tuple[float, float]:
        """Return (delta at ``epsilon`` >= 0, the downward slope of its log there)."""
        epsilon += self.lowered
        if epsilon >= self._highest * self._grid:
            return self.infinite, 0.0
        order = self.order_for_epsilon(epsilon)
        chernoff = math.exp(min(self._log_moment(order) - order * epsilon, 0.0))
        if chernoff < NEGLIGIBLE and self._pessimistic:
            return self.infinite + chernoff, 0.0
        found, slope = self.window(order).delta(epsilon)
        return min(1.0, found), slope


# -- both directions, with the grid chosen ------------------------------------------------------------------------


class Law:
    """A composition in both directions, on the grid that a query needs.

    Args:
        laws_on: returns, for a grid, the pair of laws of every event.
        steps: total number of steps, which the grid's excess grows with.
        rounded: number of laws from ``parameter_step``; each is rounded up by less than a grid point.
        start: first grid to try.
        grid: fixed grid, or None to choose.
        pessimistic: upper bounds; False gives lower bounds.
    """

    def __init__(
        self,
        laws_on: Callable[[float], Sequence[tuple[Step, Step]]],
        *,
        steps: int,
        rounded: int,
        start: float,
        grid: float | None = None,
        pessimistic: bool = True,
    ):
        self._laws_on, self._steps, self._rounded, self._pessimistic = laws_on, steps, rounded, pessimistic
        self._start, self._fixed = start, grid

    def _both(self, grid: float) -> tuple[Direction, ...]:
        pairs = self._laws_on(grid)
        symmetric = all(removed is added for removed, added in pairs)
        return tuple(
            Direction([pair[side] for pair in pairs], grid, self._pessimistic) for side in range(1 if symmetric else 2)
        )

    def _needed(self, epsilon: float, slope: float, tolerance: float) -> float:
        """Return the grid whose excess in epsilon is ``tolerance`` of it; tiny epsilons get what delta can feel."""
        excess = tolerance * max(epsilon, 0.01 / (slope + 1), 1e-4)
        slope = min(slope, 100 / max(epsilon, 1e-4))  # steeper only where atoms end, which no grid resolves
        return min(
            math.sqrt(12 * excess / (self._steps * (slope + 1))),
            excess / self._rounded if self._rounded else math.inf,
            1 / (slope + 1),
        )

    def epsilon(self, delta: float, tolerance: float) -> float:
        """Return epsilon at ``delta``, with the grid's excess below ``tolerance`` relative."""

        def query(both: Sequence[Direction]) -> tuple[float, float, float]:
            found, slope = max(each.epsilon(delta) for each in both)
            return found, found, slope

        return self._solve(query, tolerance)

    def delta(self, epsilon: float, tolerance: float) -> float:
        """Return delta at ``epsilon``; the grid's excess moves epsilon by ``tolerance`` relative."""

        def query(both: Sequence[Direction]) -> tuple[float, float, float]:
            found, slope = max(each.delta(epsilon) for each in both)
            # A shift of epsilon by e changes delta by a share of slope * e.
            return found, max(epsilon, 1 / (slope + 1)), slope

        return self._solve(query, tolerance)

    def _solve(self, query: Callable[[Sequence[Direction]], tuple[float, float, float]], tolerance: float) -> float:
        """Refine the grid until a query (value, epsilon, slope) is as exact as asked for."""
        if self._fixed:
            return query(self._both(self._fixed))[0]
        grid, best = _rounded(self._start), None
        for _ in range(8):
            try:
                both = self._both(grid)
                found, epsilon, slope = query(both)
            except MemoryError:
                if best is not None:
                    break  # a coarser grid's value is a valid bound, too
                grid *= 8
                continue
            best = found
            needed = self._needed(epsilon, slope, tolerance)
            if not self._pessimistic:
                # What all losses are lowered by is of second order in the grid.
                lowered = max(each.lowered for each in both)
                needed = min(needed, grid * math.sqrt(tolerance * max(epsilon, 1e-4) / max(lowered, 1e-300)))
            least = found == 0 and self._pessimistic  # an upper bound of 0 is the answer
            if grid <= needed or least or not math.isfinite(found):
                break
            grid = _rounded(max(needed, grid / 64))
        if best is None:
            raise MemoryError("no grid is coarse enough")
        return best


def _rounded(grid: float) -> float:
    """Round down to a power of 2^(1/4), so that queries share the laws of single steps."""
    return 2.0 ** (math.floor(4 * math.log2(grid)) / 4)
