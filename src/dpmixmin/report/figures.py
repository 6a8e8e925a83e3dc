"""The figures of the report, as SVG and PNG. Colour-blind-safe, one colour a method in all of them, deterministic."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from dpmixmin.report import tables
from dpmixmin.report.drawing import COLOURS, MARKERS, STYLE, WIDTH, Images, bars, new, save, say
from dpmixmin.report.score import Score
from dpmixmin.report.settings import Settings
from dpmixmin.report.tables import AFTER, BEFORE, NAMES, Measurements, Stat, View, relative_gain, view
from dpmixmin.report.words import describe_mixture


def draw_all(measured: Measurements, settings: dict[str, Settings]) -> Images:
    """Draw every figure."""
    from matplotlib import rc_context

    gain = figure_gain if measured.score.over_tasks else figure_reduction
    with rc_context(STYLE):
        return {
            **save(measured.score.figure, figure_scores(measured)),
            **save("figure_gain", gain(measured)),
            **save("figure_weights", figure_weights(measured)),
            **save("figure_tuning", figure_tuning(settings, measured.score)),
        }


# -- scores against epsilon -----------------------------------------------------------------------------------


FLAT = 2.0
"""Perplexities are drawn on one axis where the highest is at most so many times the lowest."""


def figure_scores(measured: Measurements):
    """Score against epsilon, before and after fine-tuning (DP-MixMin paper, figures 2 and 5)."""
    trained = [method for method in measured.methods if method != "none"]
    before, after = view(measured, BEFORE, trained), view(measured, AFTER, measured.methods)
    notes, share = ([], []), False
    if not measured.score.higher_is_better:
        after, notes, share = _readable(measured, before, after)
    figure, axes = new(WIDTH, 3.7, 1, 2, sharey=share)
    panels = ("Before fine-tuning", before), ("After fine-tuning", after)
    for axis, (title, shown), note in zip(axes[0], panels, notes, strict=True):
        axis.set_title("\n".join([title, *_lines_of(shown.describe()), *_left_out(shown), *note]))
        if shown.stats:
            _lines(axis, shown, measured.score)
        else:
            say(axis, "nothing to compare")
    if share:
        axes[0, 1].set_ylabel("")
    _legend(figure, axes[0], [NAMES[method] for method in measured.methods])
    return figure


def _legend(figure, axes, order: Sequence[str]) -> None:
    """Add one legend for several panels."""
    handles = [axis.get_legend_handles_labels() for axis in axes]
    labels = {label: handle for found in handles for handle, label in zip(*found, strict=True)}
    ordered = [label for label in order if label in labels]
    if ordered:
        figure.legend([labels[label] for label in ordered], ordered, loc="outside lower center", ncols=len(ordered))


def _lines_of(text: str) -> list[str]:
    """Break a panel's title."""
    return textwrap.wrap(text, 52)


def _readable(measured: Measurements, before: View, after: View) -> tuple[View, tuple[list, list], bool]:
    """Leave an untrained model out of the lines where it would flatten them, and say its level instead.

    Returns:
        What is drawn after fine-tuning; lines under the two titles; whether both panels can share their axis.
    """
    untrained = [stat.mean for (method, _), stat in after.stats.items() if method == "none"]
    levels = [stat.mean for (method, _), stat in after.stats.items() if method != "none"]
    notes: tuple[list[str], list[str]] = ([], [])
    initial = Stat.of(v for task in measured.tasks for v in measured.scores(BEFORE, task, "none", None).values())
    if initial.n:
        notes[0].append(f"off the scale: {NAMES['none']}, {measured.score.number(initial.mean)}")
    if untrained and levels and max(untrained) > FLAT * max(levels):
        span = " to ".join(dict.fromkeys(map(measured.score.number, (min(untrained), max(untrained)))))
        notes[1].append(f"off the scale: {NAMES['none']}, {span}")
        after = view(measured, AFTER, [method for method in measured.methods if method != "none"])
    drawn = [stat.mean for shown in (before, after) for stat in shown.stats.values() if stat.mean is not None]
    share = bool(before.stats and after.stats) and max(drawn) <= FLAT * min(drawn)
    return after, notes, share


def _left_out(shown: View) -> list[str]:
    names = ", ".join(NAMES[method] for method in shown.left_out)
    return _lines_of(f"not shown, lacks an ε: {names}") if names else []


def _lines(axis, shown: View, score: Score) -> None:
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
    axis.set_ylabel(score.overall)


# -- gain over no pretraining ---------------------------------------------------------------------------------


def gains(measured: Measurements) -> tuple[float, dict[str, dict[str, Stat]]]:
    """Return the smallest fine-tuned epsilon and the relative gains over `none` there: method to task to percent."""
    epsilon = measured.smallest_epsilon(AFTER)
    found: dict[str, dict[str, Stat]] = {}
    base = measured.score.base
    for method in [m for m in measured.methods if m != base]:
        for task in measured.shared_tasks(AFTER, (method, base), [epsilon]):
            theirs, ours = (Stat.of(measured.scores(AFTER, task, m, epsilon).values()) for m in (base, method))
            found.setdefault(method, {})[task] = relative_gain(ours, theirs)
    return epsilon, found


