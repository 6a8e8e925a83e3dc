"""``privacy.json``: the guarantee of a chain of ledger entries, as a pure function of their public parameters.

The same function writes a statement and re-derives it (`python -m dpmixmin verify`), so a statement can hold no number
that a third party cannot compute from the entries beside it. Guarantees are always stated for add/remove (rule 27);
the other adjacencies stand beside them with the condition under which they hold. PAC entries are told apart from DP
ones and never composed with them (rule 22).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dpmixmin.errors import UserError
from dpmixmin.privacy.composition import Touch, guarantee
from dpmixmin.privacy.events import ADD_REMOVE, REPLACE_ONE, ZERO_OUT, from_json
from dpmixmin.privacy.pac import posterior_success

TUNING = ("none", "public_standin", "user_declared", "private_uncharged")
"""How settings were chosen, from nothing to declare to the worst."""

NOT_PRIVATE_SEED = "NOT PRIVATE: the noise came from a test seed"
PRIVATE_STAMP = "private"

CONDITIONS = {
    ADD_REMOVE: "one unit, with all its records, is added or removed",
    REPLACE_ONE: "one unit's records are replaced by others under the same id (a new id: a removal and an addition)",
    ZERO_OUT: "one unit's contribution is replaced by zero",
}

STUDY_OPEN = (
    "other releases from the same dataset (other tasks, seeds and epsilons compose)",
    "test metrics and everything else in study/",
)
PAC_PROTECTS = "which candidate subset of the known pool was the training set; not membership in the pool"

ALWAYS_OPEN = (
    "adversaries who can break AES-256 (model-sized noise and coins are its key stream under keys of the system)",
    "floating-point effects of the noise of DP-SGD: its granularity, and its tails beyond 9 deviations a draw",
    "floating-point effects of float32 gradients in DP-SGD (docs/privacy.md)",
    "how long the jobs took",
)


def least_public(*tunings: str) -> str:
    """Return the worst of several ways in which a chain's settings were chosen."""
    return max(tunings, key=TUNING.index)


def touch(entry: dict[str, Any]) -> Touch:
    """Return what the composition needs of one entry."""
    events = tuple(from_json(event) for event in entry["events"])
    return Touch(events, frozenset(entry["parts"]), entry["split"])


def public_facts(facts: dict[str, Any], entry_id: str) -> dict[str, Any]:
    """Return one ledger entry as a statement shows it: public parameters only."""
    return {
        "entry": entry_id,
        "cell": facts["cell"],
        "parts": facts["parts"],
        "split": facts["split"],
        "release": facts["label"],
        **facts["spec"],
        "events": facts["events"],
        "sampler_total_variation": facts["total_variation"],
        "private_randomness": facts["private_randomness"],
    }


