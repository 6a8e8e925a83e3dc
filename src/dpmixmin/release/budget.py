"""What was spent on a dataset, by whom, and what everything in its ledger would cost together.

Published releases compose (rule 21): several tasks, methods, epsilons and seeds on one dataset cost more than each
alone. The total is composed from the accounting events, part by part and across split keys (privacy/totals.py), once
for each kind of unit: releases that protect a record and releases that protect a patient have no common guarantee.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dpmixmin.privacy.ledger import Entry, Ledger
from dpmixmin.privacy.totals import total
from dpmixmin.release.page import up

WIDTH = 100
"""Columns of the printed text."""


# -- the report ---------------------------------------------------------------------------------------------------


def report(ledger: Ledger, delta: float) -> dict[str, Any]:
    """Return the budget of a dataset as plain JSON types; an infinite epsilon is None.

    Args:
        ledger: of the dataset.
        delta: where totals are taken (a deployment's are taken at its cap's delta instead).

    Returns:
        ``entries``: the charged ones; ``what`` is a word for each, ``alone`` the epsilon of the entry alone, ``chain``
        that of the entry with the releases behind it, both at the entry's own ``delta``. ``aborted``,
        ``aborted_charged``, ``uncharged``. ``parts``: by unit, split key and part. ``totals``: of everything, one for
        each kind of unit. ``cap``: in deploy, with what is left (None where there are several kinds of unit).
    """
    entries = ledger.entries()
    charged = ledger.charged(entries)
    delta = ledger.cap.delta if ledger.cap else delta
    totals = [_total(unit, each, delta) for unit, each in _by_unit(charged).items()]
    return {
        "dataset": ledger.root.name,
        "mode": "study" if ledger.cap is None else "deploy",
        "entries": [_row(entry, charged) for entry in charged],
        "aborted": [entry.name() for entry in entries if entry.state == "void"],
        "aborted_charged": ledger.charge_aborted,
        "uncharged": ledger.uncharged(),
        "parts": [row for unit, each in _by_unit(charged).items() for row in _parts(unit, each, delta)],
        "totals": totals,
        "cap": ledger.cap and _cap(ledger.cap.epsilon, ledger.cap.delta, totals),
    }


def _by_unit(charged: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return the entries by what they protect, in the order in which the units first appear."""
    found: dict[str, list[Entry]] = {}
    for entry in charged:
        found.setdefault(entry.facts["spec"]["unit"], []).append(entry)
    return found


def _total(unit: str, charged: Sequence[Entry], delta: float) -> dict[str, Any]:
    epsilon, exact = total([entry.touch() for entry in charged], delta)
    return {"unit": unit, "epsilon": _finite(epsilon), "delta": delta, "releases": len(charged), "exact": exact}


