"""Composing ledger entries into one guarantee.

Parts (mixing, finetune, validation, test) are *atoms*: disjoint sets of units under one split key. An entry names the
set of atoms it touches. Under one key the total is the pointwise maximum, over atoms, of the composed curve of the
entries touching that atom (parallel composition: valid for add/remove because a unit's part depends on its id and the
key alone, and for replace-one and zero-out because the id, so the part, is kept: rule 27). Entries under different
keys touch overlapping units, so they compose sequentially.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from dpmixmin.privacy.accounting import Composition, curve
from dpmixmin.privacy.events import ADD_REMOVE, ADJACENCIES
from dpmixmin.privacy.renyi import group_bound

GROUPS = (2, 5, 10)
"""Group sizes whose epsilon is stated."""


@dataclass(frozen=True)
class Touch:
    """One charged touch: its accounting events, the atoms it reads, and the split key that defines them."""

    events: tuple
    parts: frozenset[str]
    split: str


def worst_compositions(touches: Sequence[Touch], adjacency: str = ADD_REMOVE) -> list[Composition]:
    """Return the compositions whose pointwise maximum is the guarantee.

    A unit lies in one atom per split key, so every choice of one atom per key is a possible unit.
    """
    choices = []
    for split in sorted({touch.split for touch in touches}):
        under = [touch for touch in touches if touch.split == split]
        atoms = sorted(set().union(*(touch.parts for touch in under)))
        per_atom = {sum((touch.events for touch in under if atom in touch.parts), ()) for atom in atoms}
        choices.append(sorted(per_atom, key=repr))
    return [_composition(sum(chosen, ()), adjacency) for chosen in product(*choices)]


@lru_cache(maxsize=64)
def _composition(events: tuple, adjacency: str) -> Composition:
    return Composition(events, adjacency=adjacency)


def guarantee(touches: Sequence[Touch], delta: float, without: frozenset[str] = frozenset()) -> dict:
    """Return epsilon at ``delta`` for every adjacency, and the add/remove curve, of a set of touches.

    Args:
        touches: what was charged.
        delta: where epsilon is stated.
        without: atoms whose units are left out, because something else than DP covers them.

    Returns:
        Plain JSON types: ``epsilon`` (add/remove), ``delta``, ``curve``, ``composition`` (words), ``adjacencies``.
    """
    touches = [Touch(t.events, t.parts - without, t.split) for t in touches if t.parts - without]
    if not touches:
        none = "no private data was touched"
        return {"epsilon": 0.0, "delta": 0.0, "curve": None, "composition": none, "adjacencies": {}}
    compositions = worst_compositions(touches)
    epsilons = {}
    for adjacency in ADJACENCIES:
        epsilons[adjacency] = max(each.epsilon(delta) for each in worst_compositions(touches, adjacency))
    if len(touches) == 1:
        words = "one release"
    elif _disjoint(touches):
        words = "parallel: disjoint parts, the maximum"
    else:
        words = "sequential where parts overlap"
    return {
        "epsilon": epsilons[ADD_REMOVE],
        "delta": delta,
        "curve": _merged(compositions, delta),
        "composition": words,
        "adjacencies": epsilons,
    }


def _disjoint(touches: Sequence[Touch]) -> bool:
    """Whether no unit is touched twice: one split key, and no part in two touches."""
    parts = [part for touch in touches for part in touch.parts]
    return len({touch.split for touch in touches}) == 1 and len(parts) == len(set(parts))


def _merged(compositions: Sequence[Composition], delta: float) -> dict:
    """Return the pointwise maximum of curves; None stands for infinity, as in :func:`accounting.curve`."""
    curves = [curve(composition, delta) for composition in compositions]
    merged = {
        key: {point: _largest(each[key][point] for each in curves) for point in curves[0][key]}
        for key in ("epsilon_at_delta", "delta_at_epsilon")
    }
    merged["group_epsilon"] = {str(m): _group_epsilon(compositions, m, delta) for m in GROUPS}
    merged["gaussian_mu"] = _largest(each["gaussian_mu"] for each in curves)
    merged["accountant"] = "; ".join(sorted({each["accountant"] for each in curves}))
    return merged


def _largest(values) -> float | None:
    values = list(values)
    return None if None in values else max(values)


def _group_epsilon(compositions: Sequence[Composition], members: int, delta: float) -> float | None:
    """Return epsilon for groups of units, wherever its members lie.

    One composition: its own group bound. Gaussians on disjoint atoms: mu is largest when all members share an atom
    (the squares of m_a mu_a add up). Otherwise members may be spread over atoms, and the bound that holds for every
    mechanism is used.
    """
    if len(compositions) == 1 or all(each.mu is not None for each in compositions):
        found = max(each.group_epsilon(members, delta) for each in compositions)
    else:
        least = max(each.delta_share for each in compositions)
        found = group_bound(lambda epsilon: max(each.delta(epsilon) for each in compositions), members, delta, least)
    return None if math.isinf(found) else found
