"""What was spent on a dataset, by whom, and what everything in its ledger would cost together.

Published releases compose (rule 21): several tasks, methods, epsilons and seeds on one dataset cost more than each
alone. The total is composed from the accounting events, part by part and across split keys (privacy/composition.py).
Gaussian steps of one kind add up before they are composed, which changes no number and keeps a hundred releases cheap.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

from dpmixmin.privacy.accounting import Composition
from dpmixmin.privacy.composition import Touch
from dpmixmin.privacy.events import GaussianEvent, PacEvent
from dpmixmin.privacy.ledger import Entry, Ledger
from dpmixmin.release.page import up

MOST = 64
"""Combinations of parts over split keys that are composed one by one; above it an upper bound stands for them."""

WIDTH = 100
"""Columns of the printed text."""


# -- composing ----------------------------------------------------------------------------------------------------


def _counted(events: Sequence) -> Counter:
    """Return events with their number; equal Gaussian steps count as one event that happens so often."""
    counts: Counter = Counter()
    for event in events:
        if isinstance(event, GaussianEvent):
            counts[replace(event, steps=1)] += event.steps
        else:
            counts[event] += 1
    return counts


@lru_cache(maxsize=4096)
def _epsilon(counts: frozenset, delta: float) -> float:
    if any(isinstance(event, PacEvent) for event, _ in counts):
        return math.inf  # DP says nothing about the units that a PAC mechanism reads (rule 22)
    events: list = []
    for event, count in sorted(counts, key=repr):
        events += [replace(event, steps=count)] if isinstance(event, GaussianEvent) else [event] * count
    return Composition(events).epsilon(delta)


def _largest(compositions: Sequence[Counter], delta: float) -> float:
    """Return the largest epsilon of several compositions; those that others contain are not computed."""
    kept = [a for i, a in enumerate(compositions)
            if not any(a <= b and (a != b or j < i) for j, b in enumerate(compositions) if j != i)]  # fmt: skip
    return max((_epsilon(frozenset(counts.items()), delta) for counts in kept), default=0.0)


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


def total(touches: Sequence[Touch], delta: float) -> tuple[float, bool]:
    """Return the add/remove epsilon of a set of touches at ``delta``, and whether it is composed exactly.

    With many split keys there are too many combinations of parts that a unit may lie in. Then every key counts with
    each event as often as its busiest part has it: no unit meets more, so that is an upper bound.
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


# -- the report ---------------------------------------------------------------------------------------------------


def report(ledger: Ledger, delta: float) -> dict[str, Any]:
    """Return the budget of a dataset as plain JSON types; an infinite epsilon is None.

    Args:
        ledger: of the dataset.
        delta: where totals are taken (a deployment's are taken at its cap's delta instead).

    Returns:
        ``entries``: the charged ones; ``what`` is a word for each, ``alone`` the epsilon of the entry alone, ``chain``
        that of the entry with the releases behind it, both at the entry's own ``delta``. ``aborted``,
        ``aborted_charged``, ``uncharged``. ``parts``: by split key and part. ``total``: of everything. ``cap``: in
        deploy, with what is left.
    """
    entries = ledger.entries()
    charged = ledger.charged(entries)
    delta = ledger.cap.delta if ledger.cap else delta
    touches = [entry.touch() for entry in charged]
    epsilon, exact = total(touches, delta)
    return {
        "dataset": ledger.root.name,
        "mode": "study" if ledger.cap is None else "deploy",
        "entries": [_row(entry, charged) for entry in charged],
        "aborted": [entry.name() for entry in entries if entry.state == "void"],
        "aborted_charged": ledger.charge_aborted,
        "uncharged": ledger.uncharged(),
        "parts": _parts(charged, delta),
        "total": {"epsilon": _finite(epsilon), "delta": delta, "releases": len(charged), "exact": exact},
        "cap": ledger.cap
        and {
            "epsilon": ledger.cap.epsilon,
            "delta": ledger.cap.delta,
            "spent": _finite(epsilon),
            "left": max(0.0, ledger.cap.epsilon - epsilon),
        },
    }


def _row(entry: Entry, charged: Sequence[Entry]) -> dict[str, Any]:
    cell, spec = entry.facts["cell"], entry.facts["spec"]
    own = entry.touch()
    return {
        "release": entry.facts["label"],
        "what": _what(entry),
        "task": cell.get("task", ""),
        "method": cell.get("method", ""),
        "mechanism": spec["mechanism"],
        "target": cell.get("epsilon"),
        "seed": cell.get("seed"),
        "split": entry.facts["split"],
        "parts": entry.facts["parts"],
        "alone": _finite(total([own], spec["delta"])[0]),
        "chain": _finite(total([own, *(each.touch() for each in _behind(entry, charged))], spec["delta"])[0]),
        "delta": spec["delta"],
        "state": entry.state,
        "entry": entry.id,
    }


def _what(entry: Entry) -> str:
    """Return in a word what was released: mixture, evaluation, or the mechanism that fine-tuned."""
    cell = entry.facts["cell"]
    return cell.get("mechanism", "") if cell.get("stage") == "finetuned" else cell.get("stage", "release")


def _behind(entry: Entry, charged: Sequence[Entry]) -> list[Entry]:
    """Return the charged releases behind an entry: for each earlier step of its chain the last before it."""
    same, chain = ("task", "method", "seed"), entry.facts["cell"].get("chain", "")
    found: dict[str, Entry] = {}
    for other in charged[: charged.index(entry)]:
        step = other.facts["cell"].get("chain", "")
        alike = all(other.facts["cell"].get(key) == entry.facts["cell"].get(key) for key in same)
        if alike and other.state == "committed" and step and chain.startswith(f"{step} > "):
            found[step] = other
    return list(found.values())


