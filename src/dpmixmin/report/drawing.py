"""How every figure of the report looks: one colour and marker a method, one text size, deterministic files.

matplotlib is imported inside the functions: asking for tables alone does not load it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from dpmixmin.report.tables import Stat

COLOURS = {"none": "#777777", "uniform": "#E69F00", "proportional": "#CC79A7", "mixmin": "#009E73",
           "dp_mixmin": "#0072B2"}  # fmt: skip
"""From the Okabe-Ito palette."""
MARKERS = {"none": "v", "uniform": "s", "proportional": "^", "mixmin": "D", "dp_mixmin": "o"}
HATCH = "////"
"""Non-private bars are hatched."""
WIDTH = 8.4
"""Inches; the same for all figures, so that their text has one size on the page."""

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dpmixmin",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "hatch.linewidth": 0.7,
    "errorbar.capsize": 3,
}

Images = dict[str, bytes]
"""File name to content."""


def save(name: str, figure) -> Images:
    """Return the files of a figure."""
    svg, png = io.BytesIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.savefig(png, format="png", dpi=150)
    return {f"{name}.svg": svg.getvalue(), f"{name}.png": png.getvalue()}


def new(width: float, height: float, rows: int = 1, columns: int = 1, **options):
    """Return a figure and its panels, without pyplot's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def say(axis, text: str) -> None:
    """Show a sentence in a panel that has nothing to draw."""
    axis.set_axis_off()
    axis.text(0.5, 0.5, text, ha="center", va="center", color="#555555", transform=axis.transAxes, wrap=True)


def bars(axis, places: list, stats: Sequence[Stat], width: float, method: str, label: str) -> None:
    """Draw a method's bars, with the standard deviations that are known."""
    private = method != "mixmin"
    axis.bar(
        places,
        [stat.mean for stat in stats],
        width,
        label=label,
        color=COLOURS[method] if private else "white",
        edgecolor=COLOURS[method],
        hatch="" if private else HATCH,
    )
    known = [(place, stat) for place, stat in zip(places, stats, strict=True) if stat.sd is not None]
    if known:
        axis.errorbar(
            [place for place, _ in known],
            [stat.mean for _, stat in known],
            yerr=[stat.sd for _, stat in known],
            fmt="none",
            ecolor="#222222",
            elinewidth=1,
        )
