"""Prepare the public record tables.

Reads: public files. Writes: ``public/sources/{sources,standins}/records.parquet``. Touches nothing private.
"""

from __future__ import annotations

from dpmixmin import artifacts, provenance
from dpmixmin.config import Config
from dpmixmin.data import loaders
from dpmixmin.data.fetch import say
from dpmixmin.paths import Paths


def add_arguments(parser) -> None:
    """Nothing to add."""


def run(config: Config, args) -> None:
    """Load, check and write the public tables."""
    paths = Paths(config.experiment)
    tables = {"sources": config.public.sources, "standins": config.public.standins}
    for name, table in tables.items():
        if table is None:
            continue
        records = loaders.load_public(table, config.inputs)
        for rule in config.axes.values():
            records.label(rule)
        manifest = artifacts.manifest(
            "sources", config=config.subtree("sources"), code=provenance.code_digest("sources"), parents=[]
        )
        files = {"records.parquet": artifacts.parquet_bytes(records.to_arrow())}
        artifacts.publish(paths.source(name), files, manifest)
        say(f"{name}: {len(records)} public records")
