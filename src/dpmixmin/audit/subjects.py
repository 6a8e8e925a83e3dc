"""What is audited: in a study the sensitive parts themselves, in a deployment public stand-ins, never the private set.

A guarantee holds for every dataset, so an audit may choose any: a deployment attacks the same code with the same specs
on public data, before it has spent anything. Parents are named as manifests need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpmixmin import artifacts
from dpmixmin.cells import Cell, mixing_parts, pretrained_cell, train_parts
from dpmixmin.config import Config
from dpmixmin.data import corpora, split
from dpmixmin.data.records import Records
from dpmixmin.data.text_records import TextRecords
from dpmixmin.mixing.objective import SourceTable
from dpmixmin.mixing.tables import private_table
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import Ledger, Study


@contextmanager
def mixture_table(config: Config, paths: Paths, cell: Cell) -> Iterator[tuple[SourceTable, list[dict]]]:
    """Open the table that the audit of one mixture runs on.

    Yields:
        The table, and the parents of what is computed from it.
    """
    if config.mode == "deploy":
        yield _of_texts(config, paths) if config.text else _of_labels(config, paths)
        return
    ledger = Ledger.of(config)
    wanted = split.partition(ledger.keys, config.private, cell.seed)
    with ledger.open(mixing_parts(config), Study(f"audit of the mixture of {cell.task}")) as access:
        parents = [access.parent(paths.predictions(cell.seed))]
        yield private_table(config, paths, access, cell, wanted), parents


def _of_labels(config: Config, paths: Paths) -> tuple[SourceTable, list[dict]]:
    from dpmixmin.mixing.objective import source_probabilities
    from dpmixmin.proxies.joint import load_proxy, source_predictions

    task = label_stand_in(config, paths)
    proxy = load_proxy(paths.proxy(), task.records.features.shape[1], config)
    rows = np.concatenate([getattr(task, part) for part in mixing_parts(config)])
    p = source_probabilities(source_predictions(proxy, task.records.features[rows]), task.labels[rows])
    return SourceTable.of_labels(p), [artifacts.parent(paths.proxy()), artifacts.parent(_label_folder(config, paths))]


def label_stand_in(config: Config, paths: Paths):
    """Return the first stand-in task; without tables of their own, the public sources pose."""
    from dpmixmin.proxies.joint import axis_labels
    from dpmixmin.tuning.standins import stand_ins

    records = Records.read_public(_label_folder(config, paths))
    return stand_ins(records, axis_labels(records, config), config, 1)[0]


def _label_folder(config: Config, paths: Paths) -> str:
    return paths.source("standins" if config.public.standins else "sources")


def label_parents(config: Config, paths: Paths) -> list[dict]:
    """Return the parents of what is computed from :func:`label_stand_in`."""
    return [artifacts.parent(_label_folder(config, paths))]


def _of_texts(config: Config, paths: Paths) -> tuple[SourceTable, list[dict]]:
    from dpmixmin.models.language import load
    from dpmixmin.tuning.text_tables import scored_table, token_scores

    task = text_stand_in(config, paths)
    for name in task.others:
        corpora.check_tokenizer(paths, paths.proxy(name))
    models = [load(paths.proxy(name)) for name in task.others]
    scored = [token_scores(config, models, getattr(task, part)) for part in mixing_parts(config)]
    parents = [artifacts.parent(paths.proxy(name)) for name in task.others]
    parents += text_parents(config, paths)
    return scored_table(config, scored), parents


def text_stand_in(config: Config, paths: Paths):
    """Return the first stand-in of texts: one source poses, the others are left."""
    from dpmixmin.tuning.text_standins import stand_ins

    texts = {name: corpora.read(paths, name) for name in corpora.present(config, paths)}
    return stand_ins(texts, config, 1)[0]


def text_parents(config: Config, paths: Paths) -> list[dict]:
    """Return the parents of what is computed from :func:`text_stand_in`."""
    return [artifacts.parent(paths.text(name)) for name in corpora.present(config, paths)]


# -- fine-tuning ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """What an audit of fine-tuning trains.

    Attributes:
        build: ``build(make)`` calls ``make`` with the arguments of the shipped ``ClippedSum``, for a model of its own.
        altered: changes the labels of record canaries, or None.
        parents: of what is computed from it.
    """

    build: Callable[[Callable[..., Any]], Any]
    altered: Callable[[np.ndarray], np.ndarray] | None
    parents: list[dict]


@contextmanager
def training(config: Config, paths: Paths, cell: Cell) -> Iterator[Training]:
    """Open the data that one method's fine-tuning reads, and its first model: the pretrained one.

    A deployment starts from the public initialisation: its own pretrained model comes after the audit.
    """
    if config.mode == "deploy":
        yield _public_texts(config, paths) if config.text else _public_labels(config, paths)
        return
    ledger = Ledger.of(config)
    wanted = split.partition(ledger.keys, config.private, cell.seed)
    folder = pretrained_cell(config, cell.task, cell.method, cell.epsilon, cell.seed).folder(paths)
    parts = train_parts(config, cell.method)
    with ledger.open(parts, Study(f"audit of the fine-tuning of {cell.method} on {cell.task}")) as access:
        records = split.open_part(access, paths, wanted, cell.seed)
        private = [access.parent(paths.records()), access.parent(paths.split(cell.seed))]
        parents = [artifacts.parent(folder), *private]
        if config.text:
            yield _texts(config, records, parents, folder)
        else:
            yield _labels(config, records, records.label(config.tasks[cell.task]), parents, folder)


def _labels(
    config: Config, records: Records, labels: np.ndarray, parents: list[dict], folder: str | None = None
) -> Training:
    from dpmixmin.audit.training import flipped
    from dpmixmin.finetune.labels import label_sums, starting_model

    def build(make):
        return label_sums(starting_model(config, records.features.shape[1], folder), records, labels, config, make)

    return Training(build, flipped, parents)


def _texts(config: Config, records: TextRecords, parents: list[dict], folder: str) -> Training:
    from dpmixmin.finetune.texts import pretrained_sums

    return Training(lambda make: pretrained_sums(config, records, folder, make), None, parents)


def _public_labels(config: Config, paths: Paths) -> Training:
    task = label_stand_in(config, paths)
    records = task.records.take(task.finetune)
    order = np.argsort(records.unit, kind="stable")
    return _labels(config, records.take(order), task.labels[task.finetune][order], label_parents(config, paths))


def _public_texts(config: Config, paths: Paths) -> Training:
    from dpmixmin.data import tokenizer
    from dpmixmin.finetune.texts import text_sums
    from dpmixmin.models import language, trainable

    task, trained, settings = text_stand_in(config, paths), tokenizer.load(paths.tokenizer()), config.text.pretrain
    end = tokenizer.end_of_text(trained)

    def build(make):
        model = language.build(settings, trained.get_vocab_size(), config.text.context, end, settings.seed)
        return text_sums(trainable.choose(model, config.finetune.trainable), task.finetune.sorted(), end, config, make)

    return Training(build, None, text_parents(config, paths))
