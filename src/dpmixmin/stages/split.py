"""Assign every unit to a part, once per seed.

Reads: the sensitive table. Writes: ``private/splits/seed=…/split.parquet`` (record, unit, part). Releases nothing; a
unit's part depends on its id, the split key and public fractions alone.
"""

from __future__ import annotations

import pyarrow as pa

from dpmixmin import artifacts, provenance
from dpmixmin.config import Config
from dpmixmin.data import split
from dpmixmin.data.records import strings
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import PARTS, Derive, Ledger


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds to partition (default: all of the config)")


def run(config: Config, args) -> None:
    """Write one partition per seed."""
    paths, ledger = Paths(config.experiment), Ledger.of(config)
    with ledger.open(PARTS, Derive()) as access:
        for seed in args.seeds or config.seeds:
            wanted = split.partition(ledger.keys, config.private, seed)
            table = access.table(paths.records(), "records", ids=wanted.ids)
            parts = split.assign(strings(table["unit"]), wanted.key, config.private.parts)
            out = pa.table({"record": table["record"], "unit": table["unit"], "part": pa.array(parts, pa.string())})
            manifest = artifacts.manifest(
                "split",
                config=config.shown("split"),
                code=provenance.code_digest("split"),
                parents=[access.parent(paths.records())],
                seed=seed,
                private=True,
                partition={"ids": wanted.ids, "partition": wanted.name},
            )
            artifacts.publish(paths.split(seed), {"split.parquet": artifacts.parquet_bytes(out)}, manifest)