def _parts(charged: Sequence[Entry], delta: float) -> list[dict[str, Any]]:
    found = []
    for split in sorted({entry.facts["split"] for entry in charged}):
        under = [entry for entry in charged if entry.facts["split"] == split]
        for part in sorted({part for entry in under for part in entry.facts["parts"]}):
            own = [entry for entry in under if part in entry.facts["parts"]]
            touches = [replace(entry.touch(), parts=frozenset({part})) for entry in own]
            found.append(
                {
                    "split": split,
                    "part": part,
                    "releases": len(own),
                    "epsilon": _finite(total(touches, delta)[0]),
                    "delta": delta,
                    "used_by": [
                        f"{_what(entry)} {entry.facts['cell'].get('task', '')} ({entry.facts['label']})"
                        for entry in own
                    ],
                }
            )
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# -- text ---------------------------------------------------------------------------------------------------------


def text(found: dict[str, Any]) -> str:
    """Return a report as text of at most :data:`WIDTH` columns (numbers are rounded up)."""
    head = f"Privacy budget of dataset {found['dataset']} ({found['mode']})"
    blocks = [head + "\n" + "=" * len(head)]
    if found["entries"]:
        blocks += [_entries_text(found), _parts_text(found)]
    else:
        blocks.append("Nothing was charged yet.")
    blocks += [_notes(found), _total_text(found)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _entries_text(found: dict[str, Any]) -> str:
    deltas = {f"{row['delta']:g}" for row in found["entries"]}
    one = len(deltas) == 1
    rows = [
        (
            row["release"],
            row["what"],
            row["task"],
            row["method"],
            "" if row["seed"] is None else str(row["seed"]),
            "+".join(row["parts"]),
            up(row["alone"]),
            up(row["chain"]),
            *([] if one else [f"{row['delta']:g}"]),
            row["state"],
        )
        for row in found["entries"]
    ]
    head = (
        "release",
        "what",
        "task",
        "method",
        "seed",
        "parts",
        "alone",
        "chain",
        *([] if one else ["delta"]),
        "state",
    )
    at = f"delta {deltas.pop()}" if one else "its delta"
    return (
        f"Charged ({len(rows)}). Epsilon at {at}, for one unit more or less. alone: the release itself.\n"
        "chain: with the releases that it was made from, as if that were all that is ever published.\n\n"
        + _table(head, rows, right={4, 6, 7, *([] if one else [8])}, shrink={0, 1, 2, 3, 5})
    )


def _parts_text(found: dict[str, Any]) -> str:
    rows = []
    for row in found["parts"]:
        users = Counter(row["used_by"])
        names = "; ".join(name if count == 1 else f"{count} x {name}" for name, count in users.items())
        rows.append((row["split"], row["part"], str(row["releases"]), up(row["epsilon"]), names))
    delta = found["total"]["delta"]
    return f"By split key and part, everything composed (delta {delta:g}):\n\n" + _table(
        ("split", "part", "releases", "epsilon", "used by"), rows, right={2, 3}, shrink={0, 4}
    )


def _notes(found: dict[str, Any]) -> str:
    lines = []
    if found["aborted"]:
        how = (
            "charged, in the table above" if found["aborted_charged"] else "not charged; privacy.charge_aborted would"
        )
        lines.append(f"Attempts that died before they wrote anything ({how}):")
        lines += [f"  {count} x {name}" for name, count in sorted(Counter(found["aborted"]).items())]
    if found["uncharged"]:
        lines.append("Measured without charge (study only; what was seen is covered by no guarantee):")
        lines += [f"  {what}" for what in found["uncharged"]]
    return "\n".join(_cut(line, WIDTH) for line in lines)


def _total_text(found: dict[str, Any]) -> str:
    whole, cap = found["total"], found["cap"]
    words = f"If everything in this ledger were published: epsilon {up(whole['epsilon'])} at delta {whole['delta']:g}"
    lines = [f"{words}, from {whole['releases']} releases."]
    if whole["epsilon"] is None:
        lines.append("(Infinite: a PAC mechanism read some part, and DP says nothing about its units.)")
    if not whole["exact"]:
        lines.append("(An upper bound: with so many split keys each counts with its busiest part, event by event.)")
    if cap is None:
        lines.append("A study states each chain as if it were the only release; to publish several, count them all.")
    else:
        lines.append(
            f"The cap is epsilon {cap['epsilon']:g} at delta {cap['delta']:g}; left: epsilon {_down(cap['left'])}."
        )
        lines.append("A further release on a part that has spent less than the total may fit with more than that.")
    return "\n".join(lines)


def _down(value: float) -> str:
    """Return a number with four decimals, rounded down."""
    return f"{math.floor(value * 1e4) / 1e4:g}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: set[int], shrink: set[int]) -> str:
    """Align columns; where they do not fit, the widest of those that may shrink is cut."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH:
        widest = max(shrink, key=lambda i: widths[i])
        widths[widest] -= 1
    cells = [
        [_cut(line[i], w).rjust(w) if i in right else _cut(line[i], w).ljust(w) for i, w in enumerate(widths)]
        for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in cells)


def _cut(words: str, width: int) -> str:
    return words if len(words) <= width else words[: width - 1] + "…"
