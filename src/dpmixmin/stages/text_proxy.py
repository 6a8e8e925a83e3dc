"""Train the proxy of one text source: a GPT-2 that plain transformers can load.

Reads: ``public/sources/source=…``, the tokenizer. Writes: ``public/proxies/source=…`` (the model's files and
``loss.parquet``). Touches nothing private; stops early on held-out PUBLIC loss.
"""

from __future__ import annotations

import torch

from dpmixmin import artifacts, provenance
from dpmixmin.config import Config
from dpmixmin.data import corpora, tokenizer
from dpmixmin.data.fetch import say
from dpmixmin.models import language
from dpmixmin.models.device import best
from dpmixmin.paths import Paths
from dpmixmin.pretrain.durable import Work
from dpmixmin.pretrain.language import Curve
from dpmixmin.pretrain.texts import curve_table, train_mixture
from dpmixmin.privacy.access import Progress


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--source", required=True, help="source whose proxy is trained")


def run(config: Config, args) -> None:
    """Train and write one proxy; a source that was left out gets an empty artefact."""
    torch.set_num_threads(config.threads)
    paths, name = Paths(config.experiment), args.source
    manifest = artifacts.manifest(
        "proxy",
        config=config.shown("proxy"),
        code=provenance.code_digest("text_proxy"),
        parents=[artifacts.parent(paths.text(name)), artifacts.parent(paths.tokenizer())],
        cell={"source": name},
        seed=config.text.proxy.seed,
        device=best().type,
    )
    with Work(paths) as work:
        work.make(paths.proxy(name), manifest, lambda state: _train(config, paths, name, state))


def _train(config: Config, paths: Paths, name: str, state: Progress) -> dict[str, bytes]:
    """Return the files of a proxy."""
    corpus = corpora.read(paths, name)
    files: dict[str, bytes] = {}
    curve = Curve()
    if corpus.train:
        trained, settings = tokenizer.load(paths.tokenizer()), config.text.proxy
        end = tokenizer.end_of_text(trained)
        # All proxies start from the same weights, so that they differ by their text alone.
        model = language.build(settings, trained.get_vocab_size(), config.text.context, end, settings.seed)
        curve = train_mixture(
            model, {name: corpus}, {name: 1.0}, config.text, settings, end, seed=settings.seed, state=state, say=say
        )
        card = f"# Proxy of `{name}`\n\nTrained on public text alone; a measuring instrument, not a language model.\n"
        files = language.files(model, tokenizer.files(trained), card)
        last = curve.rows[-1]
        loss = "train" if last["heldout_loss"] is None else "heldout"
        say(f"{name}: {loss} public loss {last[f'{loss}_loss']:.3f}")
    files["loss.parquet"] = artifacts.parquet_bytes(curve_table(curve))
    return files
