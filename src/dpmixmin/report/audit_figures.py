"""The figures of the audits: errors of the attacks against what the claim allows, and bounds against claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from dpmixmin.privacy.gaussian import gaussian_mu
from dpmixmin.report.audit_tables import CANARIES, STRONGEST, Row, detected, filled, least, most, place
from dpmixmin.report.drawing import STYLE, WIDTH, Images, new, save, say
from dpmixmin.report.tables import NAMES

COLOURS = {"max_clip": "#D55E00", "worst_natural": "#0072B2", "natural": "#009E73"}
"""From the Okabe-Ito palette."""
MARKERS = {"max_clip": "o", "worst_natural": "s", "natural": "^"}
SHADE = "#f2dede"
CLAIM = "#222222"
EDGE = 1e-4
"""Error rates below it are drawn at it: normal quantiles end nowhere."""
TICKS = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
CHANCE = 9.5
"""Curves are drawn where at least ten runs lie on either side in both worlds (and a half, for rounding)."""

EPSILON_TICKS = (0, 0.1, 0.5, 1, 2, 4, 6, 8, 12, 20, 50)

TradeOff = Callable[[np.ndarray], np.ndarray]
"""False negative rate against false positive rate."""


@dataclass(frozen=True, eq=False)
class Curve:
    """The errors of one attack at every threshold, on the half of the runs that chose nothing.

    Attributes:
        canary: whose presence is guessed.
        noise: False for the control.
        fpr: false positive rates, shape (thresholds,).
        fnr: false negative rates at the same thresholds, shape (thresholds,).
        task: of the mixture, or empty.
        epsilon: target of the mixture.
        runs: runs in each world.
        point: the two rates at the threshold that was chosen, if it is to be marked.
        upper: their 95 % upper limits, which hold together.
    """

    canary: str
    noise: bool
    fpr: np.ndarray
    fnr: np.ndarray
    task: str = ""
    epsilon: float | None = None
    runs: int | None = None
    point: tuple[float, float] | None = None
    upper: tuple[float, float] | None = None


@dataclass(frozen=True, eq=False)
class Claim:
    """What one panel tests.

    Attributes:
        target: the epsilon that names the panel, as in :class:`Curve`.
        epsilon: what the accounting states, at ``delta``.
        delta: in (0, 1).
        own: trade-off curve that the accounting implies; None: the Gaussian mechanism's with this epsilon and delta.
    """

    target: float
    epsilon: float
    delta: float
    own: TradeOff | None = None


def draw_all(findings: pl.DataFrame, curves: Sequence[Curve], claims: Sequence[Claim]) -> Images:
    """Draw every figure that there is something to draw in."""
    from matplotlib import rc_context

    with rc_context({**STYLE, "axes.grid.axis": "both"}):
        images: Images = {}
        if curves:
            images |= save("figure_tradeoff", figure_tradeoff(curves, claims))
        if _panels(findings):
            images |= save("figure_audit_bounds", figure_bounds(findings))
        return images


# -- trade-off ------------------------------------------------------------------------------------------------


def allowed(fpr: np.ndarray, epsilon: float, delta: float) -> np.ndarray:
    """Return the smallest false negative rate that (epsilon, delta)-DP allows (Dong et al. 2022, Proposition 3).

    Args:
        fpr: false positive rates in [0, 1].
        epsilon: >= 0.
        delta: in [0, 1].
    """
    growth = math.exp(min(epsilon, 700.0))
    return np.maximum(0.0, np.maximum(1 - delta - growth * fpr, (1 - delta - fpr) / growth))


def gaussian_tradeoff(mu: float) -> TradeOff:
    """Return G_mu, the trade-off curve of a mu-Gaussian mechanism: Phi(Phi^-1(1 - x) - mu)."""
    from scipy.special import ndtr, ndtri

    return lambda fpr: ndtr(-ndtri(fpr) - mu)


def figure_tradeoff(curves: Sequence[Curve], claims: Sequence[Claim]):
    """False negatives against false positives of every canary, one panel a claim.

    Both axes are normal quantiles: a Gaussian mechanism is a straight line, and large epsilons keep their corner.

    Args:
        curves: of one task a panel (its name stands in the title).
        claims: one a panel, in their order.
    """
    columns = min(3, max(1, len(claims)))
    rows = max(1, math.ceil(len(claims) / columns))
    side = min(3.4, WIDTH / columns)
    figure, panels = new(max(WIDTH, side * columns), 0.95 + side * rows, rows, columns)
    for panel in panels.flat[len(claims) :]:
        panel.set_axis_off()
    handles: dict[str, object] = {}
    for number, (panel, claim) in enumerate(zip(panels.flat, claims, strict=False)):
        here = [curve for curve in curves if curve.epsilon == claim.target]
        tasks = ", ".join(dict.fromkeys(curve.task for curve in here if curve.task))
        panel.set_title(f"ε = {claim.target:g}" + (f", task {tasks}" if tasks else ""))
        if not here:
            say(panel, "no attack was drawn")
            continue
        _boundary(panel, claim)
        for curve in sorted(here, key=lambda curve: (curve.noise, -place(tuple(CANARIES), curve.canary))):
            _errors(panel, curve)
        _quantile_axes(panel, number % columns == 0)
        handles |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    if handles:
        ordered = sorted(handles, key=_legend_place)
        figure.legend([handles[name] for name in ordered], ordered, loc="outside lower center", ncols=3)
    return figure


def _legend_place(label: str) -> tuple[bool, int]:
    """Canaries with noise, what the claim says, canaries without noise; the strongest canary first."""
    names = [f"{name}{end}" for end in ("", ", no noise") for name in CANARIES.values()]
    return label.endswith(", no noise"), names.index(label) if label in names else len(names)


def _quantile(rate: np.ndarray) -> np.ndarray:
    from scipy.special import ndtri

    return ndtri(np.clip(rate, EDGE, 1 - EDGE))


def _boundary(panel, claim: Claim) -> None:
    """Draw what the claim allows, and shade what it forbids."""
    x = _grid()
    forbidden = _quantile(allowed(x, claim.epsilon, claim.delta))
    panel.fill_between(_quantile(x), _quantile(np.zeros(1))[0], forbidden, color=SHADE, linewidth=0,
                       label="refutes the claim")  # fmt: skip
    panel.plot(_quantile(x), forbidden, color=CLAIM, linewidth=1.3, label="claimed (ε, δ)-DP")
    own = claim.own or gaussian_tradeoff(gaussian_mu(claim.epsilon, claim.delta))
    label = "Gaussian mechanism with this claim" if claim.own is None else "the mechanism as accounted"
    panel.plot(_quantile(x), _quantile(own(x)), color=CLAIM, linewidth=1.1, linestyle=":", label=label)


def _grid() -> np.ndarray:
    from scipy.special import ndtr

    end = _quantile(np.zeros(1))[0]
    return ndtr(np.linspace(end, -end, 801))


def _errors(panel, curve: Curve) -> None:
    colour, marker = COLOURS.get(curve.canary, "#555555"), MARKERS.get(curve.canary, "D")
    name = CANARIES.get(curve.canary, curve.canary)
    fpr, fnr = _certain(curve)
    x, y = _quantile(fpr), _quantile(fnr)
    if not curve.noise:
        best = int(np.argmin(fpr + fnr))
        style = {"color": colour, "markerfacecolor": "white", "markersize": 6, "clip_on": False, "zorder": 4}
        panel.plot(x, y, marker=marker, markevery=[best], linestyle=(0, (4, 2)), linewidth=1.3,
                   label=f"{name}, no noise", **style)  # fmt: skip
        return
    panel.plot(x, y, color=colour, linewidth=1.9 if curve.canary == "max_clip" else 1.2, marker=marker, markevery=[],
               markersize=6, markeredgecolor="white", label=name)  # fmt: skip
    if curve.point:
        x, y = _quantile(np.array(curve.point))
        panel.plot([x], [y], marker=marker, markersize=7, color=colour, markeredgecolor="white", zorder=5)
        if curve.upper:
            far = _quantile(np.array(curve.upper))
            panel.plot([x, far[0]], [y, far[1]], color=colour, linewidth=1, zorder=5)
            panel.plot([far[0]], [far[1]], marker="+", markersize=7, color=colour, zorder=5)


def _certain(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Return a curve without its ends, where a handful of errors would draw it into the shaded region by chance.

    A curve that has nothing else, such as that of an attack without errors, is kept whole.
    """
    fpr, fnr = np.asarray(curve.fpr, dtype=float), np.asarray(curve.fnr, dtype=float)
    order = np.lexsort((-fnr, fpr))
    fpr, fnr = fpr[order], fnr[order]
    kept = np.minimum(np.minimum(fpr, 1 - fpr), np.minimum(fnr, 1 - fnr)) * (curve.runs or math.inf) >= CHANCE
    return (fpr[kept], fnr[kept]) if kept.any() else (fpr, fnr)


