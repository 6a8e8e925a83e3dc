"""Privacy accounting: exact for full batches, privacy loss distributions (PLD) for everything else.

The accountant sees events (:mod:`dpmixmin.privacy.events`), which hold public parameters only. Which accountant:

* Full-batch Gaussians only: together one Gaussian mechanism, exact in closed form (:mod:`dpmixmin.privacy.gaussian`).
* One pure-DP event alone: closed form.
* Everything else: pessimistic PLDs (:mod:`dpmixmin.privacy.pld`), so every epsilon and delta is an upper bound.
* Repeat-and-select: Rényi DP at the event's own share of delta (Papernot & Steinke 2110.03620), then inside the PLD.
* Where a PLD cannot be computed: Rényi DP for the whole composition. This is said on stderr and in ``accountant()``.

Neighbours: replace-one doubles a clipped sum's sensitivity (``replace_factor`` for full batches; Poisson steps use the
exact pair of mixtures at factor 2). Zero-out costs what add/remove costs: the same contribution of norm at most C is
there or not, and nothing else in an event depends on the number of units.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache

from dpmixmin.privacy import pld, step_laws
from dpmixmin.privacy.events import (
    ADD_REMOVE,
    ADJACENCIES,
    REPLACE_ONE,
    AnyEvent,
    GaussianEvent,
    PureEvent,
    RepeatSelectEvent,
)
from dpmixmin.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu
from dpmixmin.privacy.renyi import group_bound, renyi_delta, repeat_select_epsilon, smallest

REPORT_DELTAS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
REPORT_EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
REPORT_GROUPS = (2, 5, 10)

TOLERANCE = 5e-4
"""Relative excess of epsilon that the grid of a PLD may cause (always upward)."""

ROUGH = 3e-3
"""The same where a value only guides a search."""


class Composition:
    """Adaptive sequential composition of events on the same units.

    Args:
        events: the events; an empty composition is perfectly private.
        adjacency: which datasets are neighbours, one of ADJACENCIES.
        grid: discretisation of the privacy loss; by default every query gets one that costs at most TOLERANCE.
        pessimistic: upper bounds (default) or, to bracket them, lower bounds (Gaussian events only).
        tolerance: see TOLERANCE.

    Attributes:
        events: the events.
        mu: parameter of the equivalent Gaussian mechanism, or None where the composition is not one.
        adjacency: which datasets are neighbours.
        delta_share: the delta that repeat-and-select events take; epsilon is infinite at and below it.

    Raises:
        ValueError: unknown adjacency or kind of event, or a lower bound for other than Gaussian events.
    """

    def __init__(
        self,
        events: Iterable[AnyEvent],
        *,
        adjacency: str = ADD_REMOVE,
        grid: float | None = None,
        pessimistic: bool = True,
        tolerance: float = TOLERANCE,
    ):
        if adjacency not in ADJACENCIES:
            raise ValueError(f"unknown adjacency {adjacency!r}; known: {', '.join(ADJACENCIES)}")
        self.events: tuple[AnyEvent, ...] = tuple(events)
        self._replace = adjacency == REPLACE_ONE
        self.adjacency, self._grid, self._pessimistic, self._tolerance = adjacency, grid, pessimistic, tolerance

        gaussians = [event for event in self.events if isinstance(event, GaussianEvent)]
        self._pure = [event for event in self.events if isinstance(event, PureEvent)]
        self._repeated = [event for event in self.events if isinstance(event, RepeatSelectEvent)]
        self._sampled = [event for event in gaussians if event.sampling_rate < 1]
        if not all(isinstance(event, AnyEvent) for event in self.events):
            raise ValueError(f"events must be of the kinds in events.py, got {self.events}")
        if not pessimistic and (self._pure or self._repeated):
            raise ValueError("lower bounds are known for Gaussian events only")
        self._full_mu = math.sqrt(
            sum((self._factor(each) / each.noise_multiplier) ** 2 * each.steps for each in gaussians
                if each.sampling_rate == 1)
        )  # fmt: skip
        self.mu = None if self._sampled or self._pure or self._repeated else self._full_mu
        self.delta_share = sum(event.delta_share for event in self._repeated)
        self._failure: str | None = None
        self._renyi: Callable[[float], float] | None = None
        self._laws: dict[int, pld.Law] = {}

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on epsilon at ``delta`` (exact where the composition is Gaussian)."""
        if self.mu is not None:
            return gaussian_epsilon(self.mu, delta)
        basic = self._basic()
        if delta <= self.delta_share:
            return basic
        alone = self._alone()
        if alone is not None:
            # delta(e) = share + (1 - share) (e^epsilon - e^e) / (1 + e^epsilon): randomised response that fails with
            # probability ``share``, the worst mechanism with these parameters (Kairouz et al. 1311.0776).
            one, share = alone
            left = 1 - (delta - share) / (1 - share) * (1 + math.exp(-one))
            return max(0.0, one + math.log(max(left, math.exp(-one)))) if math.isfinite(one) else math.inf
        if any(math.isinf(self._pure_parameters(event, 1)[0]) for event in self._repeated):
            return math.inf
        found = self._computed(
            lambda: self._law(1).epsilon(delta, self._tolerance), lambda: self._renyi_epsilon(delta)
        )
        return min(found, basic)

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on delta at ``epsilon``."""
        return self._delta(epsilon, self._tolerance)

    def _delta(self, epsilon: float, tolerance: float) -> float:
        if self.mu is not None:
            return gaussian_delta(self.mu, epsilon)
        alone = self._alone()
        if alone is not None:
            one, share = alone
            above = 1.0 if math.isinf(one) else max(0.0, -math.expm1(epsilon - one)) / (1 + math.exp(-one))
            return share + (1 - share) * above
        if any(math.isinf(self._pure_parameters(event, 1)[0]) for event in self._repeated):
            return 1.0
        if epsilon >= self._basic():
            return 0.0
        return self._computed(lambda: self._law(1).delta(epsilon, tolerance), lambda: self._renyi_delta(epsilon))

    def group_epsilon(self, members: int, delta: float) -> float:
        """Return an upper bound on epsilon at ``delta`` for datasets that differ in several units.

        Full batches scale mu; Poisson steps are mixtures of Gaussians with binomial shifts (Ganesh 2401.10294); pure
        events scale epsilon. Where no such law is known (repeat-and-select; Poisson under replace-one) it is the bound
        that holds for every mechanism.

        Args:
            members: number of units that are added, removed or replaced, >= 1.
            delta: in (0, 1).
        """
        if not (isinstance(members, int) and members >= 1):
            raise ValueError(f"a group has an integer number of members >= 1, got {members}")
        if members == 1:
            return self.epsilon(delta)
        if self.mu is not None:
            return gaussian_epsilon(members * self.mu, delta)
        if not self._pessimistic:
            raise ValueError("lower bounds are known for one unit only")
        if self._repeated or (self._replace and self._sampled):
            return group_bound(lambda epsilon: self._delta(epsilon, ROUGH), members, delta, self.delta_share)
        return self._computed(
            lambda: self._law(members).epsilon(delta, self._tolerance),
            lambda: group_bound(self._renyi_delta, members, delta),
        )

    def accountant(self) -> str:
        """Name the accountant behind the numbers given so far."""
        if self.mu is not None:
            return "analytic Gaussian (exact)"
        if self._failure is not None:
            return f"FALLBACK: Rényi DP (dp-accounting), looser, because the PLD failed ({self._failure})"
        if self._alone() is not None and self._pure:
            return "pure DP (exact)"
        if self._alone() is not None:
            return f"Rényi DP (dp-accounting) of repeat-and-select at a delta share of {self.delta_share:g}"
        name = f"PLD (dp-accounting, {'pessimistic' if self._pessimistic else 'LOWER BOUND'})"
        if self._repeated:
            name += f", repeat-and-select by Rényi DP at a delta share of {self.delta_share:g}"
        return name

    # -- how --------------------------------------------------------------------------------------------------------

    def _factor(self, event: GaussianEvent) -> float:
        return event.replace_factor if self._replace else 1.0

    def _alone(self) -> tuple[float, float] | None:
        """Return the (epsilon, delta) of a composition that is one event which is known by them alone."""
        others = [*self._pure, *self._repeated]
        return self._pure_parameters(others[0], 1) if len(others) == len(self.events) == 1 else None

    def _basic(self) -> float:
        """Return the sum of epsilons, which needs no delta; infinite unless all events are pure."""
        only_pure = len(self._pure) == len(self.events)
        return sum(self._pure_parameters(event, 1)[0] for event in self._pure) if only_pure else math.inf

    def _pure_parameters(self, event: PureEvent | RepeatSelectEvent, members: int) -> tuple[float, float]:
        """Return the (epsilon, delta) of an event that has no better description."""
        if isinstance(event, PureEvent):
            return members * (event.replace_epsilon if self._replace else event.epsilon), 0.0
        return repeat_select_epsilon(event, self.adjacency), event.delta_share

    def _law(self, members: int) -> pld.Law:
        """Return the composed privacy loss for a group of units; only without repeat-and-select above one member."""
        if members not in self._laws:
            others = Counter(self._pure_parameters(event, members) for event in [*self._pure, *self._repeated])

            single = step_laws.gaussian_step if self._pessimistic else step_laws.lower_step

            def laws_on(grid: float) -> list[tuple[step_laws.Step, step_laws.Step]]:
                found = [step_laws.parameter_step(*each, times, grid) for each, times in others.items()]
                if self._full_mu:
                    found.append(single(1 / (members * self._full_mu), 1.0, 1, False, grid))
                for each in self._sampled:
                    sigma, rate, steps = each.noise_multiplier, each.sampling_rate, each.steps
                    if members > 1:
                        found.append(step_laws.group_step(sigma, rate, steps, members, grid))
                    else:
                        found.append(single(sigma, rate, steps, self._replace, grid))
                return found

            steps = sum(each.steps for each in self._sampled) + others.total() + (self._full_mu > 0)
            mu = members * math.hypot(self._full_mu, *(_rough_mu(each, self._replace) for each in self._sampled))
            epsilon = gaussian_epsilon(mu, 1e-6) + sum(each[0] for each in others.elements())
            # A first grid that costs about a hundredth of the guessed epsilon.
            start = math.sqrt(0.12 * max(epsilon, 1e-3) / (steps * (1 + min(5 / mu, 1e6)))) if mu else epsilon / 100
            self._laws[members] = pld.Law(
                laws_on,
                steps=steps,
                rounded=others.total(),
                start=start,
                grid=self._grid,
                pessimistic=self._pessimistic,
            )
        return self._laws[members]

    def _computed(self, exact: Callable[[], float], fallback: Callable[[], float]) -> float:
        """Return the PLD's value, or, loudly, Rényi DP's where the PLD fails."""
        if self._failure is None:
            try:
                found = exact()
                if math.isfinite(found):
                    return found
                self._failure = "not finite"
            except (MemoryError, ArithmeticError) as error:
                self._failure = f"{type(error).__name__}: {error}"
            if not self._pessimistic:
                raise ArithmeticError(f"no lower bound: {self._failure}")
            print(f"dpmixmin: warning: {self.accountant()}", file=sys.stderr, flush=True)
        return fallback()

    def _renyi_delta(self, epsilon: float) -> float:
        """Return delta at ``epsilon`` by Rényi DP, with repeat-and-select events added as (epsilon, delta)."""
        spent = sum(self._pure_parameters(event, 1)[0] for event in self._repeated)
        if epsilon < spent:
            return 1.0
        if self._renyi is None:
            others = [event for event in self.events if not isinstance(event, RepeatSelectEvent)]
            self._renyi = renyi_delta(others, self.adjacency)
        return min(1.0, self.delta_share + self._renyi(epsilon - spent))

    def _renyi_epsilon(self, delta: float) -> float:
        return smallest(lambda epsilon: self._renyi_delta(epsilon) <= delta)


def _rough_mu(event: GaussianEvent, replace: bool) -> float:
    """Return mu of the Gaussian mechanism that many sampled steps come near to (Bu et al. 1911.11607)."""
    full = math.sqrt(event.steps) / event.noise_multiplier
    exponent = min(event.noise_multiplier**-2, 500.0)
    sampled = event.sampling_rate * math.sqrt(event.steps * math.expm1(exponent))
    return (2 if replace else 1) * min(full, sampled)


# -- calibration ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def calibrate(
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    *,
    adjacency: str = ADD_REMOVE,
    replace_factor: float = 2.0,
    alongside: tuple[AnyEvent, ...] = (),
) -> float:
    """Return the noise multiplier that makes a whole composition (epsilon, delta)-DP, never above the target.

    Args:
        epsilon: target, in [0.01, 50].
        delta: target, in (0, 0.1).
        sampling_rate: Poisson rate q in (0, 1]; 1 is full batch.
        steps: T >= 1.
        adjacency: which datasets are neighbours.
        replace_factor: see :class:`GaussianEvent`.
        alongside: events that compose with these steps, and share the target with them.

    Returns:
        Noise multiplier (standard deviation over the add/remove sensitivity), at least LEAST_NOISE if sampled. The
        epsilon that is spent with it is at most the target, and within 0.2 % of it unless that least noise already
        meets the target (exact for full batches).

    Raises:
        ValueError: no such target, or ``alongside`` alone spends it, or all of it but a thousandth.
    """
    if not (0 < epsilon < math.inf and 0 < delta < 1 and 0 < sampling_rate <= 1 and steps >= 1):
        raise ValueError("calibrate needs a finite epsilon > 0, delta in (0, 1), sampling rate in (0, 1], steps >= 1")
    if adjacency not in ADJACENCIES:
        raise ValueError(f"unknown adjacency {adjacency!r}; known: {', '.join(ADJACENCIES)}")
    others = Composition(alongside, adjacency=adjacency)
    alone = others.epsilon(delta)
    if alone >= epsilon:
        raise ValueError(
            f"the events alongside spend epsilon {alone:.4g} at delta {delta:g}: target {epsilon:g} is gone"
        )
    target_mu = gaussian_mu(epsilon, delta)
    factor = replace_factor if adjacency == REPLACE_ONE else 1.0
    if sampling_rate == 1 and others.mu is not None:
        # One part in 1e12 more noise than the root, so that rounding cannot tip epsilon over the target.
        return factor * math.sqrt(steps) / math.sqrt(target_mu**2 - others.mu**2) * (1 + 1e-12)

    def spent(sigma: float, tolerance: float) -> float:
        event = GaussianEvent(sigma, sampling_rate, steps, replace_factor)
        return Composition([event, *alongside], adjacency=adjacency, tolerance=tolerance).epsilon(delta)

    # Guess from the central limit: q sqrt(T (e^(1/sigma²) - 1)) is about the mu that is left.
    left = math.sqrt(max(target_mu**2 - gaussian_mu(alone, delta) ** 2, 1e-4 * target_mu**2))
    guess = factor / math.sqrt(math.log1p((left / sampling_rate) ** 2 / steps)) if sampling_rate < 1 else (
        factor * math.sqrt(steps) / left
    )  # fmt: skip
    # Where the events alongside take nearly all, the aim is as fine as what is left; the grid ends that.
    slack = (epsilon - alone) / epsilon
    if slack < 2 * TOLERANCE:
        raise ValueError(f"the events alongside leave too little of epsilon {epsilon:g}: they spend {alone:.6g}")
    wanted = epsilon * (1 - min(1e-3, 0.1 * slack))
    rough = max(min(ROUGH, 0.1 * slack), TOLERANCE)
    middle = _search(lambda sigma: spent(sigma, rough), guess, alone, wanted, epsilon)
    return _search(lambda sigma: spent(sigma, TOLERANCE), middle, alone, wanted, epsilon * (1 - 1e-7 * slack))


LEAST_NOISE = 0.1
"""Where this noise multiplier meets the target, delta alone pays for every release, and no less noise is tried."""


def _search(spent: Callable[[float], float], guess: float, least: float, low: float, high: float) -> float:
    """Return a noise multiplier that spends between ``low`` and ``high``, in few evaluations; never above ``high``.

    Secants, then regula falsi, in (log sigma, log of epsilon above ``least``, which no noise undercuts). It walks down
    slowly, because the privacy loss, and with it the work, grows steeply as noise shrinks.
    """
    aim = math.log((low + high) / 2 - least)
    floor = math.log(LEAST_NOISE)
    enough: tuple[float, float] | None = None  # (log sigma, log excess) with enough noise, and with too little
    little: tuple[float, float] | None = None
    point, last, slope = max(math.log(guess), floor), None, 1.0
    for _ in range(60):
        found = spent(math.exp(point))
        if low <= found <= high:
            return math.exp(point)
        here = (point, math.log(max(found - least, 1e-9)))
        if found <= high:
            enough = here
            if point <= floor:
                break
        else:
            little = here
        if last and last[0] != point:
            slope = min(max((last[1] - here[1]) / (point - last[0]), 0.5), 20.0)
        last = here
        if enough and little:
            width = enough[0] - little[0]
            if width < 1e-6:
                break
            slope = max((little[1] - enough[1]) / width, 1e-9)
            point = enough[0] - (aim - enough[1]) / slope
            point = min(max(point, little[0] + 0.02 * width), enough[0] - 0.02 * width)
        else:
            move = 1.02 * (here[1] - aim) / slope
            point = max(point + min(max(move, -0.4), 1.5), floor)
    if enough is None:
        raise ArithmeticError("no noise multiplier found that meets the target")
    return math.exp(enough[0])


# -- reports ----------------------------------------------------------------------------------------------------------


def curve(composition: Composition, delta: float) -> dict:
    """Return the privacy curve as plain JSON types; what is infinite is None.

    Args:
        composition: the composition.
        delta: where the epsilons of groups are stated.

    Returns:
        epsilon at several deltas, delta at several epsilons, mu, epsilon of groups of 2, 5 and 10 units, and the
        accountant's name.
    """

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "epsilon_at_delta": {f"{point:g}": finite(composition.epsilon(point)) for point in REPORT_DELTAS},
        "delta_at_epsilon": {f"{point:g}": finite(composition.delta(point)) for point in REPORT_EPSILONS},
        "gaussian_mu": composition.mu,
        "group_epsilon": {
            f"{members}": finite(composition.group_epsilon(members, delta)) for members in REPORT_GROUPS
        },
        "accountant": composition.accountant(),
    }
