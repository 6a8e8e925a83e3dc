"""Composing ledger entries into one guarantee.

Parts (mixing, finetune, validation, test) are *atoms*: disjoint sets of units under one split key. An entry names the
set of atoms it touches. Under one key the total is the pointwise maximum, over atoms, of the composed curve of the
entries touching that atom (parallel composition, valid for add/remove neighbours because a unit's part depends on its
id and the key alone). Entries under different keys touch overlapping units, so they compose sequentially.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from dpmixmin.privacy.accounting import Composition, Event, curve


@dataclass(frozen=True)
class Touch:
    """One charged touch: an event, the atoms it reads, and the split key that defines them."""

    event: Event
    parts: frozenset[str]
    split: str


def worst_compositions(touches: Sequence[Touch]) -> list[Composition]:
    """Return the compositions whose pointwise maximum is the guarantee.

    A unit lies in one atom per split key, so every choice of one atom per key is a possible unit.
    """
    choices = []
    for split in sorted({touch.split for touch in touches}):
        under = [touch for touch in touches if touch.split == split]
        atoms = sorted(set().union(*(touch.parts for touch in under)))
        per_atom = {tuple(touch.event for touch in under if atom in touch.parts) for atom in atoms}
        choices.append(sorted(per_atom, key=repr))
    return [Composition([event for events in chosen for event in events]) for chosen in product(*choices)]


def guarantee(touches: Sequence[Touch], delta: float) -> dict:
    """Return epsilon at ``delta`` and the whole curve of a set of touches, as plain JSON types."""
    if not touches:
        return {"epsilon": 0.0, "delta": 0.0, "curve": None, "composition": "no private data was touched"}
    compositions = worst_compositions(touches)
    curves = [curve(composition) for composition in compositions]
    merged = {
        key: {point: max(each[key][point] for each in curves) for point in curves[0][key]}
        for key in ("epsilon_at_delta", "delta_at_epsilon")
    }
    mus = [each["gaussian_mu"] for each in curves]
    merged["gaussian_mu"] = None if None in mus else max(mus)
    merged["accountant"] = "; ".join(sorted({each["accountant"] for each in curves}))
    if len(touches) == 1:
        words = "one release"
    elif all(len(composition.events) == 1 for composition in compositions):
        words = "parallel: disjoint parts, the maximum"
    else:
        words = "sequential where parts overlap"
    return {
        "epsilon": max(composition.epsilon(delta) for composition in compositions),
        "delta": delta,
        "curve": merged,
        "composition": words,
    }
