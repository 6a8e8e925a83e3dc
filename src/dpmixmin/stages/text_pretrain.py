"""Pretrain a GPT-2 on the weighted public mixture; for method ``none``, write the initialisation.

Reads: weights, ``public/sources/source=…``, the tokenizer. Writes, per cell, a model that plain transformers loads,
``loss.parquet``, ``sampled.json`` (tokens and epochs of every source), a model card, ``privacy.json``,
``manifest.json``. Touches nothing private: it post-processes the weights, so its guarantee and its room are theirs.
"""

from __future__ import annotations

import torch

from dpmixmin import artifacts, jobs, progress, provenance
from dpmixmin.cells import Cell, mixture_cell
from dpmixmin.config import Config
from dpmixmin.data import corpora, tokenizer
from dpmixmin.data.fetch import say
from dpmixmin.errors import UserError
from dpmixmin.models import language
from dpmixmin.models.card import pretrained_card
from dpmixmin.models.device import best
from dpmixmin.paths import STUDY, Paths
from dpmixmin.pretrain.durable import Work
from dpmixmin.pretrain.inherited import statement_of
from dpmixmin.pretrain.language import Curve
from dpmixmin.pretrain.texts import curve_table, sampled, train_mixture
from dpmixmin.privacy.access import Progress
from dpmixmin.privacy.ledger import Ledger
from dpmixmin.ranks import Ranks
from dpmixmin.sections import METHODS


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--method", required=True, choices=METHODS, help="where the weights come from")
    parser.add_argument("--task", default="", help="sensitive task (not for none, uniform and proportional)")
    jobs.add_part(parser)


def run(config: Config, args) -> None:
    """Pretrain the cells of one job."""
    torch.set_num_threads(config.threads)
    paths, ledger = Paths(config.experiment), Ledger.of(config)
    names = corpora.present(config, paths)
    corpus = {name: corpora.read(paths, name) for name in names}
    sources = [artifacts.parent(folder) for folder in (paths.tokenizer(), *(paths.text(name) for name in names))]
    with Ranks.of_environment() as ranks, Work(paths, ranks) as work:
        for cell in jobs.own(config, "pretrained", args):
            progress.cell(cell.folder(paths))
            mixture = mixture_cell(config, cell.task, cell.method, cell.epsilon, cell.seed)
            manifest = artifacts.manifest(
                "pretrain",
                config=config.shown("pretrain"),
                code=provenance.code_digest("text_pretrain"),
                parents=sources + ([artifacts.parent(mixture.folder(paths))] if mixture else []),
                cell=cell.coordinates(),
                seed=config.text.pretrain.seed + cell.seed,
                device=best().type,
            )
            work.make(
                cell.folder(paths),
                manifest,
                lambda state, cell=cell, mixture=mixture: _train(config, paths, cell, mixture, corpus, state, ranks),
                lambda cell=cell, mixture=mixture: _views(config, ledger, paths, cell, mixture),
            )
            say(f"  {cell.folder(paths)}")


def _views(config: Config, ledger: Ledger, paths: Paths, cell: Cell, mixture: Cell | None) -> dict[str, bytes]:
    """Return the files that are derived from the ledger."""
    statement = statement_of(config, ledger, paths, mixture)
    card = pretrained_card(config, cell, statement, mixture and _weights(paths, mixture))
    return {"README.md": card.encode(), "privacy.json": artifacts.json_bytes(statement)}


def _train(
    config: Config,
    paths: Paths,
    cell: Cell,
    mixture: Cell | None,
    corpus: dict[str, corpora.Corpus],
    state: Progress,
    ranks: Ranks,
) -> dict[str, bytes]:
    """Return the files of a model: trained on a mixture, or as it starts."""
    trained, settings = tokenizer.load(paths.tokenizer()), config.text.pretrain
    end, seed = tokenizer.end_of_text(trained), settings.seed + cell.seed
    model = language.build(settings, trained.get_vocab_size(), config.text.context, end, seed)
    curve = Curve()
    if mixture is not None:
        weights = _weights(paths, mixture)
        if set(weights) != set(corpus):
            raise UserError(
                f"{mixture.folder(paths)}: weights of other sources than this run has; delete it, run again"
            )
        private = mixture.room == STUDY
        curve = train_mixture(
            model,
            corpus,
            weights,
            config.text,
            settings,
            end,
            seed=seed,
            state=state,
            say=say,
            ranks=ranks,
            private=private,
        )
    files = language.files(model, tokenizer.files(trained), "")
    files["loss.parquet"] = artifacts.parquet_bytes(curve_table(curve))
    files["sampled.json"] = artifacts.json_bytes(sampled(curve))
    return files


def _weights(paths: Paths, mixture: Cell) -> dict[str, float]:
    """Return a mixture's weights by source.

    Raises:
        UserError: they were learned with another tokenizer.
    """
    folder = mixture.folder(paths)
    found = artifacts.read_json(f"{folder}/weights.json")
    if found["tokenizer"] != corpora.tokenizer_digest(paths):
        raise UserError(f"{folder}: learned with another tokenizer than {paths.tokenizer()}; delete it and run again")
    return found["weights"]
