"""Settings that a tuning stage chose, with the scores of what it tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl


@dataclass(frozen=True)
class Settings:
    """Settings that were chosen, with the scores of all candidates (no rows if they were given in the config)."""

    chosen: dict[str, Any]
    curve: pl.DataFrame

    def candidates(self) -> pl.DataFrame:
        """Return the mean score of every candidate over stand-in tasks and repeats, in a fixed order.

        The mean is the one that the choice was made by: of perplexities, the geometric mean.
        """
        keys = [key for key in ("learning_rate", "steps", "batch", "clip") if key in self.curve.columns]
        metric = next(metric for metric in ("auc", "perplexity", "l1") if metric in self.curve.columns)
        mean = pl.col(metric).log().mean().exp() if metric == "perplexity" else pl.col(metric).mean()
        return self.curve.group_by(keys).agg(mean.alias("score")).sort(keys)

    def chosen_score(self) -> float | None:
        """Return the mean score of the choice, if it was tried."""
        for row in self.candidates().iter_rows(named=True):
            score = row.pop("score")
            if row == (self.chosen["choice"] or dict.fromkeys(row)):
                return score
        return None

    def stay_score(self) -> float | None:
        """Return the mean score of `do not fine-tune`, if it was tried."""
        rows = self.candidates().filter(pl.col("learning_rate").is_null())
        return rows["score"][0] if len(rows) else None

    def same_as(self, other: Settings) -> bool:
        """Say whether both were chosen alike from the same trials."""
        return self.chosen["choice"] == other.chosen["choice"] and self.candidates().equals(other.candidates())