def _quantile_axes(panel, first: bool) -> None:
    end = -_quantile(np.zeros(1))[0]
    places, labels = _quantile(np.array(TICKS)), [f"{100 * tick:g}" for tick in TICKS]
    panel.set_xticks(places, labels, fontsize=7.5)
    panel.set_yticks(places, labels, fontsize=7.5)
    panel.set_xlim(-end, end)
    panel.set_ylim(-end, end)
    panel.set_aspect("equal")
    panel.set_xlabel("false positives (%)")
    if first:
        panel.set_ylabel("false negatives (%)")


# -- bounds ---------------------------------------------------------------------------------------------------


def figure_bounds(findings: pl.DataFrame):
    """Bounds, control and detection power of every audited cell, against its claim: one panel an epsilon."""
    panels = _panels(findings)
    labels = list(dict.fromkeys(label for found in panels.values() for label in found))
    columns = min(3, max(1, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    figure, axes = new(WIDTH, 1.2 + rows * (0.6 + 0.24 * len(labels)), rows, columns, sharey=True)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    handles: dict[str, object] = {}
    for axis, (epsilon, found) in zip(axes.flat, panels.items(), strict=False):
        axis.set_title("no target" if epsilon is None else f"ε = {epsilon:g}")
        for label, group in found.items():
            _bounds(axis, labels.index(label), group)
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        axis.set_yticks(range(len(labels)), labels)
        axis.set_ylim(len(labels) - 0.4, -0.6)
        axis.set_xscale("function", functions=(_root, _square))
        axis.set_xlim(-0.003, 1.1 * max(axis.dataLim.x1, 1.0))
        axis.set_xticks([tick for tick in EPSILON_TICKS if tick <= axis.get_xlim()[1]])
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("epsilon (square-root scale)")
        axis.grid(visible=False, axis="y")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return figure


def _root(x: np.ndarray) -> np.ndarray:
    """Spread small epsilons; odd, because margins lie below zero."""
    return np.sign(x) * np.sqrt(np.abs(x))


def _square(x: np.ndarray) -> np.ndarray:
    return np.sign(x) * np.square(x)


def _panels(findings: pl.DataFrame) -> dict[float | None, dict[str, list[Row]]]:
    """Return the attacks that have a bound and a claim: by epsilon, then by what was attacked."""
    rows = filled(findings).filter(pl.col("claim").is_not_null() & pl.col("bound").is_not_null()).rows(named=True)
    rows.sort(key=lambda row: row["audit"] != "mixture")
    found: dict[float | None, dict[str, list[Row]]] = {}
    for epsilon in sorted({row["epsilon"] for row in rows}, key=lambda value: (value is None, value or 0)):
        here = found.setdefault(epsilon, {})
        for row in rows:
            if row["epsilon"] == epsilon:
                here.setdefault(_label(row), []).append(row)
    return found


def _label(row: Row) -> str:
    if row["audit"] == "mixture":
        return row["task"] or "mixture"
    return "fine-tuning: " + (NAMES.get(row["method"], row["method"]) or row["mechanism"])


def _bounds(axis, y: float, group: Sequence[Row]) -> None:
    strong = [row for row in group if row["canary"] in STRONGEST]
    weak = [row for row in group if row["canary"] not in STRONGEST]
    claim = least(group, "claim")
    axis.plot([claim, claim], [y - 0.5, y + 0.5], color=CLAIM, linewidth=1.6, label="claim")
    for values, style in _marks(strong, weak).values():
        known = [value for value in values if value is not None]
        if known:
            axis.plot(known, [y] * len(known), linestyle="", **style)


def _marks(strong: Sequence[Row], weak: Sequence[Row]) -> Mapping[str, tuple[list, dict]]:
    """Return what is drawn of one cell: values, and how they look."""
    red, open_face = COLOURS["max_clip"], {"markerfacecolor": "white"}
    return {
        "weak": (
            [row["bound"] for row in weak],
            {
                "marker": "^",
                "color": COLOURS["natural"],
                "markersize": 5,
                "label": "DP bound, real units",
                **open_face,
            },
        ),
        "bound": (
            [most(strong, "bound")],
            {"marker": "o", "color": red, "markersize": 6, "label": "DP bound, max-clip or gradient canary"},
        ),
        "family": (
            [most(strong, "bound_family")],
            {"marker": "D", "color": red, "markersize": 5, "label": "f-DP bound, the same canary", **open_face},
        ),
        "power": (
            [detected(row) for row in strong[:1]],
            {
                "marker": "|",
                "color": "#555555",
                "markersize": 9,
                "markeredgewidth": 1.6,
                "label": "detected with 80 %",
            },
        ),
        "control": (
            [least(strong, "control")],
            {"marker": "x", "color": COLOURS["worst_natural"], "markersize": 6, "label": "DP bound without noise"},
        ),
    }
