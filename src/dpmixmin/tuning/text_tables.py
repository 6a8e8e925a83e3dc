"""What the proxies say of stand-in texts, as tables of the mixture's learner."""

from __future__ import annotations

import numpy as np

from dpmixmin.config import Config
from dpmixmin.data.records import record_names
from dpmixmin.data.text_records import TextRecords
from dpmixmin.mixing.objective import SourceTable
from dpmixmin.models.scoring import score


def token_scores(config: Config, models: list, records: TextRecords) -> tuple[TextRecords, list[np.ndarray]]:
    """Return records with their token log-probabilities under every proxy, each (tokens, k)."""
    columns = [score(model, records.tokens, config.text) for model in models]
    return records, [np.stack(values, axis=1) for values in zip(*columns, strict=True)]


def scored_table(config: Config, scored: list[tuple[TextRecords, list[np.ndarray]]]) -> SourceTable:
    """Return the table of one or more parts, each from :func:`token_scores`."""
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
