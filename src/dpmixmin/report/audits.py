"""What the report says of audits: what was attacked and how, what came out, and how to read it, in plain words.

It speaks of the table of findings (``audits.csv``); :mod:`dpmixmin.report.audit_tables` makes the tables. A weak
result is never sold as a strong one: powerless audits, and what a small bound does not mean, are said.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence

import polars as pl

from dpmixmin.audit.finding import EXCEEDED, FAILURES, NO_LEAK, NO_POWER
from dpmixmin.report.audit_tables import (
    AUDITS,
    CANARIES,
    MAXIMUM,
    STRONGEST,
    Row,
    detected,
    filled,
    largest_auc,
    largest_rate,
    mechanism_table,
    most,
    paper_table,
    place,
)
from dpmixmin.report.drawing import Images
from dpmixmin.report.html import bullets, grid, paragraph
from dpmixmin.report.tables import NAMES

TIGHT = (
    "A bound is what the attack could prove, not what leaks. A bound far below the claim does not show that the claim "
    "is loose, or that the true ε is small: a mechanism that is tight at exactly ε = 1, attacked by its likelihood "
    "ratio, gives a median DP bound of about 0.1 at 1000 counted runs a world (0.06 to 0.12, by the threshold)."
)
"""Simulated Gaussian mechanism, delta = 1e-5: 0.06 where 1000 other runs choose the threshold that is best for them,
0.09 halfway between the worlds, 0.12 at the best fixed threshold."""
CAPTIONS = {
    "figure_tradeoff": "Error rates of the attacks on the mixture at every threshold, on the half of the runs that "
    "did not choose the attack; for each ε, the task with the largest max-clip bound. Both axes are normal "
    "quantiles: a Gaussian mechanism is a straight line. Filled marker: the threshold that was chosen, with a line "
    "to the 95 % limits of both rates (+), from which the f-DP bound is computed; a + in the shaded region refutes "
    "the claim at 95 %. Dashed: without noise, with an open marker at its fewest errors. Curves end where fewer than "
    "ten runs are left.",
    "figure_audit_bounds": "95 % lower bounds on epsilon of every audited mechanism, against its claim (black line). "
    "Grey tick: the true epsilon that the audit would have shown to exceed the claim with probability 0.8; without a "
    "tick it has no such power. Cross: the bound without noise.",
}
"""By figure: one sentence, in the order of the page."""


# -- words ----------------------------------------------------------------------------------------------------


def describe(row: Row) -> str:
    """Name what was attacked."""
    what = {"mixture": "mixture weights", "dp_sgd": "DP-SGD"}.get(row["mechanism"], row["mechanism"])
    how = {"one_run": ", one run", "replay": ", replay", "membership": ", membership"}
    return what + how.get(row["audit"], "")


def _canary(name: str) -> str:
    return CANARIES.get(name, name.replace("_", " "))


def _where(row: Row) -> str:
    """Name a cell: ``task odd, DP-MixMin``."""
    method = "" if row["audit"] == "mixture" else NAMES.get(row["method"], row["method"])
    return ", ".join(part for part in (f"task {row['task']}" if row["task"] else "", method) if part)


def _number(value: float | None, digits: int = 2, missing: str = "—") -> str:
    return missing if value is None else f"{value:.{digits}f}" if math.isfinite(value) else "∞"


def _power(row: Row) -> str:
    """Say what true epsilon one of the two bounds detects."""
    if row["claim"] is None or (row["bound"] is None and row["bound_family"] is None):
        return "—"
    return _number(detected(row), missing="none")


def outcome(findings: pl.DataFrame) -> list[str]:
    """Say what came out: one sentence, or one for each finding that fails the gate."""
    rows = filled(findings).rows(named=True)
    sentences = []
    for row in rows:
        if row["verdict"] not in FAILURES:
            continue
        cell = ", ".join(part for part in (describe(row), _where(row), f"canary {_canary(row['canary'])}") if part)
        if row["verdict"] == NO_LEAK:
            what = (
                f"without noise the attack shows ε = {_number(row['control'])} only, for a claim of "
                f"{_number(row['claim'])}: this attack proves nothing."
            )
        elif row["ratio"] is not None:
            what = f"one unit moves a release by {row['ratio']:.4g} times the declared sensitivity."
        else:
            bounds = [row[name] for name in ("bound", "bound_family") if row[name] is not None]
            p = "" if row["p_value"] is None else f"; p = {row['p_value']:.2g}"
            what = f"ε is at least {_number(max(bounds, default=None))} (95 %), claimed {_number(row['claim'])}{p}."
        at = "" if row["epsilon"] is None else f" at ε = {row['epsilon']:g}"
        sentences.append(f"{row['verdict'].upper()}{at}: {cell}: {what}")
    if sentences:
        return sentences
    judged = [row for row in rows if row["gated"]]
    if not judged:
        return ["Attacks are reported below; the gate looks at none of them."]
    powerless = sum(row["verdict"] == NO_POWER for row in judged)
    without = f"; {powerless} of them could not have (no power)" if powerless else ""
    return [f"None of {len(judged)} attacks refuted a claim{without}."]


def methods(findings: pl.DataFrame, mode: str = "study", runs: int | None = None) -> list[str]:
    """Say what was attacked and how, one item for each audit that was made."""
    rows = filled(findings).rows(named=True)
    found = {row["audit"] for row in rows}
    unit = next((row["unit"] for row in rows if row["unit"]), "record")
    many = f"{runs:,} times" if runs else "many times"
    items = []
    if "mixture" in found:
        items.append(
            f"Mixture: learned {many} without and {many} with one {unit} more (the canary), by the code that learns "
            "the released mixture. Half of the runs chose the attack, its errors were counted on the other half; the "
            "attacker knows all other units and sees every noisy sum. Canaries: one drawn from the data (natural); "
            "the one of the data that moves the sums most (worst natural); one made to reach the clipping norm at "
            "every step (max-clip), the most that one unit can do."
        )
    if "one_run" in found:
        items.append(
            "Fine-tuning: one training run with many canaries, each present with probability 1/2; the attack guesses "
            f"which were. A gradient canary is one {unit} whose clipped gradient has the full norm on one parameter "
            "of its own, and its attacker sees every noisy gradient; a real unit is guessed from its loss alone, "
            "before and after training. One run shows less than many would, at the cost of one."
        )
    if "membership" in found:
        items.append(
            "Released models: are units of the training part told from units of the test part by their loss under "
            "the model (or by how much training lowered it)?"
        )
    if "replay" in found:
        items.append(
            f"Replay: the mechanism is run twice with the same randomness, with and without one {unit}; no release "
            "may move by more than the sensitivity that its noise was calibrated to. This checks sums and clipping, "
            "not noise."
        )
    if mode == "deploy":
        items.insert(0, "Public stand-in data was audited, with the specifications of the deployment. The private set "
                        "was never audited, and nothing here was computed from it.")  # fmt: skip
    return items


def reading(findings: pl.DataFrame) -> list[str]:
    """Say how the numbers are to be read."""
    rows = filled(findings).rows(named=True)
    bounded = [row for row in rows if row["bound"] is not None or row["bound_family"] is not None]
    if not bounded:
        return []
    items = [TIGHT, *_detection(bounded)]
    items.append(
        "No power: with so few runs or canaries even an attack that is always right would not have refuted the claim "
        "at the gate's level. Then the audit says nothing for or against the claim; it is not a failure."
    )
    if any(row["control"] is not None for row in bounded):
        items.append(
            "Control: the same attack without noise. For the max-clip and gradient canaries it must exceed the claim "
            "(where the ceiling does), or the attack proves nothing and the gate fails. The controls of natural "
            "canaries are reported and not gated: one ordinary unit may leave no visible trace, with or without noise."
        )
    items.append(
        "Bounds are 95 % bounds, each alone: of many mechanisms that are as private as claimed, up to one in twenty "
        "may show more than its claim by chance. The gate is stricter: it compares the p-values of all gated attacks "
        "with a level that gives one false alarm in 1000 runs of the whole pipeline, so it detects less than the "
        "numbers above."
    )
    above = [row for row in bounded if row["verdict"] != EXCEEDED and _above(row)]
    if above:
        items.append(
            f"At 95 % {len(above)} of {len(bounded)} attacks lie above their claim, but not at the gate's level."
        )
    return items


def _above(row: Row) -> bool:
    return row["claim"] is not None and any((row[name] or 0) > row["claim"] for name in ("bound", "bound_family"))


def _detection(rows: Sequence[Row]) -> list[str]:
    """Say the detection power of the strongest canary of each audit at each claim; the least, of several cells."""
    powers: dict[str, dict[str, list[float | None]]] = {}
    for row in sorted(rows, key=lambda row: (place(AUDITS, row["audit"]), row["mechanism"], row["claim"] or 0)):
        if row["canary"] in STRONGEST and row["claim"] is not None:
            powers.setdefault(describe(row), {}).setdefault(_number(row["claim"]), []).append(detected(row))
    parts = []
    for name, by_claim in powers.items():
        said = []
        for claim, found in by_claim.items():
            caught = "nothing (no power)" if None in found else _number(max(value for value in found if value))
            said.append(f"{caught} for a claim of {claim}")
        parts.append(f"{name}: {', '.join(said)}")
    lead = (
        "Detection power: the smallest true ε that a 95 % bound shows to exceed the claim with probability 0.8, if "
        "the mechanism is a Gaussian one and attacked as well as is possible"
    )
    return [f"{lead}. {'; '.join(parts)}."] if parts else []


# -- page and terminal ----------------------------------------------------------------------------------------


def section(
    findings: pl.DataFrame,
    images: Images,
    figure: Callable[[str, str, Images], str],
    mode: str = "study",
    runs: int | None = None,
) -> str:
    """Return the page's section as HTML; nothing where nothing was audited.

    Args:
        findings: the table of findings.
        images: the report's figures; those of :data:`CAPTIONS` that exist are shown.
        figure: returns a figure's HTML, from its name, its caption and the images.
        mode: study or deploy; in a deployment only public stand-ins were audited, and the section says so.
        runs: runs of the mixture in each world.
    """
    rows = filled(findings).rows(named=True)
    if not rows:
        return ""
    failed = any(row["verdict"] in FAILURES for row in rows)
    parts = ["<h2>Audits: what attacks on these claims found</h2>"]
    parts += [paragraph(sentence, "banner" if failed else "lead") for sentence in outcome(findings)]
    parts += [bullets(methods(findings, mode, runs)), _mechanisms(findings)]
    parts += [figure(name, caption, images) for name, caption in CAPTIONS.items() if f"{name}.svg" in images]
    parts += [_paper(findings), _membership(rows)]
    if items := reading(findings):
        parts += ["<h3>How to read the audits</h3>", bullets(items)]
    return "".join(parts)


def _mechanisms(findings: pl.DataFrame) -> str:
    rows = mechanism_table(findings).rows(named=True)
    lines = [
        [
            describe(row),
            _epsilon(row["epsilon"]),
            _number(row["claim"], 3),
            _with_ceiling(row["bound"], row["ceiling"]),
            _with_ceiling(row["bound_family"], row["ceiling_family"]),
            _power(row),
            _number(row["control"]),
            _ratio(row),
            str(row["attacks"]),
            row["verdict"],
        ]
        for row in rows
        if row["audit"] != "membership"
    ]
    if not lines:
        return ""
    heads = (
        "mechanism",
        "ε",
        "claim",
        "largest DP bound",
        "f-DP bound",
        "detects",
        "control",
        "replay",
        "attacks",
        "verdict",
    )
    note = (
        "Claim: the epsilon that the accounting states for this mechanism. Bounds are 95 % lower bounds on epsilon, "
        "with the ceiling in brackets: what an attack that is always right would give. The DP bound holds for any "
        "mechanism; the f-DP bound uses the trade-off curve that the mechanism is known to have (Gaussian, or sampled "
        "Gaussian). Detects: the smallest true epsilon that would have been found to exceed the claim with "
        "probability 0.8. Control: the weakest DP bound without noise of the canaries that must leak. Replay: the "
        "largest distance that one unit moved a release, over the declared sensitivity; at most 1 is right."
    )
    return f"<h3>By mechanism</h3>{grid(heads, lines)}{paragraph(note, 'note')}"


def _with_ceiling(bound: float | None, ceiling: float | None) -> str:
    return _number(bound, 3) + (f" (of {_number(ceiling)})" if bound is not None and ceiling is not None else "")


def _ratio(row: Row) -> str:
    return "—" if row["ratio"] is None else f"{row['ratio']:.6g}"


def _paper(findings: pl.DataFrame) -> str:
    table = paper_table(findings)
    canaries = [name for name in ("natural", "worst_natural", "max_clip") if table[name].is_not_null().any()]
    if not canaries:
        return ""
    several = len({row["epsilon"] for row in table.rows(named=True)}) > 1
    lines = []
    for row in table.rows(named=True):
        line = [row["task"] or "mixture", *([_epsilon(row["epsilon"])] if several else []), _number(row["claim"], 3)]
        for name in canaries:
            line += [_number(row[name], 3)]
            line += [_number(row["max_clip_family"], 3)] if name == "max_clip" else []
            line += [_number(row[f"{name}_control"])]
        lines.append([*line, _power({**row, "bound": row["max_clip"], "bound_family": row["max_clip_family"]}),
                      row["verdict"]])  # fmt: skip
    heads = ["task", *(["ε"] if several else []), "claim"]
    for name in canaries:
        heads += [f"{_canary(name)}: private"]
        heads += ["by f-DP"] if name == "max_clip" else []
        heads += ["no noise"]
    note = (
        "The form of the DP-MixMin paper's tables 16 and 17: 95 % lower bounds on epsilon of the private mixture, and "
        "of the same attack without noise. By f-DP: the bound that uses the mechanism's own trade-off curve, on the "
        "max-clip canary. Detects: see above."
    )
    if MAXIMUM in table["task"]:
        note += f" {MAXIMUM.capitalize()}: the largest value of each column (of detects: the least power)."
    return f"<h3>The mixture's audit</h3>{grid([*heads, 'detects', 'verdict'], lines)}{paragraph(note, 'note')}"


def _membership(rows: Sequence[Row]) -> str:
    found = [row for row in rows if row["audit"] == "membership"]
    if not found:
        return ""
    groups: dict[tuple, list[Row]] = {}
    for row in sorted(found, key=lambda row: (row["epsilon"] is None, row["epsilon"] or 0)):
        groups.setdefault((row["epsilon"], row["method"]), []).append(row)
    lines = [_attacked(group) for group in groups.values()]
    heads = (
        "models of",
        "ε",
        "attacks",
        "mean AUC",
        "largest AUC (95 %)",
        "by",
        "the claim allows",
        "largest TPR at 1 %",
        "the claim allows",
        "at 0.1 %",
    )
    note = (
        "AUC of telling members from others by a released model's loss (0.5 is guessing), over all tasks, seeds and "
        "both attacks; and the share of members found (TPR) where 1 % or 0.1 % of the others are taken for members. "
        "The largest of several is large by chance too: its interval is that of one attack. What the claim allows is "
        "the most that any attack can reach on average. This attack is weak: an AUC near 0.5 says that losses give "
        "little away, not that nothing else does. Every attack stands in audits.csv."
    )
    return f"<h3>Membership inference</h3>{grid(heads, lines)}{paragraph(note, 'note')}"


def _attacked(group: list[Row]) -> list[str]:
    """Return one row of the table of membership inference: all attacks on one method's models at one epsilon."""
    measured = [row for row in group if row["auc"] is not None]
    best = max(measured or group, key=lambda row: row["auc"] or 0.0)
    claimed = best["claim"] is not None and best["delta"] is not None
    span = "" if best["auc_low"] is None or best["auc_high"] is None else (
        f" ({_number(best['auc_low'], 3)} to {_number(best['auc_high'], 3)})"
    )  # fmt: skip
    by = [best["statistic"].replace("_", " "), *([f"task {best['task']}"] if best["task"] else [])]
    mean = sum(row["auc"] for row in measured) / len(measured) if measured else None
    return [
        NAMES.get(best["method"], best["method"]) or "model",
        _epsilon(best["epsilon"]),
        str(len(group)),
        _number(mean, 3),
        _number(best["auc"], 3) + span,
        ", ".join(part for part in by if part) or "—",
        _number(largest_auc(best["claim"], best["delta"]), 3) if claimed else "—",
        _percent(most(group, "tpr_at_1")),
        _percent(largest_rate(0.01, best["claim"], best["delta"])) if claimed else "—",
        _percent(most(group, "tpr_at_0p1")),
    ]


