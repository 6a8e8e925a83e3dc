"""Prepare the sensitive texts.

Reads: the sensitive source, through the ledger; the public tokenizer. Writes: ``private/records/records.parquet`` and
``counts.json`` (what an owner wants to know of the table). Spends nothing: the output stays private, and each row is a
function of one source record and public constants.
"""

from __future__ import annotations

from dpmixmin import artifacts, provenance
from dpmixmin.config import Config
from dpmixmin.data import corpora, split, texts, tokenizer
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import PARTS, Derive, Ledger


def add_arguments(parser) -> None:
    """Nothing to add."""


def run(config: Config, args) -> None:
    """Load the sensitive texts, encode them one at a time, and write them in the fixed schema."""
    paths, ledger = Paths(config.experiment), Ledger.of(config)
    trained, parent = tokenizer.load(paths.tokenizer()), artifacts.parent(paths.tokenizer())
    with ledger.open(PARTS, Derive()) as access:
        records = texts.load_private(
            config.private, ledger.keys.of_ids()[1], lambda text: tokenizer.encode(trained, text), access
        )
        manifest = artifacts.manifest(
            "records",
            config=config.shown("records"),
            code=provenance.code_digest("text_records"),
            parents=[parent],
            private=True,
            partition={"ids": split.partition(ledger.keys, config.private, 0).ids, **corpora.made_with(paths)},
        )
        files = {
            "records.parquet": artifacts.parquet_bytes(records.to_arrow()),
            "counts.json": artifacts.json_bytes(records.counts(config.private.max_records_per_unit)),
        }
        artifacts.publish(paths.records(), files, manifest)
