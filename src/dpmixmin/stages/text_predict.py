"""Score the sensitive training texts under every proxy: the n-by-k table.

Reads: the proxies, the sensitive table, the splits. Writes: ``private/predictions/seed=…/predictions.parquet`` (unit,
record, part, length in tokens, per source the total log-probability, and with ``mixture.objective: token`` that of
every token). It is a function of each record, so it is raw private data (rule 19) and stays private. Only the mixing
and finetune parts are scored.

A unit's records share batches, sorted by length; units never do: in a common batch, a record's last bits could depend
on who else is there, and that would reach the integer grid of the release.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from dpmixmin import artifacts, provenance
from dpmixmin.config import Config
from dpmixmin.data import corpora, split
from dpmixmin.data.records import strings
from dpmixmin.data.text_records import TextRecords
from dpmixmin.models.device import best
from dpmixmin.models.language import load
from dpmixmin.models.scoring import score_by_unit
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import Derive, Ledger


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--seeds", type=int, nargs="+", help="partitions to score (default: all of the config)")


def run(config: Config, args) -> None:
    """Write one prediction table per seed; a record is scored once for all of them."""
    torch.set_num_threads(config.threads)
    paths, seeds = Paths(config.experiment), args.seeds or config.seeds
    names = corpora.present(config, paths)
    parents = [artifacts.parent(paths.proxy(name)) for name in names]
    for name in names:
        corpora.check_tokenizer(paths, paths.proxy(name))
    ledger, made = Ledger.of(config), corpora.made_with(paths)
    with ledger.open(("mixing", "finetune"), Derive()) as access:
        ids = split.partition(ledger.keys, config.private, 0).ids
        table = access.table(paths.records(), "records", ids=ids, **made)
        records, members = TextRecords.from_arrow(table), {}
        for seed in seeds:
            wanted = split.partition(ledger.keys, config.private, seed)
            found = access.table(paths.split(seed), "split", ids=ids, partition=wanted.name)
            members[seed] = dict(zip(strings(found["unit"]).tolist(), strings(found["part"]).tolist(), strict=True))
        records = records.take(np.isin(records.unit, list(set().union(*members.values()))))
        scores = {name: score_by_unit(load(paths.proxy(name)), records, config.text) for name in names}
        lengths = np.array([len(part) for part in scores[names[0]]], dtype=np.int32)
        for seed in seeds:
            rows = np.flatnonzero(np.isin(records.unit, list(members[seed])))
            out = pa.table(
                {
                    "unit": pa.array(records.unit[rows], pa.string()),
                    "record": pa.array(records.record[rows], pa.string()),
                    "part": pa.array([members[seed][unit] for unit in records.unit[rows].tolist()], pa.string()),
                    "length": pa.array(lengths[rows], pa.int32()),
                    **_columns(scores, rows, tokens=config.mixture.objective == "token"),
                }
            )
            manifest = artifacts.manifest(
                "predict",
                config=config.shown("predict"),
                code=provenance.code_digest("text_predict"),
                parents=[*parents, access.parent(paths.records()), access.parent(paths.split(seed))],
                seed=seed,
                private=True,
                partition={
                    "ids": ids,
                    "partition": split.partition(ledger.keys, config.private, seed).name,
                    **made,
                },
                device=best().type,
            )
            files = {"predictions.parquet": artifacts.parquet_bytes(out)}
            artifacts.publish(paths.predictions(seed), files, manifest)


def _columns(scores: dict[str, list[np.ndarray]], rows: np.ndarray, *, tokens: bool) -> dict[str, pa.Array]:
    """Return the columns of the sources: totals, and where wanted the values of every token."""
    found: dict[str, pa.Array] = {}
    for name, values in scores.items():
        found[f"source_{name}"] = pa.array([float(values[i].sum(dtype=np.float64)) for i in rows], pa.float64())
        if tokens:
            found[f"tokens_{name}"] = pa.array([values[i] for i in rows], pa.list_(pa.float32()))
    return found
