"""Prepare the sensitive record table.

Reads: the sensitive source, through the ledger; the number of features, from the public sources. Writes:
``private/records/records.parquet`` and ``counts.json`` (what an owner wants to know of the table). Spends nothing: the
output stays private, and each row of the table is a function of one source row and public constants.
"""

from __future__ import annotations

from dpmixmin import artifacts, provenance
from dpmixmin.config import Config
from dpmixmin.data import loaders, split
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import PARTS, Derive, Ledger


def add_arguments(parser) -> None:
    """Nothing to add."""


def run(config: Config, args) -> None:
    """Load the sensitive table and write it in the fixed schema."""
    paths, ledger = Paths(config.experiment), Ledger.of(config)
    sources = artifacts.read_table(f"{paths.source('sources')}/records.parquet")
    width = sources.schema.field("features").type.list_size
    with ledger.open(PARTS, Derive()) as access:
        records = loaders.load_private(config.private, config.inputs, ledger.keys.of_ids()[1], width, access)
        for rule in config.tasks.values():
            records.label(rule)
        manifest = artifacts.manifest(
            "records",
            config=config.shown("records"),
            code=provenance.code_digest("records"),
            parents=[],
            private=True,
            partition={"ids": split.partition(ledger.keys, config.private, 0).ids},
        )
        files = {
            "records.parquet": artifacts.parquet_bytes(records.to_arrow()),
            "counts.json": artifacts.json_bytes(records.counts(config.private.max_records_per_unit)),
        }
        artifacts.publish(paths.records(), files, manifest)
