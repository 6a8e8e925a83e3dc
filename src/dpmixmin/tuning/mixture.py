"""Trying the mixture learner's settings on stand-ins, of any kind of data."""

from __future__ import annotations

import itertools

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

COLUMNS = {"clip": pa.float64(), "steps": pa.int64(), "learning_rate": pa.float64(), "standin_task": pa.string(),
           "repeat": pa.int64(), "excess_loss": pa.float64(), "l1": pa.float64()}  # fmt: skip


def try_candidates(
    config: Config, number: int, name: str, mixing: SourceTable, train: SourceTable, test: SourceTable
) -> list[dict]:
    """Return one row for every candidate and repeat on one stand-in task.

    Args:
        config: candidates and the run's nominal sizes.
        number: of the stand-in, for its seeds.
        name: of the stand-in, for people.
        mixing: what the private learner reads.
        train: what the non-private optimum is taken on.
        test: where the excess loss is measured.
    """
    grid, rows = config.tune.mixture, []
    reference = learn_nonprivate(train).weights
    best = mean_loss(test, reference)
    clips = (1.0,) if config.mixture.learner == "responsibilities" else grid.clip
    for clip, steps, rate in itertools.product(clips, grid.steps, grid.learning_rate):
        spec = mixture_spec(config, MixtureSettings(clip=clip, steps=steps, learning_rate=rate), config.tune.epsilon)
        for repeat in range(grid.repeats):
            noise = InsecureNoise(config.tune.seed, f"stand-in {number} {clip} {steps} {rate} {repeat}")
            # Stand-in units of one record (labels) have no names, and nothing to choose among.
            limit = None if mixing.names is None else config.private.records_per_step
            weights = learn(config.mixture.learner, mixing, spec, rate, noise, limit).weights
            rows.append({"clip": clip, "steps": steps, "learning_rate": rate, "standin_task": name,
                         "repeat": repeat, "excess_loss": mean_loss(test, weights) - best,
                         "l1": closeness(weights, reference)["l1"]})  # fmt: skip
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
