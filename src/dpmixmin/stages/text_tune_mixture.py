"""Choose the mixture's settings on public stand-ins: one source poses as the sensitive text, and is left out.

Reads: the proxies, ``public/sources/source=…``. Writes: ``public/settings/mixture/{settings.json,curve.parquet}``.
Touches nothing private: the noise of the trial runs is on public data, so it is seeded and reproducible.
"""

from __future__ import annotations

from functools import partial

import torch

from dpmixmin import artifacts
from dpmixmin.cells import mixing_parts
from dpmixmin.config import Config
from dpmixmin.data import corpora
from dpmixmin.data.fetch import say
from dpmixmin.mixing.objective import SourceTable
from dpmixmin.models.language import load
from dpmixmin.paths import Paths
from dpmixmin.tuning.mixture import candidates, try_candidates, write
from dpmixmin.tuning.text_standins import TextStandIn, stand_ins
from dpmixmin.tuning.text_tables import scored_table, token_scores
from dpmixmin.tuning.trials import Trials


def add_arguments(parser) -> None:
    """Nothing to add."""


def run(config: Config, args) -> None:
    """Try every candidate on every stand-in and write the choice with its curve."""
    torch.set_num_threads(config.threads)
    paths, names, rows, parents = Paths(config.experiment), (), [], []
    tuned = config.mixture.settings is None
    if tuned:
        names = corpora.present(config, paths)
        for name in names:
            corpora.check_tokenizer(paths, paths.proxy(name))
        folders = [folder for name in names for folder in (paths.proxy(name), paths.text(name))]
        parents = [artifacts.parent(folder) for folder in folders]
    with Trials(config, "text_tune_mixture", paths.settings("mixture"), parents) as trials:
        if tuned:
            rows = _try_all(config, paths, names, trials)
        write(config, "text_tune_mixture", rows, parents)


def _try_all(config: Config, paths: Paths, names: tuple[str, ...], trials: Trials) -> list[dict]:
    texts = {name: corpora.read(paths, name) for name in names}
    models = {name: load(paths.proxy(name)) for name in names}

    def tables(task: TextStandIn) -> tuple[SourceTable, SourceTable, SourceTable]:
        say(f"  scoring {task.name} as the sensitive text")
        used = [models[name] for name in task.others]
        parts = {part: token_scores(config, used, getattr(task, part)) for part in ("mixing", "finetune", "test")}
        mixing = scored_table(config, [parts[part] for part in mixing_parts(config)])
        train = scored_table(config, [parts["mixing"], parts["finetune"]])
        return mixing, train, scored_table(config, [parts["test"]])

    tasks = stand_ins(texts, config, config.tune.mixture.tasks)
    trials.expect(len(tasks) * len(candidates(config)))
    rows = []
    for number, task in enumerate(tasks, 1):
        rows += try_candidates(config, number, task.name, partial(tables, task), trials)
    return rows
