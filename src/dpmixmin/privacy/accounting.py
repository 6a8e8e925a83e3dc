"""Privacy accounting: exact for full batches, privacy loss distributions (PLD) for Poisson sampling.

All quantities are for add/remove-one-unit neighbours and sensitivity 1, so ``noise multiplier`` is the noise's
standard deviation divided by the clipping norm.

* Full batch, T steps: one Gaussian mechanism with mu = sqrt(T) / noise multiplier; its trade-off is known in closed
  form (Balle & Wang 2018, Theorem 8).
* Poisson with rate q < 1: pessimistic PLDs (dp-accounting), so every epsilon is an upper bound.

Calibration returns the noise multiplier whose epsilon is at or below the target and within 0.1 % of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from scipy.special import log_ndtr

REPORT_DELTAS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
REPORT_EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True)
class Event:
    """T steps of a (possibly Poisson-subsampled) Gaussian mechanism: what the accountants need, and nothing else.

    Attributes:
        noise_multiplier: noise standard deviation over sensitivity, > 0.
        sampling_rate: Poisson rate q in (0, 1]; 1 is full batch.
        steps: T >= 1.
    """

    noise_multiplier: float
    sampling_rate: float
    steps: int


def grid_for(events: Iterable[Event]) -> float:
    """Return the discretisation of the privacy loss for a composition.

    Any grid gives a valid upper bound; this one keeps the excess small. Pessimistic connect-the-dots PLDs lose about
    ``steps * grid**2`` in epsilon, and need a grid well below one step's typical loss, q / noise multiplier.
    """
    return min(
        min(1e-3, 0.03 * event.sampling_rate / event.noise_multiplier, 1e-2 / math.sqrt(event.steps))
        for event in events
    )


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return delta(epsilon) of a mu-Gaussian mechanism, exact up to float64."""
    if mu <= 0:
        return 0.0
    first = log_ndtr(mu / 2 - epsilon / mu)
    second = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return float(math.exp(first) * -math.expm1(min(second - first, 0.0)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon >= 0 with ``gaussian_delta(mu, epsilon) <= delta``."""
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while gaussian_delta(mu, high) > delta:
        low, high = high, 2 * high
    return _bisect(lambda epsilon: gaussian_delta(mu, epsilon) <= delta, low, high)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu whose Gaussian mechanism is (epsilon, delta)-DP (never above it)."""
    low, high = 0.0, 1.0
    while gaussian_delta(high, epsilon) <= delta:
        low, high = high, 2 * high
    return _bisect(lambda mu: gaussian_delta(mu, epsilon) > delta, low, high, keep="low")


def _bisect(is_high, low: float, high: float, keep: str = "high") -> float:
    """Shrink [low, high] around the switch of a monotone predicate; return the asked-for end."""
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if is_high(middle):
            high = middle
        else:
            low = middle
    return high if keep == "high" else low


@lru_cache(maxsize=4)
def _pld(event: Event, grid: float, pessimistic: bool = True):
    from dp_accounting.pld import privacy_loss_distribution as pld

    single = pld.from_gaussian_mechanism(
        event.noise_multiplier,
        sampling_prob=event.sampling_rate,
        value_discretization_interval=grid,
        pessimistic_estimate=pessimistic,
        use_connect_dots=pessimistic,
    )
    return single.self_compose(event.steps)


class Composition:
    """Adaptive sequential composition of events on the same units.

    Args:
        events: the events; an empty composition is perfectly private.
        grid: discretisation of the privacy loss; default :func:`grid_for`.
        pessimistic: upper bounds (default) or, to bracket them, lower bounds.
    """

    def __init__(self, events: Iterable[Event], *, grid: float | None = None, pessimistic: bool = True):
        self.events: Sequence[Event] = tuple(events)
        full = [event for event in self.events if event.sampling_rate == 1]
        self._sampled = [event for event in self.events if event.sampling_rate < 1]
        self._full_mu = math.sqrt(sum(event.steps / event.noise_multiplier**2 for event in full))
        self.mu = None if self._sampled else self._full_mu
        """Parameter of the equivalent Gaussian mechanism, or None where the composition is not one."""
        self._grid, self._pessimistic = grid, pessimistic
        self._composed = None

    def _distribution(self):
        if self._composed is None:
            events = list(self._sampled)
            if self._full_mu:
                events.append(Event(1 / self._full_mu, 1.0, 1))
            grid = self._grid or grid_for(events)
            composed = _pld(events[0], grid, self._pessimistic)
            for event in events[1:]:
                composed = composed.compose(_pld(event, grid, self._pessimistic))
            self._composed = composed
        return self._composed

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on epsilon at ``delta`` (exact where the composition is Gaussian)."""
        if self.mu is not None:
            return gaussian_epsilon(self.mu, delta)
        return max(0.0, float(self._distribution().get_epsilon_for_delta(delta)))

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on delta at ``epsilon``."""
        if self.mu is not None:
            return gaussian_delta(self.mu, epsilon)
        return float(min(1.0, max(0.0, self._distribution().get_delta_for_epsilon(epsilon))))

    def accountant(self) -> str:
        """Name the accountant behind the numbers."""
        return "analytic Gaussian (exact)" if self.mu is not None else "PLD (dp-accounting, pessimistic)"


@lru_cache(maxsize=256)
def calibrate(epsilon: float, delta: float, sampling_rate: float, steps: int) -> float:
    """Return the noise multiplier that makes ``steps`` steps (epsilon, delta)-DP, never above the target.

    Args:
        epsilon: target, in [0.01, 50].
        delta: target, in (0, 0.1).
        sampling_rate: Poisson rate q in (0, 1]; 1 is full batch.
        steps: T >= 1.

    Returns:
        Noise multiplier; the epsilon it spends is at or below the target and within 0.1 % of it (PLD), or exact
        (full batch).
    """
    if not (0 < epsilon < math.inf and 0 < delta < 1 and 0 < sampling_rate <= 1 and steps >= 1):
        raise ValueError("calibrate needs a finite epsilon > 0, delta in (0, 1), sampling rate in (0, 1], steps >= 1")
    exact = math.sqrt(steps) / gaussian_mu(epsilon, delta)
    if sampling_rate == 1:
        # One part in 1e12 more noise than the root, so that rounding cannot tip epsilon over the target.
        return exact * (1 + 1e-12)

    def spent(sigma: float) -> float:
        return Composition([Event(sigma, sampling_rate, steps)]).epsilon(delta)

    # Sampling only helps, so the full batch's noise is an upper end. Walk DOWN from it: the cost of a distribution
    # grows steeply as the noise shrinks, so the lower end must not be tried far below the answer.
    high, high_epsilon = exact, spent(exact)
    while True:
        low = high / 2
        low_epsilon = spent(low)
        if low_epsilon > epsilon:
            break
        high, high_epsilon = low, low_epsilon
        if high < 0.1:
            return high  # delta alone pays for every release: this little noise meets the target
    for _ in range(60):
        if high_epsilon >= epsilon * 0.999 or high / low < 1 + 1e-6:
            break
        # Regula falsi in (log sigma, log epsilon), kept off the ends, so that a few evaluations suffice.
        share = math.log(low_epsilon / epsilon) / math.log(low_epsilon / max(high_epsilon, 1e-12))
        share = min(max(share * 1.0005, 0.02), 0.98)
        middle = math.exp(math.log(low) + share * math.log(high / low))
        middle_epsilon = spent(middle)
        if middle_epsilon <= epsilon:
            high, high_epsilon = middle, middle_epsilon
        else:
            low, low_epsilon = middle, middle_epsilon
    return high


def curve(composition: Composition) -> dict:
    """Return the privacy curve as plain JSON types: epsilon at several deltas, delta at several epsilons, mu."""
    return {
        "epsilon_at_delta": {f"{delta:g}": composition.epsilon(delta) for delta in REPORT_DELTAS},
        "delta_at_epsilon": {f"{epsilon:g}": composition.delta(epsilon) for epsilon in REPORT_EPSILONS},
        "gaussian_mu": composition.mu,
        "accountant": composition.accountant(),
    }
