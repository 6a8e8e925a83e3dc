"""Choose the mixture's settings on public stand-ins: one source poses as the sensitive text, and is left out.

Reads: the proxies, ``public/sources/source=…``. Writes: ``public/settings/mixture/{settings.json,curve.parquet}``.
Touches nothing private: the noise of the trial runs is on public data, so it is seeded and reproducible.
"""

from __future__ import annotations

import numpy as np
import torch

from dpmixmin import artifacts
from dpmixmin.cells import mixing_parts
from dpmixmin.config import Config
from dpmixmin.data import corpora
from dpmixmin.data.fetch import say
from dpmixmin.data.records import record_names
from dpmixmin.data.text_records import TextRecords
from dpmixmin.mixing.objective import SourceTable
from dpmixmin.models.language import load
from dpmixmin.models.scoring import score
from dpmixmin.paths import Paths
from dpmixmin.tuning.mixture import try_candidates, write
from dpmixmin.tuning.text_standins import stand_ins


def add_arguments(parser) -> None:
    """Nothing to add."""


def run(config: Config, args) -> None:
    """Try every candidate on every stand-in and write the choice with its curve."""
    torch.set_num_threads(config.threads)
    paths, rows, parents = Paths(config.experiment), [], []
    if config.mixture.settings is None:
        names = corpora.present(config, paths)
        for name in names:
            corpora.check_tokenizer(paths, paths.proxy(name))
        folders = [folder for name in names for folder in (paths.proxy(name), paths.text(name))]
        parents = [artifacts.parent(folder) for folder in folders]
        rows = _try_all(config, paths, names)
    write(config, "text_tune_mixture", rows, parents)


def _try_all(config: Config, paths: Paths, names: tuple[str, ...]) -> list[dict]:
    texts = {name: corpora.read(paths, name) for name in names}
    models = {name: load(paths.proxy(name)) for name in names}
    rows = []
    tasks = stand_ins(texts, config, config.tune.mixture.tasks)
    for number, task in enumerate(tasks, 1):
        say(f"  stand-in {number}/{len(tasks)}: {task.name} as the sensitive text")
        used = [models[name] for name in task.others]
        parts = {part: _scores(config, used, getattr(task, part)) for part in ("mixing", "finetune", "test")}
        mixing = _table(config, [parts[part] for part in mixing_parts(config)])
        train = _table(config, [parts["mixing"], parts["finetune"]])
        rows += try_candidates(config, number, task.name, mixing, train, _table(config, [parts["test"]]))
    return rows


def _scores(config: Config, models: list, records: TextRecords) -> tuple[TextRecords, list[np.ndarray]]:
    """Return records with their token log-probabilities under every proxy, each (tokens, k)."""
    columns = [score(model, records.tokens, config.text) for model in models]
    return records, [np.stack(values, axis=1) for values in zip(*columns, strict=True)]


def _table(config: Config, scored: list[tuple[TextRecords, list[np.ndarray]]]) -> SourceTable:
    records = [record for part, _ in scored for record in zip(part.unit.tolist(), part.record.tolist(), strict=True)]
    values = [value for _, part in scored for value in part]
    order = sorted(range(len(records)), key=records.__getitem__)
    units, index = np.unique([records[i][0] for i in order], return_inverse=True)
    lengths = np.array([len(values[i]) for i in order])
    rows = np.concatenate([values[i] for i in order])
    where = (len(units), index)
    names = record_names(*(np.array([records[i][part] for i in order]) for part in (0, 1)))
    if config.mixture.objective == "token":
        return SourceTable.of_tokens(rows, np.repeat(np.arange(len(order)), lengths), lengths, where, names)
    totals = np.stack([values[i].sum(axis=0, dtype=np.float64) for i in order])
    return SourceTable.of_sequences(totals, lengths, where, names)
