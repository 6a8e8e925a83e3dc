"""Choose fine-tuning settings on public stand-ins: one source poses as the sensitive text, and is left out.

Pretraining is what a trial costs, so one model a stand-in, pretrained on the other sources with equal weights, serves
every pretrained method: they get the same settings. ``none`` is tried from its initialisation. "Do not fine-tune" is
one of the candidates.

Reads: ``public/sources/source=…``, the tokenizer. Writes, for every method, ``public/settings/finetune/method=…/
{settings.json,curve.parquet}``. Touches nothing private; its noise is on public data, so it is seeded.
"""

from __future__ import annotations

import copy

import torch

from dpmixmin import artifacts
from dpmixmin.cells import train_parts
from dpmixmin.config import Config
from dpmixmin.data import corpora, tokenizer
from dpmixmin.data.fetch import say
from dpmixmin.finetune.dp_sgd import fine_tune
from dpmixmin.finetune.texts import text_sums
from dpmixmin.metrics import perplexities
from dpmixmin.models import language, trainable
from dpmixmin.models.scoring import score
from dpmixmin.paths import Paths
from dpmixmin.pretrain.texts import train_mixture
from dpmixmin.privacy.noise import InsecureNoise
from dpmixmin.sections import FinetuneSettings
from dpmixmin.specs import finetune_spec
from dpmixmin.tuning.finetune import KEYS, row, write
from dpmixmin.tuning.standins import balanced_candidates
from dpmixmin.tuning.text_standins import TextStandIn, stand_ins


def add_arguments(parser) -> None:
    """Nothing to add: one run serves every method."""


def run(config: Config, args) -> None:
    """Try every candidate on every stand-in and write the choices with their curves."""
    torch.set_num_threads(config.threads)
    paths, parents = Paths(config.experiment), []
    rows: dict[str, list[dict]] = {method: [] for method in config.methods}
    if config.finetune.settings is None:
        names = corpora.present(config, paths)
        parents = [artifacts.parent(folder) for folder in (paths.tokenizer(), *map(paths.text, names))]
        texts = {name: corpora.read(paths, name) for name in names}
        for number, task in enumerate(stand_ins(texts, config, config.tune.finetune.tasks)):
            tried = _try(config, paths, texts, task, number)
            for method in config.methods:
                rows[method] += [{**one, "method": method} for one in tried["none" if method == "none" else "uniform"]]
    for method in config.methods:
        write(config, method, "text_tune_finetune", rows[method], "perplexity", parents)


def _try(config: Config, paths: Paths, texts: dict, task: TextStandIn, number: int) -> dict[str, list[dict]]:
    """Return the rows of a stand-in for a model without and one with pretraining."""
    trained, settings = tokenizer.load(paths.tokenizer()), config.text.pretrain
    end = tokenizer.end_of_text(trained)
    grid, rows = config.tune.finetune, {}
    candidates = balanced_candidates({key: getattr(grid, key) for key in KEYS}, grid.budget, config.tune.seed)
    for start in ("none", "uniform"):
        if not any((method == "none") == (start == "none") for method in config.methods):
            continue
        model = language.build(settings, trained.get_vocab_size(), config.text.context, end, settings.seed)
        if start == "uniform":
            weights = {name: 1 / len(task.others) for name in task.others}
            state = paths.state(f"{paths.settings('finetune')}/standin={task.name}")
            train_mixture(model, texts, weights, config.text, settings, end, seed=settings.seed, state=state, say=say)
        found = [row(start, None, task.name, perplexity=_score(config, model, task))]
        say(f"  {start}, stand-in {task.name}: {found[0]['perplexity']:.1f} before fine-tuning")
        # The smaller part: what dp_mixmin fine-tunes on when the mixture has a part of its own.
        parts = train_parts(config, "dp_mixmin" if "dp_mixmin" in config.methods else "uniform")
        for index, candidate in enumerate(candidates):
            trial = trainable.choose(copy.deepcopy(model), config.finetune.trainable)
            sums = text_sums(trial, task.finetune, end, config)
            spec = finetune_spec(config, FinetuneSettings(**candidate), config.tune.epsilon, parts)
            noise = InsecureNoise(config.tune.seed, f"stand-in {number} {start} {index}")
            fine_tune(sums, spec, candidate["learning_rate"], noise)
            found.append(row(start, candidate, task.name, perplexity=_score(config, trainable.merged(trial), task)))
            say(f"    {candidate}: {found[-1]['perplexity']:.1f}")
        rows[start] = found
    return rows


def _score(config: Config, model, task: TextStandIn) -> float:
    scores = score(model, task.test.tokens, config.text)
    return perplexities(scores, task.test.units())["perplexity"]
