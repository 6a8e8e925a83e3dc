"""The tables of the audits: that of the DP-MixMin paper's A.8, one row a mechanism, and rows of the long table.

The input is the table of findings (``audits.csv``, one row an attack on one claim: :mod:`dpmixmin.audit.finding` says
what each column is). Any value may be missing. Nothing is computed here that the audit did not find; where several
rows make one number, the largest bound stands beside the weakest control and the least power.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import polars as pl

from dpmixmin.audit.finding import EXCEEDED, FAILURES, HOLDS, NO_LEAK, NO_POWER, REPORTED
from dpmixmin.report.tables import COLUMNS

TEXTS = ("audit", "mechanism", "task", "method", "learner", "unit", "canary", "statistic", "family", "verdict")
NUMBERS = ("epsilon", "claim", "delta", "bound", "bound_family", "ceiling", "ceiling_family", "detects",
           "detects_family", "control", "p_value", "ratio", "auc", "auc_low", "auc_high", "tpr_at_1",
           "tpr_at_0p1")  # fmt: skip
SCHEMA = {**dict.fromkeys(TEXTS, pl.String), **dict.fromkeys(NUMBERS, pl.Float64), "seed": pl.Int64,
          "gated": pl.Boolean, "control_gated": pl.Boolean}  # fmt: skip
"""The columns that are read."""

CANARIES = {
    "max_clip": "max-clip",
    "worst_natural": "worst natural",
    "natural": "natural",
    "gradient": "gradient",
    "record": "real unit",
    "members": "members",
}
"""Names for people, the strongest of an audit first."""
AUDITS = ("mixture", "one_run", "membership", "replay")
VERDICTS = (EXCEEDED, NO_LEAK, NO_POWER, HOLDS, REPORTED)
"""From worst to best."""
STRONGEST = ("max_clip", "gradient")
"""Canaries made to move every release as far as one unit can."""
MAXIMUM = "maximum"
Row = dict[str, Any]


def filled(findings: pl.DataFrame) -> pl.DataFrame:
    """Return the columns that are read: those that are missing empty, no text null, no number NaN."""
    columns = [
        (pl.col(name) if name in findings.columns else pl.lit(None)).cast(kind).alias(name)
        for name, kind in SCHEMA.items()
    ]
    return findings.select(columns).with_columns(pl.col(*TEXTS).fill_null(""), pl.col(*NUMBERS).fill_nan(None))


def worst_verdict(verdicts: Iterable[str]) -> str:
    """Return the worst of the verdicts that exist, or nothing."""
    found = set(verdicts)
    return next((verdict for verdict in VERDICTS if verdict in found), "")


# -- tables ---------------------------------------------------------------------------------------------------


def paper_table(findings: pl.DataFrame) -> pl.DataFrame:
    """Return the mixture's audit in the form of the DP-MixMin paper's tables 16 and 17.

    One row a task and epsilon, epsilons ascending, tasks in their own order. Where an epsilon has several tasks, a
    last row ``maximum`` holds the largest value of each column (of ``detects``: the least power, none if a task has
    none). Columns: for each canary its 95 % DP bound and (``_control``) the bound without noise; for the max-clip
    canary also ``_family``, the bound by the mechanism's own trade-off family, and what true epsilon its two bounds
    detect (None: no power, or no such bound).
    """
    rows = filled(findings).filter(pl.col("audit") == "mixture").rows(named=True)
    table = []
    for epsilon in _epsilons(rows):
        here = [row for row in rows if row["epsilon"] == epsilon]
        tasks = dict.fromkeys(row["task"] for row in here)
        block = [_paper_row(task, epsilon, [row for row in here if row["task"] == task]) for task in tasks]
        table += block
        if len(block) > 1:
            table.append(_maximum(epsilon, block))
    names = [f"{canary}{part}" for canary in ("natural", "worst_natural", "max_clip") for part in ("", "_control")]
    names.insert(-1, "max_clip_family")
    numbers = ("epsilon", "claim", "delta", *names, "detects", "detects_family")
    schema = {"task": pl.String, **dict.fromkeys(numbers, pl.Float64), "family": pl.String, "verdict": pl.String}
    return pl.DataFrame(table, schema=schema)


def _paper_row(task: str, epsilon: float | None, rows: Sequence[Row]) -> Row:
    row = {"task": task, "epsilon": epsilon, "claim": least(rows, "claim"), "delta": least(rows, "delta")}
    for canary in ("natural", "worst_natural", "max_clip"):
        part = [found for found in rows if found["canary"] == canary]
        row |= {canary: most(part, "bound"), f"{canary}_control": least(part, "control")}
        if canary == "max_clip":
            row |= {"max_clip_family": most(part, "bound_family")}
            row |= {name: weakest(part, name) for name in ("detects", "detects_family")}
    families = {found["family"] for found in rows} - {""}
    return row | {"family": ", ".join(sorted(families)), "verdict": worst_verdict(found["verdict"] for found in rows)}


def _maximum(epsilon: float | None, block: Sequence[Row]) -> Row:
    numbers = {name: most(block, name) for name, value in block[0].items() if not isinstance(value, str)}
    power = {name: weakest(block, name) for name in ("detects", "detects_family")}
    families = {row["family"] for row in block} - {""}
    return numbers | power | {
        "task": MAXIMUM,
        "epsilon": epsilon,
        "family": ", ".join(sorted(families)),
        "verdict": worst_verdict(row["verdict"] for row in block),
    }  # fmt: skip


def mechanism_table(findings: pl.DataFrame) -> pl.DataFrame:
    """Return one row for every audit of a mechanism at an epsilon.

    ``claim``, ``bound``, ``bound_family``, their ceilings and what they detect are those of ONE attack, the one with
    the largest bound of either kind (named by task, method, canary, statistic). ``control`` is the weakest of those
    that the gate looks at (of all, where it looks at none), ``p_value`` the smallest, ``auc``, ``tpr_at_1`` and
    ``ratio`` the largest, ``verdict`` the worst, ``attacks`` the number of rows behind it.
    """
    rows = filled(findings).rows(named=True)
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row["audit"], row["mechanism"], row["epsilon"]), []).append(row)
    table = []
    for key in sorted(groups, key=lambda key: (place(AUDITS, key[0]), key[1], key[2] is None, key[2] or 0)):
        group = groups[key]
        controls = [row for row in group if row["control_gated"]] or group
        shown = max(group, key=strength)
        table.append(
            shown
            | {
                "attacks": len(group),
                "control": least(controls, "control"),
                "p_value": least(group, "p_value"),
                **{name: most(group, name) for name in ("ratio", "tpr_at_1", "tpr_at_0p1")},
                "verdict": _verdict(group),
            }
        )
    names = (*TEXTS, *(name for name in NUMBERS if name not in ("auc_low", "auc_high")))
    schema = {**{name: SCHEMA[name] for name in names}, "attacks": pl.Int64}
    return pl.DataFrame([{name: row[name] for name in schema} for row in table], schema=schema)


def _verdict(group: Sequence[Row]) -> str:
    """Return the worst verdict where one fails; else that of the strongest canaries, on which the power rests."""
    worst = worst_verdict(row["verdict"] for row in group)
    strongest = [row["verdict"] for row in group if row["control_gated"]]
    return worst if worst in FAILURES or not strongest else worst_verdict(strongest)


def largest_task(findings: pl.DataFrame, epsilon: float) -> str | None:
    """Return the task whose max-clip bound is the largest at an epsilon: the one to draw. None if there is none."""
    here = filled(findings).filter(
        (pl.col("audit") == "mixture") & (pl.col("canary") == "max_clip") & (pl.col("epsilon") == epsilon)
    )
    return max(here.rows(named=True), key=strength)["task"] if len(here) else None


def summary_rows(findings: pl.DataFrame, experiment: str) -> list[Row]:
    """Return the findings as rows of the long table, stage ``audit``, one row a number.

    Of several attacks with the same canary on one cell, the strongest counts: the one with the largest bound, AUC or
    distance.
    """
    cells: dict[tuple, Row] = {}
    for row in filled(findings).rows(named=True):
        key = tuple(
            row[name] for name in ("audit", "mechanism", "task", "method", "learner", "epsilon", "seed", "canary")
        )
        if key not in cells or strength(row) > strength(cells[key]):
            cells[key] = row
    long: dict[tuple, Row] = {}
    for row in cells.values():
        for metric, value in _metrics(row):
            fixed = {"experiment": experiment, "stage": "audit", "metric": metric, "value": value}
            cell = {name: fixed.get(name, row.get(name)) for name in COLUMNS}
            key = tuple(cell[name] for name in COLUMNS if name != "value")
            if key not in long or value > long[key]["value"]:  # a replay has one row a neighbour
                long[key] = cell
    return list(long.values())


def _metrics(row: Row) -> list[tuple[str, float]]:
    """Name the numbers of one finding."""
    if row["audit"] == "replay":
        names = {"replay_ratio": "ratio"}
    elif row["audit"] == "membership":
        names = {f"mia_{name}": name for name in ("auc", "auc_low", "auc_high", "tpr_at_1", "tpr_at_0p1")}
    else:
        canary = row["canary"]
        names = {
            "epsilon_claim": "claim",
            f"epsilon_bound_{canary}": "bound",
            f"epsilon_bound_family_{canary}": "bound_family",
            f"control_{canary}": "control",
            f"p_value_{canary}": "p_value",
        }
        if row["control_gated"]:
            names |= {name: name for name in ("ceiling", "ceiling_family", "detects", "detects_family")}
    return [(metric, row[name]) for metric, name in names.items() if row[name] is not None]


def _epsilons(rows: Iterable[Row]) -> list[float | None]:
    found = {row["epsilon"] for row in rows}
    return sorted(found, key=lambda epsilon: (epsilon is None, epsilon))


def place(order: Sequence[str], name: str) -> int:
    """Return a name's place in an order; unknown names come last."""
    return order.index(name) if name in order else len(order)


