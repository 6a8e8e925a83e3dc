"""The figures of the report, as SVG and PNG. Colour-blind-safe, one colour a method in all of them, deterministic.

matplotlib is imported inside the functions: asking for tables alone does not load it.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence

from dpmixmin.report.tables import AFTER, BEFORE, NAMES, Measurements, Settings, Stat, View, relative_gain, view
from dpmixmin.report.words import describe_mixture

COLOURS = {"none": "#777777", "uniform": "#E69F00", "mixmin": "#009E73", "dp_mixmin": "#0072B2"}
"""From the Okabe-Ito palette."""
MARKERS = {"none": "v", "uniform": "s", "mixmin": "D", "dp_mixmin": "o"}
HATCH = "////"
"""Non-private bars are hatched."""
WIDTH = 8.4
"""Inches; the same for all figures, so that their text has one size on the page."""

_STYLE = {
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


def draw_all(measured: Measurements, settings: dict[str, Settings]) -> Images:
    """Draw every figure."""
    from matplotlib import rc_context

    with rc_context(_STYLE):
        return {
            **_save("figure_auc", figure_auc(measured)),
            **_save("figure_gain", figure_gain(measured)),
            **_save("figure_weights", figure_weights(measured)),
            **_save("figure_tuning", figure_tuning(settings)),
        }


def _save(name: str, figure) -> Images:
    svg, png = io.BytesIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.savefig(png, format="png", dpi=150)
    return {f"{name}.svg": svg.getvalue(), f"{name}.png": png.getvalue()}


def _new(width: float, height: float, rows: int = 1, columns: int = 1, **options):
    """Return a figure and its panels, without pyplot's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _say(axis, text: str) -> None:
    """Show a sentence in a panel that has nothing to draw."""
    axis.set_axis_off()
    axis.text(0.5, 0.5, text, ha="center", va="center", color="#555555", transform=axis.transAxes, wrap=True)


# -- AUC against epsilon --------------------------------------------------------------------------------------


def figure_auc(measured: Measurements):
    """Macro test AUC against epsilon, before and after fine-tuning (DP-MixMin paper, figure 2)."""
    figure, axes = _new(WIDTH, 3.7, 1, 2)
    trained = [method for method in measured.methods if method != "none"]
    before, after = view(measured, BEFORE, trained), view(measured, AFTER, measured.methods)
    for axis, title, shown in ((axes[0, 0], "Before fine-tuning", before), (axes[0, 1], "After fine-tuning", after)):
        axis.set_title("\n".join([title, *_lines_of(shown.describe()), *_left_out(shown)]))
        if shown.stats:
            _lines(axis, shown)
        else:
            _say(axis, "nothing to compare")
    handles = [axes[0, i].get_legend_handles_labels() for i in (0, 1)]
    labels = {label: handle for found in handles for handle, label in zip(*found, strict=True)}
    ordered = [NAMES[method] for method in measured.methods if NAMES[method] in labels]
    if ordered:
        figure.legend([labels[label] for label in ordered], ordered, loc="outside lower center", ncols=len(ordered))
    return figure


def _lines_of(text: str) -> list[str]:
    """Break a panel's title."""
    return textwrap.wrap(text, 52)


def _left_out(shown: View) -> list[str]:
    names = ", ".join(NAMES[method] for method in shown.left_out)
    return _lines_of(f"not shown, lacks an ε: {names}") if names else []


def _lines(axis, shown: View) -> None:
    methods = shown.methods()
    for number, method in enumerate(methods):
        shift = 0.06 * (number - (len(methods) - 1) / 2)
        points = [(i + shift, shown.stats[method, e]) for i, e in enumerate(shown.epsilons)]
        points = [(x, stat) for x, stat in points if stat.mean is not None]
        if not points:
            continue
        axis.errorbar(
            [x for x, _ in points],
            [stat.mean for _, stat in points],
            yerr=[stat.sd or 0 for _, stat in points] if any(stat.sd for _, stat in points) else None,
            label=NAMES[method],
            color=COLOURS[method],
            marker=MARKERS[method],
            markersize=6,
            linewidth=1.6,
            linestyle="--" if method == "mixmin" else "-",
            markerfacecolor="white" if method == "mixmin" else COLOURS[method],
        )
    axis.set_xticks(range(len(shown.epsilons)), [f"{e:g}" for e in shown.epsilons])
    axis.set_xlim(-0.4, len(shown.epsilons) - 0.6)
    axis.set_xlabel("ε")
    axis.set_ylabel("macro test AUC")


