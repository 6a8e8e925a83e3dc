"""The sentences of the report and ``summary.txt``, in plain words, from the config and the measurements."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

from dpmixmin.config import Config
from dpmixmin.paths import Paths
from dpmixmin.report import tables
from dpmixmin.report.tables import AFTER, BEFORE, MACRO, NAMES, Comparison, Measurements, Settings

NOT_PRIVATE = (
    "NOT PRIVATE: the noise of this run was drawn from a test seed (privacy.insecure_seed), so none of its outputs "
    "is protected. With the operating system's randomness the statement would be:"
)
ONLY_RELEASE = "Each cell is stated as if it were the only release."

CAPTIONS = {
    "figure_auc": "Macro test AUC against ε; error bars are standard deviations over seeds where there are several; "
    "the y axes differ, and an untrained network (chance) is left out of the left panel.",
    "figure_gain": "Relative test AUC gain over no pretraining after fine-tuning, per task; hatched bars are not "
    "private; error bars are propagated standard deviations, in which a score with one seed counts as exact.",
    "figure_weights": "Mixture weights over the public sources, mean and standard deviation over seeds; the line is "
    "the uniform mixture.",
    "figure_tuning": "Mean AUC of every fine-tuning candidate on public stand-in tasks; the chosen one is circled.",
}
"""One sentence a figure, in the order of the page."""


def join(words: Iterable[str], last: str) -> str:
    """Join words as in a sentence: ``1, 2 or 5``."""
    found = list(words)
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} {last} {found[-1]}"


def guarantee(config: Config) -> str:
    """Say in plain words what is guaranteed, from the config."""
    epsilons = join((f"{epsilon:g}" for epsilon in sorted(config.privacy.epsilons)), "or")
    whole, unit = config.private.name, config.private.unit
    what = f"one record of {whole}" if unit == "record" else f"all records of one {unit} of {whole}"
    private = f"(epsilon, delta)-differentially private with epsilon = {epsilons} and delta = {config.privacy.delta:g}"
    if "dp_mixmin" in config.methods:
        text = (
            f"Each DP-MixMin model is {private} for adding or removing {what}: the mixture and the fine-tuning read "
            "disjoint parts, so the guarantee of the whole chain is the larger of the two."
        )
    else:
        text = f"Each model fine-tuned with DP-SGD is {private} for adding or removing {what}."
    return f"{text} {ONLY_RELEASE}"


def spent(measured: Measurements) -> str:
    """Say the largest epsilon that the accountant counted for each target, rounded up."""
    parts = []
    for epsilon in measured.epsilons:
        cells = [measured.scores(AFTER, task, method, epsilon, "epsilon_spent")
                 for task in measured.tasks for method in measured.methods if method != "mixmin"]  # fmt: skip
        values = [value for scores in cells for value in scores.values()]
        if values:
            above = " (ABOVE ITS TARGET)" if max(values) > epsilon else ""
            parts.append(f"{math.ceil(max(values) * 1e4 - 1e-6) / 1e4:.4f} for a target of {epsilon:g}{above}")
    return f"Largest epsilon spent, as accounted: {join(parts, 'and')}." if parts else ""


def comparisons(measured: Measurements) -> list[Comparison]:
    """Return DP-MixMin against uniform before and after fine-tuning, at every epsilon where both exist."""
    found = (
        tables.compare(measured, stage, epsilon, "dp_mixmin", "uniform")
        for stage in (BEFORE, AFTER)
        for epsilon in measured.epsilons
    )
    return [comparison for comparison in found if comparison]


def headline(found: Sequence[Comparison]) -> list[str]:
    """Say the result at the smallest epsilon before and after fine-tuning, whatever it is."""
    sentences = []
    for stage, words in ((BEFORE, "Before"), (AFTER, "After")):
        here = [comparison for comparison in found if comparison.stage == stage]
        if not here:
            sentences.append(f"{words} fine-tuning there is nothing to compare.")
            continue
        c = here[0]
        result = f"DP-MixMin is {c.reading()}" if c.reading().startswith("clearly") else c.reading()
        error = "" if c.error is None else f" (standard error {c.error:.4f} over {c.seeds} seeds)"
        sentences.append(
            f"{words} fine-tuning at ε = {c.epsilon:g}, on {tables.name_tasks(c.tasks)}: macro test AUC {c.first:.3f} "
            f"for DP-MixMin and {c.second:.3f} for Uniform, a difference of {c.difference:+.4f}{error}: {result}."
        )
    return sentences


def describe_mixture(settings: Settings) -> str:
    """Say the settings of the mixture in one line."""
    choice, score = settings.chosen["choice"], settings.chosen_score()
    text = f"Mixture: clip {choice['clip']:g}, {choice['steps']} steps, learning rate {choice['learning_rate']:g}"
    if settings.chosen["chosen_by"] == "user_declared":
        return text + ", given in the config"
    return text + (
        "" if score is None else f" (mean L1 distance to the non-private weights on stand-ins: {score:.3f})"
    )


def describe_settings(name: str, settings: Settings) -> str:
    """Say one choice and how it was made."""
    if name == "mixture":
        return describe_mixture(settings)
    choice, score, stay = settings.chosen["choice"], settings.chosen_score(), settings.stay_score()
    if choice is None:
        text = "do not fine-tune: the model is kept as pretrained"
    else:
        text = (
            f"learning rate {choice['learning_rate']:g}, {choice['steps']} steps, batch {choice['batch']}, "
            f"clip {choice['clip']:g}"
        )
    if settings.chosen["chosen_by"] == "user_declared":
        return f"{NAMES[name]}: {text}, given in the config"
    scores = [f"mean stand-in AUC {score:.4f}"] if score is not None else []
    scores += [f"without fine-tuning {stay:.4f}"] if stay is not None and choice else []
    return f"{NAMES[name]}: {text}" + (f" ({', '.join(scores)})" if scores else "")


# -- summary.txt ----------------------------------------------------------------------------------------------


def summary_text(measured: Measurements) -> str:
    """Return what the terminal shows at the end of a run; at most 100 columns (paths may be longer)."""
    config, epsilon = measured.config, measured.smallest_epsilon()
    title = f"{config.experiment}: test AUC at epsilon = {epsilon:g}, before -> after fine-tuning, mean over seeds"
    lines = [*textwrap.wrap(title, 100), ""]
    cells = {(row["task"], row["method"], row["epsilon"]): row for row in tables.table(measured).rows(named=True)}
    rows = [_heads("task", measured.methods)]
    for task in (*measured.tasks, MACRO):
        found = [cells[task, method, epsilon] for method in measured.methods]
        rows.append([task, *(f"{_three(row['before_mean'])} -> {_three(row['after_mean'])}" for row in found)])
    lines += _aligned(rows)
    uneven = {m for (_, m, e), row in cells.items() if e == epsilon and 0 < row["after_n"] < row["before_n"]}
    if uneven:
        names = ", ".join(NAMES[method] for method in measured.methods if method in uneven)
        lines += textwrap.wrap(f"fewer seeds after than before fine-tuning (n in table.csv): {names}", 100)
    for stage, words in ((BEFORE, "before"), (AFTER, "after")):
        shared = measured.shared_tasks(stage, measured.present_methods(stage, epsilon), [epsilon])
        if shared and shared != measured.tasks:
            lines += textwrap.wrap(
                f"macro {words} fine-tuning: {tables.name_tasks(shared)}, those of all methods", 100
            )
    for stage, words in ((BEFORE, "before"), (AFTER, "after")):
        shown = tables.view(measured, stage, measured.methods)
        lines += ["", *textwrap.wrap(f"macro AUC {words} fine-tuning by epsilon, mean (sd): {shown.describe()}", 100)]
        lines += (
            [f"not shown, lacks an epsilon: {', '.join(map(NAMES.get, shown.left_out))}"] if shown.left_out else []
        )
        rows = [_heads("epsilon", shown.methods())]
        for e in shown.epsilons if shown.stats else ():
            stats = [shown.stats[method, e] for method in shown.methods()]
            rows.append([f"{e:g}", *(_three(s.mean) + ("" if s.sd is None else f" ({s.sd:.3f})") for s in stats)])
        lines += _aligned(rows) if shown.stats else []
    folder = Paths(config.experiment).report()
    warning = [NOT_PRIVATE] if config.privacy.insecure_seed is not None else []
    lines += ["", *(line for text in (*warning, guarantee(config)) for line in textwrap.wrap(text, 100)), ""]
    lines += [f"page     {folder}/index.html", *(f"figure   {folder}/{name}.png" for name in CAPTIONS)]
    return "\n".join(lines) + "\n"


def _three(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _heads(first: str, methods: Iterable[str]) -> list[str]:
    return [first, *(NAMES[method].replace(" (", "|(") for method in methods)]


def _aligned(rows: list[list[str]]) -> list[str]:
    """Align rows in columns; a ``|`` in a heading breaks it over two lines."""
    heads = [head.split("|") for head in rows[0]]
    rows = [*([[*head, ""][i] if i < 2 else "" for head in heads] for i in (0, 1)), *rows[1:]]
    rows = [[row[0] if len(row[0]) <= 28 else row[0][:27] + "~", *row[1:]] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [line for line in lines if line]
