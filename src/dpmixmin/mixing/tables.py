"""From a prediction table to what the learners read, and to what an audit of them reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dpmixmin.cells import Cell
from dpmixmin.config import Config
from dpmixmin.data import corpora, split
from dpmixmin.data.records import binary_label, labels_from_arrow, record_names, strings
from dpmixmin.mixing.objective import SourceTable, source_probabilities
from dpmixmin.paths import Paths
from dpmixmin.privacy.access import Access
from dpmixmin.sections import LabelRule


def private_table(config: Config, paths: Paths, access: Access, cell: Cell, wanted: split.Partition) -> SourceTable:
    """Return what the sources say of the sensitive records of the open parts: raw private data (rule 19).

    Raises:
        UserError: the predictions were made with other ids, another partition or another tokenizer.
    """
    folder, names = paths.predictions(cell.seed), corpora.source_names(config, paths)
    made = corpora.made_with(paths) if config.text else {}
    table = access.table(folder, "predictions", ids=wanted.ids, partition=wanted.name, **made)
    if config.text:
        return text_table(table, names, config.mixture.objective)
    return label_table(table, names, config.tasks[cell.task])


def label_table(table: pa.Table, sources: Sequence[str], rule: LabelRule) -> SourceTable:
    """Return the source probabilities of a binary task.

    Args:
        table: rows of ``predictions.parquet`` in the order of (unit, record).
        sources: names of the sources.
        rule: the task.
    """
    predictions = np.stack([table[f"source_{name}"].to_numpy() for name in sources], axis=1)
    labels = binary_label(labels_from_arrow(table["labels"]), rule)
    return SourceTable.of_labels(source_probabilities(predictions, labels), _units(table), names=_names(table))


def text_table(table: pa.Table, sources: Sequence[str], objective: str) -> SourceTable:
    """Return the source probabilities of texts.

    Args:
        table: as in :func:`label_table`.
        sources: names of the sources.
        objective: sequence or token, see :class:`~dpmixmin.sections.Mixture`.
    """
    lengths = table["length"].to_numpy().astype(np.int64)
    if objective == "sequence":
        totals = np.stack([table[f"source_{name}"].to_numpy() for name in sources], axis=1)
        return SourceTable.of_sequences(totals, lengths, _units(table), names=_names(table))
    columns = [table[f"tokens_{name}"].combine_chunks().flatten().to_numpy(zero_copy_only=False) for name in sources]
    record = np.repeat(np.arange(len(lengths)), lengths)
    return SourceTable.of_tokens(np.stack(columns, axis=1), record, lengths, _units(table), names=_names(table))


def _units(table: pa.Table) -> tuple[int, np.ndarray]:
    names, index = np.unique(strings(table["unit"]), return_inverse=True)
    return len(names), index


def _names(table: pa.Table) -> np.ndarray:
    return record_names(strings(table["unit"]), strings(table["record"]))