# -- gain over no pretraining ---------------------------------------------------------------------------------


def gains(measured: Measurements) -> tuple[float, dict[str, dict[str, Stat]]]:
    """Return the smallest fine-tuned epsilon and the relative gains over `none` there: method to task to percent."""
    epsilon = measured.smallest_epsilon(AFTER)
    found: dict[str, dict[str, Stat]] = {}
    for method in [m for m in measured.methods if m != "none"]:
        for task in measured.shared_tasks(AFTER, (method, "none"), [epsilon]):
            base, ours = (Stat.of(measured.scores(AFTER, task, m, epsilon).values()) for m in ("none", method))
            found.setdefault(method, {})[task] = relative_gain(ours, base)
    return epsilon, found


def figure_gain(measured: Measurements):
    """Per-task relative AUC gain over no pretraining at the smallest epsilon (DP-MixMin paper, figure 3)."""
    epsilon, found = gains(measured)
    tasks = [task for task in measured.tasks if any(task in by_task for by_task in found.values())]
    figure, axes = _new(min(16, max(WIDTH, 1.5 + 1.1 * len(tasks))), 3.5)
    axis = axes[0, 0]
    if not found:
        _say(axis, "no fine-tuned model without pretraining to compare with")
        return figure
    common = [task for task in tasks if all(task in by_task for by_task in found.values())]
    width = 0.8 / len(found)
    for number, (method, by_task) in enumerate(found.items()):
        label = NAMES[method]
        if common:
            label += f": macro {sum(by_task[task].mean for task in common) / len(common):+.1f} %"
        places = [tasks.index(task) + width * (number - (len(found) - 1) / 2) for task in by_task]
        _bars(axis, places, list(by_task.values()), 0.9 * width, method, label)
    axis.axhline(0, color="#333333", linewidth=0.8)
    axis.set_xticks(range(len(tasks)), tasks, rotation=_rotation(tasks), ha="right" if _rotation(tasks) else "center")
    axis.set_ylabel("AUC gain over no pretraining (%)")
    over = f"; macro over {len(common)} of {len(tasks)} tasks" if 0 < len(common) < len(tasks) else ""
    axis.set_title(f"After fine-tuning at ε = {epsilon:g}{over}")
    figure.legend(loc="outside lower center", ncols=len(found))
    return figure


def _bars(axis, places: list, stats: Sequence[Stat], width: float, method: str, label: str) -> None:
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


def _rotation(labels: Sequence[str]) -> int:
    return 40 if len(labels) > 4 and max(map(len, labels)) > 8 else 0


# -- mixture weights ------------------------------------------------------------------------------------------


def figure_weights(measured: Measurements):
    """Mixture weights of every task: non-private, private at the smallest epsilon, and uniform as a line."""
    epsilon, names = measured.epsilons[0], list(measured.config.axes)

    def weights(task: str, method: str) -> dict[int, Stat]:
        found = (measured.scores("mixture", task, method, epsilon, f"weight_{name}") for name in names)
        return {i: Stat.of(scores.values()) for i, scores in enumerate(found) if scores}

    methods = [method for method in ("mixmin", "dp_mixmin") if any(weights(t, method) for t in measured.tasks)]
    tasks = [task for task in measured.tasks if any(weights(task, method) for method in methods)]
    columns = 1 if len(names) > 16 or len(tasks) < 2 else 2
    rows = max(1, math.ceil(len(tasks) / columns))
    figure, panels = _new(WIDTH, 1.1 + 1.7 * rows, rows, columns, sharey=True)
    if not tasks:
        _say(panels.flat[0], "no mixtures were measured")
        return figure
    width = 0.8 / len(methods)
    for panel in panels.flat[len(tasks) :]:
        panel.set_axis_off()
    for number, (panel, task) in enumerate(zip(panels.flat, tasks, strict=False)):
        panel.set_title(task)
        for place, method in enumerate(methods):
            found = weights(task, method)
            places = [i + width * (place - (len(methods) - 1) / 2) for i in found]
            label = NAMES[method] + (f", ε = {epsilon:g}" if method == "dp_mixmin" else "")
            _bars(panel, places, list(found.values()), 0.9 * width, method, label)
        if uniform := weights(task, "uniform"):
            level = sum(stat.mean for stat in uniform.values()) / len(uniform)
            panel.axhline(level, color=COLOURS["uniform"], linewidth=1.4, label=NAMES["uniform"])
        lowest = number + columns >= len(tasks)
        turned = 90 if sum(map(len, names)) > 60 / columns else 0
        panel.set_xticks(range(len(names)), names if lowest else [""] * len(names), rotation=turned, fontsize=8)
    for panel in panels[:, 0]:
        panel.set_ylabel("weight")
    panels.flat[0].set_ylim(bottom=0)  # shared, so after every panel is drawn
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