def strength(row: Row) -> float:
    """Return how much an attack showed: its largest bound, else its AUC or its distance."""
    bounds = [row[name] for name in ("bound", "bound_family") if row[name] is not None]
    others = [row[name] for name in ("auc", "ratio") if row[name] is not None]
    return max(bounds or others, default=-math.inf)


def detected(row: Row) -> float | None:
    """Return the smallest true epsilon that either bound detects, or None for no power."""
    return min((row[name] for name in ("detects", "detects_family") if row[name] is not None), default=None)


def most(rows: Iterable[Row], name: str) -> float | None:
    """Return the largest known value of a column, or None."""
    return max((row[name] for row in rows if row[name] is not None), default=None)


def least(rows: Iterable[Row], name: str) -> float | None:
    """Return the smallest known value of a column, or None."""
    return min((row[name] for row in rows if row[name] is not None), default=None)


def weakest(rows: Sequence[Row], name: str) -> float | None:
    """Return the largest of detected epsilons, or None where some row detects nothing."""
    return None if any(row[name] is None for row in rows) else most(rows, name)


# -- what a claim allows ---------------------------------------------------------------------------------------


def largest_auc(epsilon: float, delta: float) -> float:
    """Return the largest AUC of any test between the two worlds of an (epsilon, delta)-DP mechanism.

    The area above f(x) = max(0, 1 - delta - e^epsilon x, e^-epsilon (1 - delta - x)), the trade-off curve of
    (epsilon, delta)-DP (Dong et al. 2022): its two pieces meet at x = (1 - delta) / (1 + e^epsilon).

    Args:
        epsilon: >= 0.
        delta: in [0, 1].
    """
    return 1 - (1 - delta) ** 2 / (1 + math.exp(min(epsilon, 700.0)))


def largest_rate(false_positives: float, epsilon: float, delta: float) -> float:
    """Return the largest true positive rate at a false positive rate: 1 - f(x) of the curve above.

    Args:
        false_positives: in [0, 1].
        epsilon: >= 0.
        delta: in [0, 1].
    """
    growth = math.exp(min(epsilon, 700.0))
    return min(1.0, delta + growth * false_positives, 1 - (1 - delta - false_positives) / growth)
