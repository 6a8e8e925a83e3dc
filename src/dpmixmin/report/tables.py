"""The tables of the report. Every number comes from the long table, looked up by :class:`Measurements`.

Two rules keep comparisons fair. A *macro* value averages over tasks within one seed, and only seeds that have all of
those tasks count. Methods are compared only on tasks that all of them have, and the tasks are named.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from dpmixmin.cells import TWICE
from dpmixmin.config import Config
from dpmixmin.report.score import Score, score_of

COLUMNS = {
    "experiment": pl.String, "task": pl.String, "method": pl.String, "learner": pl.String, "mechanism": pl.String,
    "epsilon": pl.Float64, "seed": pl.Int64, "stage": pl.String, "metric": pl.String, "value": pl.Float64,
}  # fmt: skip
"""The long table: what ``evaluate`` writes for each task, and ``summary.csv``."""

NAMES = {
    "none": "No pretraining",
    "uniform": "Uniform",
    "proportional": "Size-proportional",
    "mixmin": "MixMin (non-private)",
    "dp_mixmin": "DP-MixMin",
}
"""Method names for people."""

BEFORE, AFTER = "pretrained", "finetuned"
MACRO = "macro"
Scores = dict[Any, float]
"""Seed to value."""


def summary(parts: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """Join the measurements of all tasks into the long table, in a fixed order."""
    empty = pl.DataFrame(schema=COLUMNS)
    whole = pl.concat(
        [empty, *(part.select(pl.col(name).cast(kind) for name, kind in COLUMNS.items()) for part in parts)]
    )
    whole = whole.with_columns(pl.col(pl.String).fill_null(""))
    return whole.sort([name for name in COLUMNS if name != "value"])


@dataclass(frozen=True)
class Stat:
    """Mean over seeds, sample standard deviation (None below two seeds) and number of seeds."""

    mean: float | None
    sd: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Stat:
        """Summarise values."""
        found = list(values)
        if not found:
            return cls(None, None, 0)
        return cls(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))

    def text(self, digits: int = 3) -> str:
        """Return ``mean ± sd``, or what exists of it."""
        if self.mean is None:
            return "—"
        return f"{self.mean:.{digits}f}" + ("" if self.sd is None else f" ± {self.sd:.{digits}f}")


class Measurements:
    """Looks up measurements by cell.

    Attributes:
        config: the experiment.
        score: what is measured.
        rows: the long table.
        tasks: the config's tasks.
        sources: the public sources that have a weight (all of the config's where no weights were measured).
        methods: the config's methods, in the order of ``NAMES``.
        epsilons: the config's epsilons, ascending.
    """

    def __init__(self, config: Config, rows: pl.DataFrame):
        self.config, self.rows, self.score = config, rows, score_of(config)
        self.tasks = config.task_names
        weighed = set(rows["metric"].unique())
        self.sources = tuple(name for name in config.sources if f"weight_{name}" in weighed) or config.sources
        self.methods = tuple(method for method in NAMES if method in config.methods)
        self.epsilons = tuple(sorted(config.privacy.epsilons))
        self._found: dict[tuple, Scores] = {}
        for row in rows.iter_rows(named=True):
            if row["value"] is None or not math.isfinite(row["value"]):
                continue
            twice = row["mechanism"].endswith(TWICE)
            key = (row["stage"], row["metric"], row["task"], row["method"], row["epsilon"], twice)
            self._found.setdefault(key, {})[row["seed"]] = row["value"]

    def scores(
        self,
        stage: str,
        task: str,
        method: str,
        epsilon: float | None,
        metric: str | None = None,
        twice: bool = False,
    ) -> Scores:
        """Return the values of one cell by seed; where a method has no epsilon, they serve every epsilon.

        Without a metric, the values of the experiment's score.
        """
        metric = metric or self.score.metric
        exact = self._found.get((stage, metric, task, method, epsilon, twice))
        return exact or self._found.get((stage, metric, task, method, None, twice), {})

    def macro(
        self, stage: str, tasks: Sequence[str], method: str, epsilon: float | None, metric: str | None = None
    ) -> Scores:
        """Return the unweighted mean over tasks, for the seeds that have all of them."""
        by_task = [self.scores(stage, task, method, epsilon, metric) for task in tasks]
        seeds = set.intersection(*(set(scores) for scores in by_task)) if by_task else set()
        return {seed: statistics.fmean(scores[seed] for scores in by_task) for seed in sorted(seeds, key=str)}

    def rows_of_tables(self) -> tuple[str, ...]:
        """Return the tasks, and the macro row where scores are averaged over tasks."""
        return (*self.tasks, MACRO) if self.score.over_tasks else self.tasks

    def shared_tasks(self, stage: str, methods: Iterable[str], epsilons: Iterable[float]) -> tuple[str, ...]:
        """Return the tasks that all these methods have at all these epsilons."""
        pairs = [(method, epsilon) for method in methods for epsilon in epsilons]
        return tuple(t for t in self.tasks if pairs and all(self.scores(stage, t, *pair) for pair in pairs))

    def present_methods(self, stage: str, epsilon: float) -> tuple[str, ...]:
        """Return the methods that have any score at a stage and epsilon."""
        return tuple(m for m in self.methods if any(self.scores(stage, task, m, epsilon) for task in self.tasks))

    def smallest_epsilon(self, stage: str = AFTER) -> float:
        """Return the smallest epsilon that was measured at a stage (or asked for, if none was)."""
        return next((e for e in self.epsilons if self.present_methods(stage, e)), self.epsilons[0])


# -- fair comparisons -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """Macro scores that may be compared across methods and epsilons.

    Attributes:
        tasks: what every macro score averages over.
        epsilons: epsilons that were measured.
        stats: (method, epsilon) to macro score over seeds.
        left_out: methods that lack some epsilon on every task.
        named: tasks are named where the view is described.
    """

    tasks: tuple[str, ...]
    epsilons: tuple[float, ...]
    stats: dict[tuple[str, float], Stat]
    left_out: tuple[str, ...]
    named: bool

    def methods(self) -> tuple[str, ...]:
        """Return the methods in the view."""
        return tuple(dict.fromkeys(method for method, _ in self.stats))

    def describe(self) -> str:
        """Say which tasks (where there are several to average over) and how many seeds."""
        counts = sorted({stat.n for stat in self.stats.values()})
        if not counts:
            return "no task has all methods at all epsilons" if self.named else "nothing was measured"
        if counts[0] == counts[-1]:
            seeds = f"{counts[0]} seed{'s' * (counts[0] != 1)}"
        else:
            seeds = f"{counts[0]} to {counts[-1]} seeds"
        return f"{name_tasks(self.tasks)}, {seeds}" if self.named else seeds


def view(measured: Measurements, stage: str, methods: Sequence[str]) -> View:
    """Return macro scores on the tasks that all methods have at all measured epsilons."""
    epsilons = tuple(e for e in measured.epsilons if measured.present_methods(stage, e))
    having = [m for m in methods if any(measured.scores(stage, t, m, e) for t in measured.tasks for e in epsilons)]
    kept = [m for m in having if measured.shared_tasks(stage, [m], epsilons)]
    tasks = measured.shared_tasks(stage, kept, epsilons)
    stats = {(m, e): Stat.of(measured.macro(stage, tasks, m, e).values()) for m in kept for e in epsilons if tasks}
    left_out = tuple(m for m in having if m not in kept)
    return View(tasks, epsilons, stats, left_out, measured.score.over_tasks)


def name_tasks(tasks: Sequence[str]) -> str:
    """Name a set of tasks shortly: ``2 tasks (odd, prime)``."""
    count = f"{len(tasks)} task{'s' * (len(tasks) != 1)}"
    return f"{count} ({', '.join(tasks)})" if len(tasks) <= 4 else count


@dataclass(frozen=True)
class Comparison:
    """One score against another, on the tasks and seeds that both have.

    Attributes:
        score: what is compared.
        stage: before or after fine-tuning (of the first).
        epsilon: privacy target.
        tasks: the common tasks.
        seeds: number of common seeds.
        first: mean over the common seeds of the (macro) score.
        second: that of the other.
        difference: mean over seeds of first minus second; for perplexities, of the log of first over second.
        error: standard error of the difference over seeds; None with one seed.
    """

    score: Score
    stage: str
    epsilon: float
    tasks: tuple[str, ...]
    seeds: int
    first: float
    second: float
    difference: float
    error: float | None

    def change(self) -> str:
        """Write how the first differs from the second."""
        return self.score.change(self.first, self.second)

    def reading(self) -> str:
        """Say in words whether the 95 % t-interval over seeds excludes zero."""
        from scipy.stats import t

        if self.error is None:
            return "one seed"
        if abs(self.difference) <= t.ppf(0.975, self.seeds - 1) * self.error:
            return "no clear difference"
        return f"clearly {self.score.direction(self.difference)}"


def compare(measured: Measurements, stage: str, epsilon: float, first: str, second: str) -> Comparison | None:
    """Compare two methods; None where they share no task or no seed."""
    tasks = measured.shared_tasks(stage, (first, second), (epsilon,))
    a, b = (measured.macro(stage, tasks, method, epsilon) for method in (first, second))
    return _paired(measured.score, stage, epsilon, tasks, a, b)


def finetuning(measured: Measurements, method: str, epsilon: float) -> Comparison | None:
    """Compare a method after fine-tuning with itself before; None where no task or seed has both."""
    tasks = tuple(task for task in measured.shared_tasks(AFTER, (method,), (epsilon,))
                  if measured.scores(BEFORE, task, method, epsilon))  # fmt: skip
    after, before = (measured.macro(stage, tasks, method, epsilon) for stage in (AFTER, BEFORE))
    return _paired(measured.score, AFTER, epsilon, tasks, after, before)


def _paired(
    score: Score, stage: str, epsilon: float, tasks: tuple[str, ...], a: Scores, b: Scores
) -> Comparison | None:
    seeds = [seed for seed in a if seed in b]
    if not seeds:
        return None
    difference = Stat.of(score.difference(a[seed], b[seed]) for seed in seeds)
    error = None if difference.sd is None else difference.sd / math.sqrt(difference.n)
    means = (statistics.fmean(scores[seed] for seed in seeds) for scores in (a, b))
    return Comparison(score, stage, epsilon, tasks, len(seeds), *means, difference.mean, error)


def reduction(comparison: Comparison) -> Stat:
    """Return by how many percent the first perplexity is below the second, with its deviation over paired seeds."""
    ratio, n = comparison.first / comparison.second, comparison.seeds
    sd = None if comparison.error is None else 100 * ratio * comparison.error * math.sqrt(n)
    return Stat(100 * (1 - ratio), sd, n)


def relative_gain(method: Stat, base: Stat) -> Stat:
    """Return the gain over a base in percent, with the standard deviations that are known propagated."""
    if method.mean is None or not base.mean:
        return Stat(None, None, 0)
    ratio = method.mean / base.mean
    known = [stat.sd / stat.mean for stat in (method, base) if stat.sd is not None and stat.mean]
    return Stat(100 * (ratio - 1), 100 * ratio * math.hypot(*known) if known else None, min(method.n, base.n))


# -- files ----------------------------------------------------------------------------------------------------


def table(measured: Measurements) -> pl.DataFrame:
    """Return the paper-style table: one row per task, method and epsilon, then the macro rows.

    ``before_tasks`` and ``after_tasks`` say what a row averages over: in a macro row, the tasks that all methods
    measured at this epsilon have. Texts have one task and no macro rows, and ``before_user_mean`` and so on for the
    perplexity averaged over units.
    """
    metrics = {"": None} | ({"_user": measured.score.per_unit} if measured.score.per_unit else {})
    shared = {
        (stage, epsilon): measured.shared_tasks(stage, measured.present_methods(stage, epsilon), [epsilon])
        for stage in (BEFORE, AFTER)
        for epsilon in measured.epsilons
    }
    rows = []
    for task in measured.rows_of_tables():
        for method in measured.methods:
            for epsilon in measured.epsilons:
                row: dict[str, Any] = {"task": task, "method": method, "epsilon": epsilon}
                for stage, name in ((BEFORE, "before"), (AFTER, "after")):
                    tasks = shared[stage, epsilon] if task == MACRO else (task,)
                    for suffix, metric in metrics.items():
                        stat = Stat.of(measured.macro(stage, tasks, method, epsilon, metric).values())
                        key = name + suffix
                        row |= {f"{key}_mean": stat.mean, f"{key}_sd": stat.sd, f"{key}_n": stat.n}
                    row[f"{name}_tasks"] = " ".join(tasks) if row[f"{name}_n"] else ""
                rows.append(row)
    numbers = {f"{name}{suffix}_{part}": pl.Int64 if part == "n" else pl.Float64
               for name in ("before", "after") for suffix in metrics for part in ("mean", "sd", "n")}  # fmt: skip
    return pl.DataFrame(rows, schema_overrides=numbers)


def mixtures(measured: Measurements) -> pl.DataFrame:
    """Return how close mixtures are to the non-private ones: the public ones as reference, then DP-MixMin per epsilon.

    Mean and standard deviation are over all tasks and seeds.
    """
    rows = []
    public = [("uniform", None), ("proportional", None)]
    for method, epsilon in [*public, *(("dp_mixmin", epsilon) for epsilon in measured.epsilons)]:
        row: dict[str, Any] = {"method": method, "epsilon": epsilon}
        for metric in ("cosine", "l1"):
            found = [measured.scores("mixture", task, method, epsilon, metric) for task in measured.tasks]
            stat = Stat.of(value for scores in found for value in scores.values())
            row |= {f"{metric}_mean": stat.mean, f"{metric}_sd": stat.sd, "n": stat.n}
        if row["n"]:
            rows.append(row)
    names = ("cosine_mean", "cosine_sd", "l1_mean", "l1_sd")
    schema = {"method": pl.String, "epsilon": pl.Float64, **dict.fromkeys(names, pl.Float64), "n": pl.Int64}
    return pl.DataFrame(rows, schema=schema)


def epochs(measured: Measurements) -> pl.DataFrame:
    """Return how often pretraining read each public source; no rows where that was not counted.

    One row per source and per method that pretrains (DP-MixMin: and per epsilon), mean and standard deviation over
    seeds. The rows of source ``""`` hold the tokens read in all.
    """
    rows = []
    for method, epsilon in mixture_columns(measured):
        for source in (*measured.sources, ""):
            metric = f"epochs_{source}" if source else "tokens"
            found = [measured.scores(BEFORE, task, method, epsilon, metric) for task in measured.tasks]
            stat = Stat.of(value for scores in found for value in scores.values())
            if stat.n:
                rows.append({"method": method, "epsilon": epsilon, "source": source, "mean": stat.mean,
                             "sd": stat.sd, "n": stat.n})  # fmt: skip
    schema = {"method": pl.String, "epsilon": pl.Float64, "source": pl.String, "mean": pl.Float64, "sd": pl.Float64,
              "n": pl.Int64}  # fmt: skip
    return pl.DataFrame(rows, schema=schema)


def mixture_columns(measured: Measurements) -> list[tuple[str, float | None]]:
    """Return the methods that pretrain; DP-MixMin once for every epsilon."""
    return [(method, epsilon) for method in measured.methods if method != "none"
            for epsilon in (measured.epsilons if method == "dp_mixmin" else (None,))]  # fmt: skip


def twice(measured: Measurements) -> pl.DataFrame:
    """Return the check with twice the fine-tuning steps, on the seeds that have both; no rows if it was not run."""
    rows = []
    for task in measured.tasks:
        for method in measured.methods:
            for epsilon in measured.epsilons:
                once = measured.scores(AFTER, task, method, epsilon)
                double = measured.scores(AFTER, task, method, epsilon, twice=True)
                seeds = [seed for seed in once if seed in double]
                if seeds:
                    a, b = (Stat.of(scores[seed] for seed in seeds) for scores in (once, double))
                    rows.append({"task": task, "method": method, "epsilon": epsilon, "chosen_mean": a.mean,
                                 "twice_mean": b.mean, "difference": b.mean - a.mean, "n": len(seeds)})  # fmt: skip
    names = ("epsilon", "chosen_mean", "twice_mean", "difference")
    schema = {"task": pl.String, "method": pl.String, **dict.fromkeys(names, pl.Float64), "n": pl.Int64}
    return pl.DataFrame(rows, schema=schema)