def figure_gain(measured: Measurements):
    """Per-task relative AUC gain over no pretraining at the smallest epsilon (DP-MixMin paper, figure 3)."""
    epsilon, found = gains(measured)
    tasks = [task for task in measured.tasks if any(task in by_task for by_task in found.values())]
    figure, axes = new(min(16, max(WIDTH, 1.5 + 1.1 * len(tasks))), 3.5)
    axis = axes[0, 0]
    if not found:
        say(axis, "no fine-tuned model without pretraining to compare with")
        return figure
    common = [task for task in tasks if all(task in by_task for by_task in found.values())]
    width = 0.8 / len(found)
    for number, (method, by_task) in enumerate(found.items()):
        label = NAMES[method]
        if common:
            label += f": macro {sum(by_task[task].mean for task in common) / len(common):+.1f} %"
        places = [tasks.index(task) + width * (number - (len(found) - 1) / 2) for task in by_task]
        bars(axis, places, list(by_task.values()), 0.9 * width, method, label)
    axis.axhline(0, color="#333333", linewidth=0.8)
    axis.set_xticks(range(len(tasks)), tasks, rotation=_rotation(tasks), ha="right" if _rotation(tasks) else "center")
    axis.set_ylabel(measured.score.gain)
    over = f"; macro over {len(common)} of {len(tasks)} tasks" if 0 < len(common) < len(tasks) else ""
    axis.set_title(f"After fine-tuning at ε = {epsilon:g}{over}")
    figure.legend(loc="outside lower center", ncols=len(found))
    return figure


def _rotation(labels: Sequence[str]) -> int:
    return 40 if len(labels) > 4 and max(map(len, labels)) > 8 else 0


def figure_reduction(measured: Measurements):
    """Perplexity reduction against uniform at every epsilon, before and after fine-tuning (DP-MixMin paper, 5.2)."""
    methods = [method for method in measured.methods if method not in ("none", "uniform")]
    figure, axes = new(WIDTH, 3.5, 1, 2, sharey=True)
    found = {
        (stage, method, epsilon): tables.reduction(comparison)
        for stage in (BEFORE, AFTER)
        for method in methods
        for epsilon in measured.epsilons
        if (comparison := tables.compare(measured, stage, epsilon, method, "uniform"))
    }
    drawn = [method for method in methods if any(method == key[1] for key in found)]
    width = 0.8 / max(1, len(drawn))
    for axis, stage, title in zip(axes[0], (BEFORE, AFTER), ("Before fine-tuning", "After fine-tuning"), strict=True):
        axis.set_title(title)
        if not any(stage == key[0] for key in found):
            say(axis, "nothing to compare with uniform")
            continue
        for number, method in enumerate(drawn):
            at = {e: found[stage, method, e] for e in measured.epsilons if (stage, method, e) in found}
            if not at:
                continue
            shift = width * (number - (len(drawn) - 1) / 2)
            places = [measured.epsilons.index(e) + shift for e in at]
            bars(axis, places, list(at.values()), 0.9 * width, method, NAMES[method])
        axis.axhline(0, color="#333333", linewidth=0.8)
        axis.set_xlim(-0.6, len(measured.epsilons) - 0.4)
        axis.set_xticks(range(len(measured.epsilons)), [f"{e:g}" for e in measured.epsilons])
        axis.set_xlabel("ε")
    axes[0, 0].set_ylabel(textwrap.fill(measured.score.gain, 32))
    _legend(figure, axes[0], [NAMES[method] for method in drawn])
    return figure


# -- mixture weights ------------------------------------------------------------------------------------------


def figure_weights(measured: Measurements):
    """Mixture weights of every task: what differs from uniform (private: smallest epsilon), and uniform as a line."""
    epsilon, names = measured.epsilons[0], list(measured.sources)

    def weights(task: str, method: str) -> dict[int, Stat]:
        found = (measured.scores("mixture", task, method, epsilon, f"weight_{name}") for name in names)
        return {i: Stat.of(scores.values()) for i, scores in enumerate(found) if scores}

    barred = ("proportional", "mixmin", "dp_mixmin")
    methods = [method for method in barred if any(weights(task, method) for task in measured.tasks)]
    tasks = [task for task in measured.tasks if any(weights(task, method) for method in methods)]
    columns = 1 if len(names) > 16 or len(tasks) < 2 else 2
    rows = max(1, math.ceil(len(tasks) / columns))
    figure, panels = new(WIDTH, 1.1 + 1.7 * rows, rows, columns, sharey=True)
    if not tasks:
        say(panels.flat[0], "no mixtures were measured")
        return figure
    width = 0.8 / len(methods)
    for panel in panels.flat[len(tasks) :]:
        panel.set_axis_off()
    for number, (panel, task) in enumerate(zip(panels.flat, tasks, strict=False)):
        if measured.score.over_tasks:
            panel.set_title(task)
        else:
            panel.margins(x=0.01)
        for place, method in enumerate(methods):
            found = weights(task, method)
            places = [i + width * (place - (len(methods) - 1) / 2) for i in found]
            label = NAMES[method] + (f", ε = {epsilon:g}" if method == "dp_mixmin" else "")
            bars(panel, places, list(found.values()), 0.9 * width, method, label)
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