# -- tuning ---------------------------------------------------------------------------------------------------


def figure_tuning(settings: dict[str, Settings]):
    """Stand-in AUC of every fine-tuning candidate against its learning rate, one panel a method."""
    methods = [method for method in NAMES if method in settings and len(settings[method].curve)]
    columns = min(2, max(1, len(methods)))
    rows = max(1, math.ceil(len(methods) / columns))
    figure, panels = _new(WIDTH, 0.9 + 2.4 * rows if methods else 1.5, rows, columns)
    if "mixture" in settings:
        figure.suptitle(describe_mixture(settings["mixture"]), fontsize=9, x=0.01, ha="left")
    for panel in panels.flat[len(methods) :]:
        panel.set_axis_off()
    if not methods:
        _say(panels.flat[0], "Fine-tuning was not tuned: its settings were given in the config.")
    handles: dict[str, object] = {}
    for panel, method in zip(panels.flat, methods, strict=False):
        kept = "" if settings[method].chosen["choice"] else ": chosen not to fine-tune"
        panel.set_title(NAMES[method] + kept)
        _candidates(panel, settings[method], COLOURS[method])
        handles |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    return figure


def _candidates(panel, settings: Settings, colour: str) -> None:
    from matplotlib.lines import Line2D

    candidates = settings.candidates().drop_nulls("learning_rate")
    steps = sorted(set(candidates["steps"]))
    for marker, count in zip("osD^v<>p*hX" * len(steps), steps, strict=False):
        chosen = candidates.filter(candidates["steps"] == count)
        panel.plot(chosen["learning_rate"], chosen["score"], marker, color=colour, alpha=0.85, markersize=5)
        panel.add_line(Line2D([], [], marker=marker, color="#555555", linestyle="", label=f"{count} steps"))
    choice, best = settings.chosen["choice"], settings.chosen_score()
    if choice and best is not None:
        circle = {"marker": "o", "markersize": 12, "markerfacecolor": "none", "markeredgecolor": "#D55E00"}
        panel.plot([choice["learning_rate"]], [best], linestyle="", markeredgewidth=1.6, label="chosen", **circle)
    if len(candidates):
        rates = sorted(set(candidates["learning_rate"]))
        panel.set_xscale("log")
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
        panel.minorticks_off()
        panel.margins(x=0.08, y=0.15)
    _stay_level(panel, settings, list(candidates["score"]))
    panel.set_xlabel("learning rate")
    panel.set_ylabel("mean stand-in AUC")


def _stay_level(panel, settings: Settings, scores: list[float]) -> None:
    """Draw the level of `do not fine-tune`; far below the candidates it becomes a line of text."""
    stay = settings.stay_score()
    if stay is None:
        return
    if scores and stay < min(scores) - 2 * (max(scores) - min(scores)) - 0.02:
        text = f"↓ do not fine-tune: {stay:.3f}"
        panel.annotate(text, (0.99, 0.02), xycoords="axes fraction", ha="right", va="bottom", fontsize=8)
    else:
        panel.axhline(stay, color="#333333", linestyle="--", linewidth=1, label="do not fine-tune", zorder=1)