def _percent(value: float | None) -> str:
    return "—" if value is None else f"{100 * value:.1f} %"


def _epsilon(value: float | None) -> str:
    return "—" if value is None else f"{value:g}"


def lines(findings: pl.DataFrame, mode: str = "study") -> list[str]:
    """Return what the terminal shows, at most 100 columns; nothing where nothing was audited."""
    rows = mechanism_table(findings).rows(named=True)
    if not rows:
        return []
    table = [["audit", "epsilon", "claim", "DP bound", "f-DP", "detects", "control", "verdict"]]
    others = []
    for row in rows:
        at = "" if row["epsilon"] is None else f" at epsilon = {row['epsilon']:g}"
        if row["audit"] == "membership":
            others.append(f"{describe(row)}{at}: AUC {_number(row['auc'], 3)} (0.5 is guessing)")
        elif row["audit"] == "replay":
            others.append(f"{describe(row)}: one unit moves a release by at most {_ratio(row)} of its "
                          f"sensitivity: {row['verdict']}")  # fmt: skip
        else:
            numbers = (_number(row["bound"], 3), _number(row["bound_family"], 3), _power(row), _number(row["control"]))
            claim = (_epsilon(row["epsilon"]), _number(row["claim"]))
            table.append([_cut(describe(row), 24), *claim, *numbers, row["verdict"]])
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    found = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    plain = [_ascii(line) for line in found] if len(table) > 1 else []
    sentences = [*others, *outcome(findings)]
    if mode == "deploy":
        sentences.append("Public stand-ins were audited, never the private set.")
    if plain:
        sentences.append("A bound far below its claim does not show that the claim is loose. Detects none: no power.")
    whole = [_ascii(text).replace(" %", "\u00a0%") for text in sentences]  # no line starts with a `%`
    wrapped = [line for text in whole for line in textwrap.wrap(text, 100, subsequent_indent="  ")]
    return [*plain, *(line.replace("\u00a0", " ") for line in wrapped)]


def _ascii(text: str) -> str:
    return text.replace("ε", "epsilon").replace("—", "-").replace("∞", "inf")


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "~"
