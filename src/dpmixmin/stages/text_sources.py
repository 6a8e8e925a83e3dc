"""Prepare the public texts and the tokenizer.

Reads: public packages, files or hub datasets. Writes: ``public/tokenizer``, and for each source
``public/sources/source=…/documents.parquet``. Touches nothing private: the tokenizer sees public text only (rule 10).
"""

from __future__ import annotations

from dpmixmin import artifacts, provenance
from dpmixmin.config import Config
from dpmixmin.data import corpora, domains, fetch, texts, tokenizer
from dpmixmin.data.fetch import say
from dpmixmin.errors import UserError
from dpmixmin.paths import Paths


def add_arguments(parser) -> None:
    """Nothing to add."""


def run(config: Config, args) -> None:
    """Read every source, make the tokenizer, encode and write."""
    paths = Paths(config.experiment)
    found = {name: _documents(config, name) for name in corpora.present(config, paths)}
    trained = _tokenizer(config, found)
    files = tokenizer.files(trained)
    artifacts.publish(paths.tokenizer(), files, _manifest(config, []))
    for name in config.sources:
        documents = found.get(name, [])
        tokens = [tokenizer.encode(trained, text) for text in documents]
        try:
            table = corpora.documents_table(documents, tokens, config.text.heldout)
        except UserError as error:
            raise UserError(f"public.texts.{name}: {error}") from None
        _check_size(config, name, tokens)
        manifest = _manifest(config, [artifacts.parent(paths.tokenizer())])
        artifacts.publish(paths.text(name), {"documents.parquet": artifacts.parquet_bytes(table)}, manifest)
        say(f"{name}: {len(documents)} documents, {sum(map(len, tokens)):,} tokens")


def _documents(config: Config, name: str) -> list[str]:
    source, limit = config.public.texts[name], config.text.characters
    if source.kind == "packaged":
        return domains.read_domain(source.domain, limit)
    return texts.read_public(source, limit)


def _tokenizer(config: Config, found: dict[str, list[str]]):
    wanted = config.text.tokenizer
    if wanted.kind == "bpe":
        return tokenizer.train((text for documents in found.values() for text in documents), wanted.vocabulary)
    pair = [None if path is None else fetch.resolve(path) for path in (wanted.vocab, wanted.merges)]
    return tokenizer.gpt2(*pair)


def _check_size(config: Config, name: str, tokens: list) -> None:
    """Refuse a source that cannot fill one sequence, before anything is trained."""
    size = sum(map(len, tokens))
    if tokens and size <= 2 * config.text.context:
        raise UserError(
            f"public.texts.{name}: {size} tokens are fewer than two sequences of text.context {config.text.context}; "
            "give more text, or remove the source"
        )


def _manifest(config: Config, parents: list[dict]) -> dict:
    return artifacts.manifest(
        "sources", config=config.shown("sources"), code=provenance.code_digest("text_sources"), parents=parents
    )
