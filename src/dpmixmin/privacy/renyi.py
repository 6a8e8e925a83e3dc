"""Rényi DP, where a privacy loss distribution is not known or fails, and bounds that hold for every mechanism.

Everything here is an upper bound, by dp-accounting's RdpAccountant, and looser than a PLD.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from dpmixmin.privacy.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    AnyEvent,
    GaussianEvent,
    PureEvent,
    RepeatSelectEvent,
)


def smallest(meets: Callable[[float], bool]) -> float:
    """Return about the smallest epsilon >= 0 that meets a predicate (itself meeting it), or infinity."""
    if meets(0.0):
        return 0.0
    high = 1e-3
    while not meets(high):
        high *= 2
        if high > 1e6:
            return math.inf
    low = high / 2
    while high > low * (1 + 1e-4):
        middle = (low + high) / 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high


def group_bound(delta_of: Callable[[float], float], members: int, delta: float, least: float = 0.0) -> float:
    """Return epsilon for several units from the curve for one: the bound that holds for every mechanism.

    A path of m neighbours gives delta_m(m e) <= delta(e) (1 + e^e + … + e^((m-1) e)) (Dwork & Roth 2014, Theorem 2.2
    with its delta).

    Args:
        delta_of: delta at an epsilon, for one unit.
        members: m.
        delta: where epsilon is wanted.
        least: a lower bound of ``delta_of``, to stop early where no epsilon exists.
    """

    def meets(epsilon: float) -> bool:
        log_sum = math.log(members) + (members - 1) * epsilon  # not below the sum; exact at 0
        if epsilon > 0 and members * epsilon < 700:
            log_sum = math.log(math.expm1(members * epsilon) / math.expm1(epsilon))
        affordable = math.log(delta) - log_sum
        return (least <= 0 or math.log(least) <= affordable) and delta_of(epsilon) <= math.exp(affordable)

    return members * smallest(meets)


def _dp_event(event: AnyEvent, adjacency: str):
    """Return dp-accounting's form of an event.

    A pure-DP event enters as epsilon²/2 zero-concentrated DP (Bun & Steinke 2016, Proposition 1.4).
    """
    import dp_accounting as dpa

    if isinstance(event, GaussianEvent):
        factor = event.replace_factor if adjacency == REPLACE_ONE else 1.0
        single = dpa.GaussianDpEvent(event.noise_multiplier / factor)
        if event.sampling_rate < 1:
            single = dpa.PoissonSampledDpEvent(event.sampling_rate, single)
        return dpa.SelfComposedDpEvent(single, event.steps)
    if isinstance(event, PureEvent):
        epsilon = event.replace_epsilon if adjacency == REPLACE_ONE else event.epsilon
        return dpa.dp_event.ZCDpEvent(rho=epsilon**2 / 2, xi=0.0)
    base = dpa.ComposedDpEvent([_dp_event(each, adjacency) for each in event.base])
    return dpa.dp_event.RepeatAndSelectDpEvent(base, event.mean, event.shape)


def renyi_delta(events: Sequence[AnyEvent], adjacency: str) -> Callable[[float], float]:
    """Return the delta of a composition as a function of epsilon, by dp-accounting's Rényi accountant."""
    from dp_accounting.rdp import RdpAccountant

    def sampled(event: AnyEvent) -> bool:
        inside = event.base if isinstance(event, RepeatSelectEvent) else (event,)
        return any(isinstance(each, GaussianEvent) and each.sampling_rate < 1 for each in inside)

    doubled = adjacency == REPLACE_ONE and any(map(sampled, events))
    accountant = RdpAccountant()
    for event in events:
        accountant.compose(_dp_event(event, ADD_REMOVE if doubled else adjacency))
    if not doubled:
        return lambda epsilon: float(accountant.get_delta(epsilon))
    # No Rényi bound is known for Poisson sampling under replace-one: a removal followed by an addition.
    return lambda epsilon: min(1.0, float(accountant.get_delta(epsilon / 2)) * (1 + math.exp(min(epsilon / 2, 700.0))))


@lru_cache(maxsize=64)
def repeat_select_epsilon(event: RepeatSelectEvent, adjacency: str) -> float:
    """Return the epsilon of repeat-and-select at its own delta share.

    By Rényi DP (2110.03620, Theorems 2 and 6). A base of pure-DP events that is repeated a (truncated) negative
    binomial number of times is also (2 + shape) epsilon-DP, without any delta, and the smaller one counts.
    """
    curve_of = renyi_delta([event], adjacency)
    found = smallest(lambda epsilon: curve_of(epsilon) <= event.delta_share)
    if all(isinstance(each, PureEvent) for each in event.base):
        replace = adjacency == REPLACE_ONE
        base = sum(each.replace_epsilon if replace else each.epsilon for each in event.base)
        found = min(found, (2 + event.shape) * base)
    return found
