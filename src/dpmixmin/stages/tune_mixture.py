"""Choose the mixture learner's clip, steps and step size on public stand-ins.

Chosen is the candidate whose weights come closest to the non-private ones of the same stand-in task.

Reads: the proxy, ``public/sources/standins``. Writes: ``public/settings/mixture/{settings.json,curve.parquet}``.
Touches nothing private: the noise of the trial runs is on public data, so it is seeded and reproducible.
"""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import torch

from dpmixmin import artifacts, provenance
from dpmixmin.cells import mixing_parts
from dpmixmin.config import Config
from dpmixmin.data.fetch import say
from dpmixmin.data.records import Records
from dpmixmin.mixing.learners import closeness, learn, learn_nonprivate
from dpmixmin.mixing.objective import mean_loss, source_probabilities
from dpmixmin.paths import Paths
from dpmixmin.privacy.noise import InsecureNoise
from dpmixmin.proxies.joint import axis_labels, load_proxy, source_predictions
from dpmixmin.sections import MixtureSettings
from dpmixmin.specs import mixture_spec
from dpmixmin.tuning import chosen_by
from dpmixmin.tuning.standins import stand_ins

COLUMNS = {"clip": pa.float64(), "steps": pa.int64(), "learning_rate": pa.float64(), "standin_task": pa.string(),
           "repeat": pa.int64(), "excess_loss": pa.float64(), "l1": pa.float64()}  # fmt: skip


def add_arguments(parser) -> None:
    """Nothing to add."""


def run(config: Config, args) -> None:
    """Try every candidate on every stand-in task and write the choice with its curve."""
    torch.set_num_threads(config.threads)
    paths = Paths(config.experiment)
    rows: list[dict] = []
    if config.mixture.settings is not None:
        choice, parents = config.mixture.settings, []
    else:
        parents = [artifacts.parent(paths.proxy()), artifacts.parent(paths.source("standins"))]
        rows = _try_all(config, paths)
        choice = _best(rows)
        say(f"mixture settings: clip {choice.clip:g}, {choice.steps} steps, step size {choice.learning_rate:g}")
    how = chosen_by(config, declared=config.mixture.settings is not None)
    settings = {"chosen_by": how, "choice": choice.model_dump(), "epsilon": config.tune.epsilon}
    curve = pa.Table.from_pylist(rows, schema=pa.schema(COLUMNS))
    manifest = artifacts.manifest(
        "tune_mixture",
        config=config.shown("tune_mixture"),
        code=provenance.code_digest("tune_mixture"),
        parents=parents,
        seed=config.tune.seed,
    )
    files = {"settings.json": artifacts.json_bytes(settings), "curve.parquet": artifacts.parquet_bytes(curve)}
    artifacts.publish(paths.settings("mixture"), files, manifest)


def _try_all(config: Config, paths: Paths) -> list[dict]:
    records = Records.read_public(paths.source("standins"))
    axes = axis_labels(records, config)
    proxy = load_proxy(paths.proxy(), records.features.shape[1], config)
    predictions = source_predictions(proxy, records.features)
    grid = config.tune.mixture
    rows = []
    for number, task in enumerate(stand_ins(records, axes, config, grid.tasks)):
        p = source_probabilities(predictions, task.labels)
        train = np.concatenate([task.mixing, task.finetune])
        mixing = np.concatenate([getattr(task, part) for part in mixing_parts(config)])
        reference = learn_nonprivate(p[train]).weights
        best = mean_loss(p[task.test], reference)
        clips = (1.0,) if config.mixture.learner == "responsibilities" else grid.clip
        for clip, steps, rate in itertools.product(clips, grid.steps, grid.learning_rate):
            spec = mixture_spec(
                config, MixtureSettings(clip=clip, steps=steps, learning_rate=rate), config.tune.epsilon
            )
            for repeat in range(grid.repeats):
                noise = InsecureNoise(config.tune.seed, f"stand-in {number} {clip} {steps} {rate} {repeat}")
                weights = learn(config.mixture.learner, p[mixing], spec, rate, noise).weights
                excess = mean_loss(p[task.test], weights) - best
                rows.append({"clip": clip, "steps": steps, "learning_rate": rate, "standin_task": task.name,
                             "repeat": repeat, "excess_loss": excess,
                             "l1": closeness(weights, reference)["l1"]})  # fmt: skip
    return rows


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
