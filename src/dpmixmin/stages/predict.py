"""Predict the sensitive training records with the proxy: the n-by-k table.

Reads: the proxy, the sensitive table, the splits. Writes: ``private/predictions/seed=…/predictions.parquet`` (unit,
record, part, labels, one column per source). It is a function of each record, so it is raw private data (rule 19) and
stays private. Only the mixing and finetune parts are predicted.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from dpmixmin import artifacts, provenance
from dpmixmin.config import Config
from dpmixmin.data import split
from dpmixmin.data.records import Records, strings
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import Derive, Ledger
from dpmixmin.proxies.joint import load_proxy, source_predictions


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--seeds", type=int, nargs="+", help="partitions to predict (default: all of the config)")


def run(config: Config, args) -> None:
    """Write one prediction table per seed."""
    torch.set_num_threads(config.threads)
    paths = Paths(config.experiment)
    proxy_parent = artifacts.parent(paths.proxy())
    ledger = Ledger.of(config)
    with ledger.open(("mixing", "finetune"), Derive()) as access:
        ids = split.partition(ledger.keys, config.private, 0).ids
        table = access.table(paths.records(), "records", ids=ids)
        records = Records.from_arrow(table)
        model = load_proxy(paths.proxy(), records.features.shape[1], config)
        for seed in args.seeds or config.seeds:
            wanted = split.partition(ledger.keys, config.private, seed)
            members = access.table(paths.split(seed), "split", ids=ids, partition=wanted.name)
            keep = np.isin(records.unit, strings(members["unit"]))
            part_of = dict(zip(members["unit"].to_pylist(), members["part"].to_pylist(), strict=True))
            rows = table.filter(pa.array(keep))
            # One record at a time: in a batch, a record's last bits could depend on how many others there are.
            predictions = source_predictions(model, records.features[keep], batch=1)
            columns = {name: pa.array(predictions[:, i]) for i, name in enumerate(config.axes)}
            out = pa.table(
                {
                    "unit": rows["unit"],
                    "record": rows["record"],
                    "part": pa.array([part_of[unit] for unit in rows["unit"].to_pylist()], pa.string()),
                    "labels": rows["labels"],
                    **{f"source_{name}": column for name, column in columns.items()},
                }
            )
            manifest = artifacts.manifest(
                "predict",
                config=config.shown("predict"),
                code=provenance.code_digest("predict"),
                parents=[proxy_parent, access.parent(paths.records()), access.parent(paths.split(seed))],
                seed=seed,
                private=True,
                partition={"ids": ids, "partition": wanted.name},
            )
            files = {"predictions.parquet": artifacts.parquet_bytes(out)}
            artifacts.publish(paths.predictions(seed), files, manifest)
