"""The sentences of the report and ``summary.txt``, in plain words, from the config and the measurements."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

import polars as pl

from dpmixmin.config import Config
from dpmixmin.paths import Paths
from dpmixmin.report import audits, tables
from dpmixmin.report.score import Score
from dpmixmin.report.settings import Settings
from dpmixmin.report.tables import AFTER, BEFORE, NAMES, Comparison, Measurements, Stat

NOT_PRIVATE = (
    "NOT PRIVATE: the noise of this run was drawn from a test seed (privacy.insecure_seed), so none of its outputs "
    "is protected. With the operating system's randomness the statement would be:"
)
ONLY_RELEASE = "Each cell is stated as if it were the only release."

_WEIGHTS = (
    "Mixture weights over the public sources, mean and standard deviation over seeds; the line is the uniform mixture."
)
CAPTIONS = {
    "auc": {
        "figure_auc": "Macro test AUC against ε; error bars are standard deviations over seeds where there are "
        "several; the y axes differ, and an untrained network (chance) is left out of the left panel.",
        "figure_gain": "Relative test AUC gain over no pretraining after fine-tuning, per task; hatched bars are not "
        "private; error bars are propagated standard deviations, in which a score with one seed counts as exact.",
        "figure_weights": _WEIGHTS,
        "figure_tuning": "Mean AUC of every fine-tuning candidate on public stand-in tasks; the chosen one is "
        "circled.",
    },
    "perplexity": {
        "figure_perplexity": "Test perplexity per token (lower is better) against ε; error bars are standard "
        "deviations over seeds where there are several; an untrained network, near the size of the vocabulary, is "
        "left out where it would flatten the lines.",
        "figure_gain": "Relative test perplexity reduction against uniform (higher is better); hatched bars are not "
        "private; error bars are standard deviations of the ratio over the seeds that both methods have.",
        "figure_weights": _WEIGHTS,
        "figure_tuning": "Geometric mean perplexity of every fine-tuning candidate on public stand-in tasks (lower is "
        "better); the chosen one is circled, and diverged ones are counted.",
    },
}
"""By metric: one sentence a figure, in the order of the page."""


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
        how = (
            "the mixture and the fine-tuning read disjoint parts, so the guarantee of the whole chain is the larger "
            "of the two."
            if config.privacy.composition == "parallel"
            else "the mixture and the fine-tuning read the same units and share epsilon."
        )
        text = f"Each DP-MixMin model is {private} for adding or removing {what}: {how}"
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
        if c.score.over_tasks:
            where, change = f", on {tables.name_tasks(c.tasks)}", f"a difference of {c.change()}"
        else:
            where, change = "", c.change()
        sentences.append(
            f"{words} fine-tuning at ε = {c.epsilon:g}{where}: {c.score.overall} {c.score.number(c.first)} "
            f"for DP-MixMin and {c.score.number(c.second)} for Uniform, {change}{_result(c, 'DP-MixMin is ')}."
        )
    return sentences


def _result(c: Comparison, subject: str) -> str:
    """Say the standard error and the reading; a clear one gets its subject."""
    error = "" if c.error is None else f" (standard error {c.score.error(c.error)} over {c.seeds} seeds)"
    return f"{error}: {subject if c.reading().startswith('clearly') else ''}{c.reading()}"


def finetuning(measured: Measurements) -> list[str]:
    """Say what private fine-tuning adds to DP-MixMin, and to uniform where there is no DP-MixMin."""
    method = "dp_mixmin" if "dp_mixmin" in measured.methods else "uniform"
    found = [tables.finetuning(measured, method, epsilon) for epsilon in measured.epsilons]
    return [
        f"Private fine-tuning at ε = {c.epsilon:g} takes {NAMES[method]}'s {c.score.label} from "
        f"{c.score.number(c.second)} to {c.score.number(c.first)}, {c.change()}{_result(c, 'it is ')}."
        for c in found
        if c
    ]


def about_texts(measured: Measurements) -> list[str]:
    """Say what the numbers of a text experiment are: test records, means per unit, the objective, what is missing."""
    config, unit = measured.config, measured.config.private.unit
    if unit == "record":
        tested = f"Test records are records of {config.private.name} that are in no other part."
    else:
        tested = (
            f"Test records are all records of those {config.private.name} units ({unit}) that are in no other part: "
            "no text of theirs was used for a mixture or for fine-tuning."
        )
    sentences = [
        tested,
        "Perplexity per token is exp of the mean loss over all tokens of these records. Averaged per "
        f"{unit}, each {unit} counts the same: it is exp of the mean of each {unit}'s mean loss. Both depend on the "
        "tokenizer, so compare them within this page only.",
    ]
    if {"mixmin", "dp_mixmin"} & set(config.methods):
        sentences.append(
            "The mixture was learned on the token objective, which mixes every next-token distribution: a convex "
            "surrogate, not the reduction for drawing whole documents from the sources."
            if config.mixture.objective == "token"
            else "The mixture was learned on the sequence objective, the reduction for drawing whole documents from "
            "the sources."
        )
    if missing := [name for name in config.sources if name not in measured.sources]:
        sentences.append(f"Sources that could not be had, and were left out: {', '.join(missing)}.")
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


def describe_settings(name: str, settings: Settings, score: Score) -> str:
    """Say one choice and how it was made."""
    if name == "mixture":
        return describe_mixture(settings)
    choice, best, stay = settings.chosen["choice"], settings.chosen_score(), settings.stay_score()
    if choice is None:
        text = "do not fine-tune: the model is kept as pretrained"
    else:
        text = (
            f"learning rate {choice['learning_rate']:g}, {choice['steps']} steps, batch {choice['batch']}, "
            f"clip {choice['clip']:g}"
        )
    if settings.chosen["chosen_by"] == "user_declared":
        return f"{NAMES[name]}: {text}, given in the config"
    scores = [f"mean stand-in {score.name} {score.fine(best)}"] if best is not None else []
    scores += [f"without fine-tuning {score.fine(stay)}"] if stay is not None and choice else []
    return f"{NAMES[name]}: {text}" + (f" ({', '.join(scores)})" if scores else "")


# -- summary.txt ----------------------------------------------------------------------------------------------


def summary_text(measured: Measurements, findings: pl.DataFrame | None = None) -> str:
    """Return what the terminal shows at the end of a run; at most 100 columns (paths may be longer)."""
    config, score, epsilon = measured.config, measured.score, measured.smallest_epsilon()
    what = f"{score.label} at epsilon = {epsilon:g}, before -> after fine-tuning, mean over seeds"
    lines = [*textwrap.wrap(f"{config.experiment}: {what}", 100), ""]
    cells = {(row["task"], row["method"], row["epsilon"]): row for row in tables.table(measured).rows(named=True)}
    rows = [_heads("task", measured.methods)]
    for task in measured.rows_of_tables():
        rows.append([task, *(_change(cells[task, method, epsilon], score) for method in measured.methods)])
    lines += _aligned(rows)
    uneven = {m for (_, m, e), row in cells.items() if e == epsilon and 0 < row["after_n"] < row["before_n"]}
    if uneven:
        names = ", ".join(NAMES[method] for method in measured.methods if method in uneven)
        lines += textwrap.wrap(f"fewer seeds after than before fine-tuning (n in table.csv): {names}", 100)
    for stage, words in ((BEFORE, "before"), (AFTER, "after")) if score.over_tasks else ():
        shared = measured.shared_tasks(stage, measured.present_methods(stage, epsilon), [epsilon])
        if shared and shared != measured.tasks:
            lines += textwrap.wrap(
                f"macro {words} fine-tuning: {tables.name_tasks(shared)}, those of all methods", 100
            )
    for stage, words in ((BEFORE, "before"), (AFTER, "after")):
        shown = tables.view(measured, stage, measured.methods)
        what = f"macro {score.name}" if score.over_tasks else score.label
        lines += ["", *textwrap.wrap(f"{what} {words} fine-tuning by epsilon, mean (sd): {shown.describe()}", 100)]
        lines += (
            [f"not shown, lacks an epsilon: {', '.join(map(NAMES.get, shown.left_out))}"] if shown.left_out else []
        )
        rows = [_heads("epsilon", shown.methods())]
        for e in shown.epsilons if shown.stats else ():
            rows.append([f"{e:g}", *(_spread(shown.stats[method, e], score) for method in shown.methods())])
        lines += _aligned(rows) if shown.stats else []
    if score.per_unit:
        lines += ["", f"{score.label} averaged per {config.private.unit} by epsilon, before -> after fine-tuning"]
        rows = [_heads("epsilon", measured.methods)]
        for e in measured.epsilons:
            found = [cells[task, method, e] for task in measured.tasks for method in measured.methods]
            rows.append([f"{e:g}", *(_change(row, score, "_user") for row in found)])
        lines += _aligned(rows)
        lines.append("")
        for sentence in (*headline(comparisons(measured)), *finetuning(measured)):
            whole = sentence.replace("ε = ", "epsilon = ").replace(" %", "\u00a0%")  # no line starts with a `%`
            wrapped = textwrap.wrap(whole, 100, subsequent_indent="  ", break_on_hyphens=False)
            lines += [line.replace("\u00a0", " ") for line in wrapped]
    if findings is not None:
        lines += ["", *audits.lines(findings, config.mode)]
    folder = Paths(config.experiment).report()
    warning = [NOT_PRIVATE] if config.privacy.insecure_seed is not None else []
    lines += ["", *(line for text in (*warning, guarantee(config)) for line in textwrap.wrap(text, 100)), ""]
    lines += [f"page     {folder}/index.html", *(f"figure   {folder}/{name}.png" for name in CAPTIONS[score.metric])]
    return "\n".join(lines) + "\n"


def _change(row: dict, score: Score, suffix: str = "") -> str:
    before, after = (score.number(row[f"{stage}{suffix}_mean"], "-") for stage in ("before", "after"))
    return f"{before} -> {after}"


def _spread(stat: Stat, score: Score) -> str:
    sd = "" if stat.sd is None or stat.mean is None else f" ({stat.sd:.{score.digits(stat.mean)}f})"
    return score.number(stat.mean, "-") + sd


def _heads(first: str, methods: Iterable[str]) -> list[str]:
    return [first, *(NAMES[method].replace(" (", "|(").replace("Size-", "Size-|") for method in methods)]


def _aligned(rows: list[list[str]]) -> list[str]:
    """Align rows in columns; a ``|`` in a heading breaks it over two lines."""
    heads = [head.split("|") for head in rows[0]]
    rows = [*([[*head, ""][i] if i < 2 else "" for head in heads] for i in (0, 1)), *rows[1:]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    widths[0] = min(widths[0], 28, max(8, 100 - sum(2 + width for width in widths[1:])))
    rows = [[row[0] if len(row[0]) <= widths[0] else row[0][: widths[0] - 1] + "~", *row[1:]] for row in rows]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [line for line in lines if line]
