"""Choose the mixture's settings on public stand-ins.

Every candidate is run privately, at ``tune.epsilon`` and the run's nominal size, on every stand-in task; the choice
is the candidate whose weights come closest to the non-private ones of the same stand-in task.

Reads: the proxy, ``public/sources/standins``. Writes: ``public/settings/mixture/{settings.json,curve.parquet}``.
Touches nothing private: the noise of the trial runs is on public data, so it is seeded and reproducible.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from dpmixmin import artifacts
from dpmixmin.cells import mixing_parts
from dpmixmin.config import Config
from dpmixmin.data.records import Records
from dpmixmin.mixing.objective import SourceTable, source_probabilities
from dpmixmin.paths import Paths
from dpmixmin.proxies.joint import axis_labels, load_proxy, source_predictions
from dpmixmin.tuning.mixture import candidates, try_candidates, write
from dpmixmin.tuning.standins import StandIn, stand_ins
from dpmixmin.tuning.trials import Trials


def add_arguments(parser) -> None:
    """Nothing to add."""


def run(config: Config, args) -> None:
    """Try every candidate on every stand-in task and write the choice with its curve."""
    torch.set_num_threads(config.threads)
    paths, rows, parents = Paths(config.experiment), [], []
    tuned = config.mixture.settings is None
    if tuned:
        parents = [artifacts.parent(paths.proxy()), artifacts.parent(paths.source("standins"))]
    with Trials(config, "tune_mixture", paths.settings("mixture"), parents) as trials:
        if tuned:
            rows = _try_all(config, paths, trials)
        write(config, "tune_mixture", rows, parents)


def _try_all(config: Config, paths: Paths, trials: Trials) -> list[dict]:
    records = Records.read_public(paths.source("standins"))
    axes = axis_labels(records, config)
    proxy = load_proxy(paths.proxy(), records.features.shape[1], config)
    predictions = source_predictions(proxy, records.features)

    def tables(task: StandIn) -> tuple[SourceTable, SourceTable, SourceTable]:
        p = source_probabilities(predictions, task.labels)
        train = np.concatenate([task.mixing, task.finetune])
        mixing = np.concatenate([getattr(task, part) for part in mixing_parts(config)])
        return tuple(SourceTable.of_labels(p[chosen]) for chosen in (mixing, train, task.test))

    tasks = stand_ins(records, axes, config, config.tune.mixture.tasks)
    trials.expect(len(tasks) * len(candidates(config)))
    rows = []
    for number, task in enumerate(tasks):
        rows += try_candidates(config, number, task.name, partial(tables, task), trials)
    return rows