def _cap(epsilon: float, delta: float, totals: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the cap with what is left of it; with several kinds of unit there is no one total to compare with."""
    if len(totals) > 1:
        spent, left = None, None
    else:
        spent = totals[0]["epsilon"] if totals else 0.0
        left = 0.0 if spent is None else max(0.0, epsilon - spent)
    return {"epsilon": epsilon, "delta": delta, "spent": spent, "left": left}


def _row(entry: Entry, charged: Sequence[Entry]) -> dict[str, Any]:
    cell, spec = entry.facts["cell"], entry.facts["spec"]
    own = entry.touch()
    return {
        "release": entry.facts["label"],
        "what": _what(entry),
        "task": cell.get("task", ""),
        "method": cell.get("method", ""),
        "mechanism": spec["mechanism"],
        "unit": spec["unit"],
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
    for other in _by_unit(charged[: charged.index(entry)]).get(entry.facts["spec"]["unit"], []):
        step = other.facts["cell"].get("chain", "")
        alike = all(other.facts["cell"].get(key) == entry.facts["cell"].get(key) for key in same)
        if alike and other.state == "committed" and step and chain.startswith(f"{step} > "):
            found[step] = other
    return list(found.values())


def _parts(unit: str, charged: Sequence[Entry], delta: float) -> list[dict[str, Any]]:
    found = []
    for split in sorted({entry.facts["split"] for entry in charged}):
        under = [entry for entry in charged if entry.facts["split"] == split]
        for part in sorted({part for entry in under for part in entry.facts["parts"]}):
            own = [entry for entry in under if part in entry.facts["parts"]]
            touches = [replace(entry.touch(), parts=frozenset({part})) for entry in own]
            found.append(
                {
                    "unit": unit,
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
    columns = ["release", "what", "task", "method", "seed", *(["unit"] if len(found["totals"]) > 1 else []),
               "parts", "alone", "chain", *(["delta"] if len(deltas) > 1 else []), "state"]  # fmt: skip
    shown = [
        row | {
            "seed": "" if row["seed"] is None else str(row["seed"]), "parts": "+".join(row["parts"]),
            "alone": up(row["alone"]), "chain": up(row["chain"]), "delta": f"{row['delta']:g}",
        }
        for row in found["entries"]
    ]  # fmt: skip
    rows = [tuple(row[column] for column in columns) for row in shown]
    at = f"delta {deltas.pop()}" if len(deltas) == 1 else "its delta"
    return (
        f"Charged ({len(rows)}). Epsilon at {at}, for one unit more or less. alone: the release itself.\n"
        "chain: with the releases that it was made from, as if that were all that is ever published.\n\n"
        + _table(tuple(columns), rows, right={"seed", "alone", "chain", "delta"},
                 shrink={"release", "what", "task", "method", "unit", "parts"})
    )  # fmt: skip


def _parts_text(found: dict[str, Any]) -> str:
    columns = [*(["unit"] if len(found["totals"]) > 1 else []), "split", "part", "releases", "epsilon", "used by"]
    rows = []
    for row in found["parts"]:
        users = Counter(row["used_by"])
        names = "; ".join(name if count == 1 else f"{count} x {name}" for name, count in users.items())
        shown = row | {"releases": str(row["releases"]), "epsilon": up(row["epsilon"]), "used by": names}
        rows.append(tuple(shown[column] for column in columns))
    delta = found["totals"][0]["delta"]
    return f"By split key and part, everything composed (delta {delta:g}):\n\n" + _table(
        tuple(columns), rows, right={"releases", "epsilon"}, shrink={"unit", "split", "used by"}
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
    totals, cap, several = found["totals"], found["cap"], len(found["totals"]) > 1
    lines = ["These releases protect different units: their totals are not comparable, and do not add up."] * several
    for whole in totals:
        which = f"that protects one {whole['unit']} " if several else ""
        lines.append(
            f"If everything in this ledger {which}were published: epsilon {up(whole['epsilon'])} at delta "
            f"{whole['delta']:g}, from {whole['releases']} releases."
        )
        if whole["epsilon"] is None:
            lines.append("(Infinite: a PAC mechanism read some part, and DP says nothing about its units.)")
        if not whole["exact"]:
            lines.append(
                "(An upper bound: with so many split keys each counts with its busiest part, event by event.)"
            )
    if cap is None:
        lines.append("A study states each chain as if it were the only release; to publish several, count them all.")
    elif several:
        lines.append(
            f"The cap of epsilon {cap['epsilon']:g} at delta {cap['delta']:g} is for one kind of unit, so what is "
            "left of it is not known: give each unit a private.name of its own."
        )
    else:
        lines.append(
            f"The cap is epsilon {cap['epsilon']:g} at delta {cap['delta']:g}; left: epsilon {_down(cap['left'])}."
        )
        lines.append("A further release on a part that has spent less than the total may fit with more than that.")
    return "\n".join(textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False) for line in lines)


def _down(value: float) -> str:
    """Return a number with four decimals, rounded down."""
    return f"{math.floor(value * 1e4) / 1e4:g}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: set[str], shrink: set[str]) -> str:
    """Align columns; where they do not fit, the widest of those that may shrink is cut.

    Args:
        head: names of the columns.
        rows: cells.
        right: columns that are aligned to the right.
        shrink: columns that may be cut.
    """
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    may_shrink = [i for i, name in enumerate(head) if name in shrink]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH:
        widest = max(may_shrink, key=lambda i: widths[i])
        widths[widest] -= 1
    cells = [
        [_cut(cell, w).rjust(w) if name in right else _cut(cell, w).ljust(w)
         for name, cell, w in zip(head, line, widths, strict=True)]
        for line in lines
    ]  # fmt: skip
    return "\n".join("  ".join(line).rstrip() for line in cells)


def _cut(words: str, width: int) -> str:
    return words if len(words) <= width else words[: width - 1] + "…"