def build(
    entries: Sequence[dict[str, Any]],
    *,
    delta: float,
    tuning: str,
    aborted: Sequence[dict[str, Any]] = (),
    charge_aborted: bool = False,
    others: Sequence[dict[str, Any]] | None = None,
    caveats: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a statement.

    Args:
        entries: the charged entries of one chain, from :func:`public_facts`.
        delta: where epsilon is stated.
        tuning: how the settings were chosen, one of :data:`TUNING`.
        aborted: attempts at these releases that died before they wrote anything.
        charge_aborted: whether they count.
        others: all other charged entries of the dataset (deploy), or None in a study, where every cell is stated as if
            it were the only release.
        caveats: what else is not covered.
    """
    charged = [*entries, *(aborted if charge_aborted else [])]
    units = {entry["unit"] for entry in [*charged, *(others or [])]}
    if len(units) > 1:
        raise UserError(f"these releases protect different units ({', '.join(sorted(units))}): no total covers them")
    pac = [entry for entry in charged if _is_pac(entry)]
    bare = sorted({part for entry in pac for part in entry["parts"]})
    # A unit of a part that a PAC mechanism read has no DP: what is left to state is for units of other parts.
    total = guarantee([touch(entry) for entry in _only_dp(charged)], delta, without=frozenset(bare))
    private = all(entry["private_randomness"] for entry in charged)
    open_points = [*(STUDY_OPEN if others is None else ()), *ALWAYS_OPEN, *caveats]
    dp = _with_variation(total["epsilon"], total["delta"], charged)
    if bare and total["curve"] is None:
        dp = {"epsilon": None, "delta": None}
    statement = {
        "headline": _headline(dp, entries, bare),
        "stamp": PRIVATE_STAMP if private else NOT_PRIVATE_SEED,
        "guarantee": {**dp, **_terms(entries, total), "no_dp_for_parts": bare},
        "pac": _pac(pac),
        "stated_as": "only release" if others is None else "chain; dataset_total covers everything",
        "other_adjacencies": {
            name: {**_with_variation(epsilon, delta, charged), "condition": CONDITIONS[name]}
            for name, epsilon in total["adjacencies"].items()
            if name != ADD_REMOVE
        },
        "tuning": tuning,
        "entries": list(entries),
        "aborted_attempts": len(aborted),
        "aborted": list(aborted),
        "aborted_attempts_charged": charge_aborted,
        "curve": total["curve"],
        "not_covered": open_points,
    }
    if others is not None:
        everywhere = [*charged, *others]
        none = frozenset(part for entry in everywhere if _is_pac(entry) for part in entry["parts"])
        everything = guarantee([touch(entry) for entry in _only_dp(everywhere)], delta, without=none)
        statement["dataset_total"] = {
            **_with_variation(everything["epsilon"], everything["delta"], [*charged, *others]),
            "composition": everything["composition"],
        }
        statement["other_entries"] = list(others)
    return statement


def _is_pac(entry: dict[str, Any]) -> bool:
    return any(event["kind"] == "pac" for event in entry["events"])


def _only_dp(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in entries if not _is_pac(entry)]


def _headline(dp: dict[str, float], entries: Sequence[dict], bare: Sequence[str]) -> str:
    """Say the most important thing first."""
    if bare:
        return f"DP: none for the units of {', '.join(bare)} (PAC only)"
    if not entries:
        return "no private data was touched"
    return f"({_up(dp['epsilon'])}, {_up(dp['delta'])})-DP for one {entries[0]['unit']}, added or removed"


def _up(value: float) -> str:
    """Write a number with four digits, never below its value."""
    text = f"{value:.4g}"
    if float(text) < value:
        text = f"{value * (1 + 10**-3.5):.4g}"
    return text


def _pac(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the PAC guarantee of each secret subset: mutual information adds up, DP never enters."""
    subsets: dict[tuple, list[dict]] = {}
    for entry in entries:
        subsets.setdefault((entry["split"], tuple(entry["parts"])), []).append(entry)
    found = []
    for (split, parts), members in subsets.items():
        events = [from_json(event) for entry in members for event in entry["events"]]
        information, prior = sum(event.mutual_information for event in events), max(event.prior for event in events)
        found.append(
            {
                "split": split,
                "parts": list(parts),
                "mutual_information": information,
                "prior": prior,
                "posterior_success": posterior_success(information, prior),
                "protects": PAC_PROTECTS,
            }
        )
    return found


def _terms(entries: Sequence[dict], total: dict) -> dict:
    first = entries[0] if entries else {}
    return {
        "unit": first.get("unit"),
        "adjacency": ADD_REMOVE if entries else None,
        "calibrated_to": first.get("adjacency"),
        "composition": total["composition"],
    }


def _with_variation(epsilon: float, delta: float, charged: Sequence[dict]) -> dict[str, float]:
    """Add the samplers' distance from their ideal law.

    A law within total variation TV of an (epsilon, delta)-DP one is (epsilon, delta + (1 + e^epsilon) TV)-DP.
    """
    variation = sum(entry["sampler_total_variation"] for entry in charged)
    return {"epsilon": epsilon, "delta": delta + ((1 + math.exp(epsilon)) * variation if variation else 0.0)}
