"""Trying the mixture learner's settings on stand-ins, of any kind of data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import numpy as np
import pyarrow as pa

from dpmixmin import artifacts, provenance
from dpmixmin.config import Config
from dpmixmin.data.fetch import say
from dpmixmin.mixing.learners import closeness, learn, learn_nonprivate
from dpmixmin.mixing.objective import SourceTable, mean_loss
from dpmixmin.paths import Paths
from dpmixmin.privacy.noise import InsecureNoise
from dpmixmin.sections import MixtureSettings
from dpmixmin.specs import mixture_spec
from dpmixmin.tuning import chosen_by
from dpmixmin.tuning.trials import Trials

COLUMNS = {"clip": pa.float64(), "steps": pa.int64(), "learning_rate": pa.float64(), "standin_task": pa.string(),
           "repeat": pa.int64(), "excess_loss": pa.float64(), "l1": pa.float64()}  # fmt: skip


def candidates(config: Config) -> list[tuple[float, int, float]]:
    """Return every candidate: clip, steps, step size."""
    grid = config.tune.mixture
    clips = (1.0,) if config.mixture.learner == "responsibilities" else grid.clip
    return list(itertools.product(clips, grid.steps, grid.learning_rate))


def try_candidates(
    config: Config,
    number: int,
    name: str,
    tables: Callable[[], tuple[SourceTable, SourceTable, SourceTable]],
    trials: Trials,
) -> list[dict]:
    """Return one row for every candidate and repeat on one stand-in task; a trial is a candidate.

    Args:
        config: candidates and the run's nominal sizes.
        number: of the stand-in, for its seeds.
        name: of the stand-in, for people.
        tables: gives what the private learner reads, what the non-private optimum is taken on, and where the excess
            loss is measured; called once, and only if some trial is left.
        trials: where finished ones are kept.
    """

    @cache
    def ground() -> tuple[SourceTable, SourceTable, np.ndarray, float]:
        mixing, train, test = tables()
        reference = learn_nonprivate(train).weights
        return mixing, test, reference, mean_loss(test, reference)

    def attempt(clip: float, steps: int, rate: float) -> list[dict]:
        mixing, test, reference, best = ground()
        spec = mixture_spec(config, MixtureSettings(clip=clip, steps=steps, learning_rate=rate), config.tune.epsilon)
        # Stand-in units of one record (labels) have no names, and nothing to choose among.
        limit = None if mixing.names is None else config.private.records_per_step
        found = []
        for repeat in range(config.tune.mixture.repeats):
            noise = InsecureNoise(config.tune.seed, f"stand-in {number} {clip} {steps} {rate} {repeat}")
            weights = learn(config.mixture.learner, mixing, spec, rate, noise, limit).weights
            found.append({"clip": clip, "steps": steps, "learning_rate": rate, "standin_task": name,
                          "repeat": repeat, "excess_loss": mean_loss(test, weights) - best,
                          "l1": closeness(weights, reference)["l1"]})  # fmt: skip
        return found

    rows = []
    for one in candidates(config):
        clip, steps, rate = one
        trial = {"stand-in": name, "candidate": f"clip {clip:g}, {steps} steps, step size {rate:g}"}
        rows += trials.result(trial, lambda one=one: attempt(*one))
    return rows


def write(config: Config, stage: str, rows: list[dict], parents: list[dict]) -> None:
    """Write the choice with its curve; without rows, what the config declares."""
    declared = config.mixture.settings is not None
    choice = config.mixture.settings if declared else _best(rows)
    say(f"mixture settings: clip {choice.clip:g}, {choice.steps} steps, step size {choice.learning_rate:g}")
    settings = {
        "chosen_by": chosen_by(config, declared=declared),
        "choice": choice.model_dump(),
        "epsilon": config.tune.epsilon,
    }
    curve = pa.Table.from_pylist(rows, schema=pa.schema(COLUMNS))
    manifest = artifacts.manifest(
        "tune_mixture",
        config=config.shown("tune_mixture"),
        code=provenance.code_digest(stage),
        parents=parents,
        seed=config.tune.seed,
    )
    files = {"settings.json": artifacts.json_bytes(settings), "curve.parquet": artifacts.parquet_bytes(curve)}
    artifacts.publish(Paths(config.experiment).settings("mixture"), files, manifest)


def _best(rows: list[dict]) -> MixtureSettings:
    """Return the candidate with the smallest mean L1 distance to the non-private weights.

    Half of it bounds the total variation between the two mixtures, which is what pretraining sees. The excess loss,
    also in the curve, is a poorer guide: a few records to which every proxy gives almost no probability decide it.
    """
    scores: dict[tuple, list[float]] = {}
    for row in rows:
        scores.setdefault((row["clip"], row["steps"], row["learning_rate"]), []).append(row["l1"])
    clip, steps, rate = min(scores, key=lambda candidate: float(np.mean(scores[candidate])))
    return MixtureSettings(clip=clip, steps=steps, learning_rate=rate)
