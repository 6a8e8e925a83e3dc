"""The score of an experiment: what is measured, how it is written, which direction is good and how it is compared.

Labels are scored by AUC, averaged over tasks and compared by differences. Texts are scored by perplexity on the one
task: lower is better, and perplexities are compared as ratios, with standard errors on the log scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpmixmin.config import Config

if TYPE_CHECKING:
    from dpmixmin.report.tables import Stat


@dataclass(frozen=True)
class Score:
    """What the numbers of a report are.

    Attributes:
        metric: its name in the long table.
        name: in words, without a part of the data: ``AUC``.
        label: in words: ``test AUC``.
        plural: of ``label``.
        per_unit: metric that averages over units first, or None where there is none.
        higher_is_better: its direction.
        over_tasks: scores of several tasks are averaged (the *macro* score), and sentences name the tasks.
        base: method that gains are given against.
        gain: a gain in words, with its unit.
        figure: name of the figure of scores against epsilon.
    """

    metric: str
    name: str
    label: str
    plural: str
    per_unit: str | None
    higher_is_better: bool
    over_tasks: bool
    base: str
    gain: str
    figure: str

    @property
    def overall(self) -> str:
        """What methods are compared by."""
        return f"macro {self.label}" if self.over_tasks else self.label

    def digits(self, value: float) -> int:
        """Return how many decimals a value is shown with: three of an AUC, about four figures of a perplexity."""
        if self.higher_is_better:
            return 3
        return 2 if value < 100 else 1 if value < 1000 else 0

    def number(self, value: float | None, missing: str = "—") -> str:
        """Write a value."""
        if value is None:
            return missing
        return f"{value:.{self.digits(value)}f}" if value < 1e6 else f"{value:.2g}"

    def fine(self, value: float) -> str:
        """Write the score of a candidate: four decimals of an AUC, because candidates lie close together."""
        return f"{value:.4f}" if self.higher_is_better else self.number(value)

    def show(self, stat: Stat) -> str:
        """Write ``mean ± standard deviation``, or what exists of it."""
        spread = "" if stat.sd is None else f" ± {stat.sd:.{self.digits(stat.mean or 0)}f}"
        return self.number(stat.mean) + spread

    def best(self, values: Iterable[float | None]) -> float | None:
        """Return the best of the values that exist."""
        known = [value for value in values if value is not None]
        return (max if self.higher_is_better else min)(known, default=None)

    # -- comparisons ----------------------------------------------------------------------------------------
    def difference(self, first: float, second: float) -> float:
        """Return what standard errors are taken of: the difference of AUCs, the log-ratio of perplexities."""
        return first - second if self.higher_is_better else math.log(first / second)

    def change(self, first: float, second: float) -> str:
        """Write how the first differs from the second: ``+0.0123``, ``-14.6 %``."""
        return f"{first - second:+.4f}" if self.higher_is_better else f"{100 * (first / second - 1):+.1f} %"

    def error(self, error: float) -> str:
        """Write the standard error of a difference; that of a log-ratio in percent."""
        return f"{error:.4f}" if self.higher_is_better else f"{100 * error:.1f} %"

    def direction(self, difference: float) -> str:
        """Say the sign of a difference in words; where lower is better, which is the good one too."""
        if self.higher_is_better:
            return "higher" if difference > 0 else "lower"
        return "higher (worse)" if difference > 0 else "lower (better)"


AUC = Score(
    metric="auc",
    name="AUC",
    label="test AUC",
    plural="test AUCs",
    per_unit=None,
    higher_is_better=True,
    over_tasks=True,
    base="none",
    gain="AUC gain over no pretraining (%)",
    figure="figure_auc",
)
PERPLEXITY = Score(
    metric="perplexity",
    name="perplexity",
    label="test perplexity",
    plural="test perplexities",
    per_unit="perplexity_user",
    higher_is_better=False,
    over_tasks=False,
    base="uniform",
    gain="perplexity reduction against uniform (%)",
    figure="figure_perplexity",
)


def score_of(config: Config) -> Score:
    """Return the score of an experiment."""
    return PERPLEXITY if config.text is not None else AUC