def figure_tuning(settings: dict[str, Settings], score: Score):
    """Stand-in score of every fine-tuning candidate against its learning rate, one panel for methods tuned alike."""
    groups: list[list[str]] = []
    for method in [method for method in NAMES if method in settings and len(settings[method].curve)]:
        alike = [group for group in groups if settings[group[0]].same_as(settings[method])]
        if alike:
            alike[0].append(method)
        else:
            groups.append([method])
    columns = min(2, max(1, len(groups)))
    rows = max(1, math.ceil(len(groups) / columns))
    figure, panels = new(WIDTH, 0.9 + 2.4 * rows if groups else 1.5, rows, columns)
    if "mixture" in settings:
        figure.suptitle(describe_mixture(settings["mixture"]), fontsize=9, x=0.01, ha="left")
    for panel in panels.flat[len(groups) :]:
        panel.set_axis_off()
    if not groups:
        say(panels.flat[0], "Fine-tuning was not tuned: its settings were given in the config.")
    handles: dict[str, object] = {}
    for panel, group in zip(panels.flat, groups, strict=False):
        chosen = settings[group[0]]
        kept = "" if chosen.chosen["choice"] else ": chosen not to fine-tune"
        panel.set_title("\n".join(_lines_of(", ".join(NAMES[method] for method in group) + kept)))
        _candidates(panel, chosen, COLOURS[group[0]] if len(group) == 1 else "#333333", score)
        handles |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    return figure


def _candidates(panel, settings: Settings, colour: str, score: Score) -> None:
    from matplotlib.lines import Line2D

    tried = settings.candidates().drop_nulls("learning_rate")
    shown, beyond = _on_scale(tried, settings.stay_score(), score)
    steps = sorted(set(tried["steps"]))
    for marker, count in zip("osD^v<>p*hX" * len(steps), steps, strict=False):
        chosen = shown.filter(shown["steps"] == count)
        panel.plot(chosen["learning_rate"], chosen["score"], marker, color=colour, alpha=0.85, markersize=5)
        panel.add_line(Line2D([], [], marker=marker, color="#555555", linestyle="", label=f"{count} steps"))
    choice, best = settings.chosen["choice"], settings.chosen_score()
    if choice and best is not None:
        circle = {"marker": "o", "markersize": 12, "markerfacecolor": "none", "markeredgecolor": "#D55E00"}
        panel.plot([choice["learning_rate"]], [best], linestyle="", markeredgewidth=1.6, label="chosen", **circle)
    if len(tried):
        rates = sorted(set(tried["learning_rate"]))
        panel.set_xscale("log")
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
        panel.set_xlim(rates[0] / 1.3, rates[-1] * 1.3) if beyond else None
        panel.minorticks_off()
        panel.margins(x=0.08, y=0.15)
    notes = [f"{beyond} candidate{'s' * (beyond != 1)} off the scale"] if beyond else []
    stay = settings.stay_score()
    if stay is not None and _far_worse(stay, list(shown["score"]), score):
        notes.append(f"do not fine-tune: {score.number(stay)}")
    elif stay is not None:
        panel.axhline(stay, color="#333333", linestyle="--", linewidth=1, label="do not fine-tune", zorder=1)
    if notes:
        arrow, edge, y = ("↓", "bottom", 0.02) if score.higher_is_better else ("↑", "top", 0.98)
        text = "\n".join(f"{arrow} {note}" for note in notes)
        panel.annotate(text, (0.99, y), xycoords="axes fraction", ha="right", va=edge, fontsize=8)
    panel.set_xlabel("learning rate")
    panel.set_ylabel(f"mean stand-in {score.name}")


def _on_scale(tried, stay: float | None, score: Score):
    """Return the candidates that can be drawn, and how many diverged: a wild perplexity would flatten the others."""
    finite = tried.filter(tried["score"].is_finite())
    if score.higher_is_better or not len(finite):
        return finite, 0
    level = min(finite["score"].min(), stay or math.inf)
    shown = finite.filter(finite["score"] <= FLAT * level)
    return shown, len(tried) - len(shown)


def _far_worse(stay: float, scores: list[float], score: Score) -> bool:
    """Say whether `do not fine-tune` is so far from all candidates that its line would flatten them."""
    if not scores:
        return False
    if score.higher_is_better:
        return stay < min(scores) - 2 * (max(scores) - min(scores)) - 0.02
    return stay > FLAT * max(scores)
