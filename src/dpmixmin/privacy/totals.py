"""What a set of releases costs together: quick for hundreds of them, an upper bound where there are many split keys.

Gaussian steps of one kind add up before they are composed, which changes no number and keeps a hundred releases cheap.
It must be used for releases that protect one kind of unit only: others have no common guarantee.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

from dpmixmin.privacy.accounting import Composition
from dpmixmin.privacy.composition import Touch
from dpmixmin.privacy.events import GaussianEvent, PacEvent

MOST = 64
"""Combinations of parts over split keys that are composed one by one; above it an upper bound stands for them."""


def total(touches: Sequence[Touch], delta: float) -> tuple[float, bool]:
    """Return the add/remove epsilon of a set of touches at ``delta``, and whether it is composed exactly.

    With many split keys there are too many combinations of parts that a unit may lie in. Then every key counts with
    each event as often as its busiest part has it: no unit meets more, so that is an upper bound.

    Args:
        touches: what was charged, about one kind of unit.
        delta: where epsilon is taken.

    Returns:
        Epsilon, infinite where a PAC mechanism read some part; False where it is that upper bound.
    """
    under = _under(touches)
    exact = math.prod(map(len, under.values())) <= MOST
    if not exact:
        busiest = [Counter() for _ in under]
        for most, choices in zip(busiest, under.values(), strict=True):
            for counts in choices:
                most |= counts
        return _largest([sum(busiest, Counter())], delta), False
    return _largest([sum(chosen, Counter()) for chosen in product(*under.values())], delta), True


def _under(touches: Sequence[Touch]) -> dict[str, list[Counter]]:
    """Return, for each split key, what the units of each part meet; a unit lies in one part under each key."""
    found: dict[str, list[Counter]] = {}
    for key in sorted({touch.split for touch in touches}):
        under = [touch for touch in touches if touch.split == key]
        for part in sorted(set().union(*(touch.parts for touch in under))):
            met = _counted([event for touch in under if part in touch.parts for event in touch.events])
            if met not in found.setdefault(key, []):
                found[key].append(met)
    return found


def _counted(events: Sequence) -> Counter:
    """Return events with their number; equal Gaussian steps count as one event that happens so often."""
    counts: Counter = Counter()
    for event in events:
        if isinstance(event, GaussianEvent):
            counts[replace(event, steps=1)] += event.steps
        else:
            counts[event] += 1
    return counts


def _largest(compositions: Sequence[Counter], delta: float) -> float:
    """Return the largest epsilon of several compositions; those that others contain are not computed."""
    kept = [a for i, a in enumerate(compositions)
            if not any(a <= b and (a != b or j < i) for j, b in enumerate(compositions) if j != i)]  # fmt: skip
    return max((_epsilon(frozenset(counts.items()), delta) for counts in kept), default=0.0)


@lru_cache(maxsize=4096)
def _epsilon(counts: frozenset, delta: float) -> float:
    if any(isinstance(event, PacEvent) for event, _ in counts):
        return math.inf  # DP says nothing about the units that a PAC mechanism reads (rule 22)
    events: list = []
    for event, count in sorted(counts, key=repr):
        events += [replace(event, steps=count)] if isinstance(event, GaussianEvent) else [event] * count
    return Composition(events).epsilon(delta)
