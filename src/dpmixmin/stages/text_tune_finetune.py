"""Choose fine-tuning settings on public stand-ins: one source poses as the sensitive text, and is left out.

Pretraining is what a trial costs, so one model a stand-in, pretrained on the other sources with equal weights, serves
every pretrained method: they get the same settings. ``none`` is tried from its initialisation. "Do not fine-tune" is
one of the candidates.

Reads: ``public/sources/source=…``, the tokenizer. Writes, for every method, ``public/settings/finetune/method=…/
{settings.json,curve.parquet}``. Touches nothing private; its noise is on public data, so it is seeded.
"""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import TYPE_CHECKING

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
from dpmixmin.privacy.access import Progress
from dpmixmin.privacy.noise import InsecureNoise
from dpmixmin.sections import FinetuneSettings
from dpmixmin.specs import finetune_spec
from dpmixmin.tuning.finetune import KEYS, row, write
from dpmixmin.tuning.standins import balanced_candidates
from dpmixmin.tuning.text_standins import TextStandIn, stand_ins
from dpmixmin.tuning.trials import Trials

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel


def add_arguments(parser) -> None:
    """Nothing to add: one run serves every method."""


def run(config: Config, args) -> None:
    """Try every candidate on every stand-in and write the choices with their curves."""
    torch.set_num_threads(config.threads)
    paths, names, parents = Paths(config.experiment), (), []
    tuned = config.finetune.settings is None
    if tuned:
        names = corpora.present(config, paths)
        parents = [artifacts.parent(folder) for folder in (paths.tokenizer(), *map(paths.text, names))]
    with Trials(config, "text_tune_finetune", paths.settings("finetune"), parents) as trials:
        rows = _try_all(config, paths, names, trials) if tuned else {method: [] for method in config.methods}
        for method in config.methods:
            write(config, method, "text_tune_finetune", rows[method], "perplexity", parents)


def _start(method: str) -> str:
    """Return the start that stands for a method's: without pretraining, or pretrained on equal weights."""
    return "none" if method == "none" else "uniform"


def _try_all(config: Config, paths: Paths, names: tuple[str, ...], trials: Trials) -> dict[str, list[dict]]:
    """Return the rows of every method."""
    texts = {name: corpora.read(paths, name) for name in names}
    tasks = stand_ins(texts, config, config.tune.finetune.tasks)
    starts = sorted({_start(method) for method in config.methods})
    grid = config.tune.finetune
    candidates = balanced_candidates({key: getattr(grid, key) for key in KEYS}, grid.budget, config.tune.seed)
    trials.expect(len(tasks) * len(starts) * (1 + len(candidates)))
    rows: dict[str, list[dict]] = {method: [] for method in config.methods}
    for number, task in enumerate(tasks):
        tried = {start: _try(config, paths, texts, task, number, start, candidates, trials) for start in starts}
        for method in config.methods:
            rows[method] += [{**one, "method": method} for one in tried[_start(method)]]
    return rows


def _try(
    config: Config,
    paths: Paths,
    texts: dict,
    task: TextStandIn,
    number: int,
    start: str,
    candidates: list[dict],
    trials: Trials,
) -> list[dict]:
    """Return the rows of a stand-in for a model without, or one with pretraining."""
    end = tokenizer.end_of_text(tokenizer.load(paths.tokenizer()))
    # The smaller part: what dp_mixmin fine-tunes on when the mixture has a part of its own.
    parts = train_parts(config, "dp_mixmin" if "dp_mixmin" in config.methods else "uniform")

    @cache
    def pretrained() -> GPT2LMHeadModel:
        return _pretrained(config, paths, texts, task, start, trials)

    def untouched() -> float:
        found = _score(config, pretrained(), task)
        say(f"  {start}, stand-in {task.name}: {found:.1f} before fine-tuning")
        return found

    def attempt(index: int, candidate: dict) -> float:
        trial = trainable.choose(copy.deepcopy(pretrained()), config.finetune.trainable)
        sums = text_sums(trial, task.finetune, end, config)
        spec = finetune_spec(config, FinetuneSettings(**candidate), config.tune.epsilon, parts)
        noise = InsecureNoise(config.tune.seed, f"stand-in {number} {start} {index}")
        fine_tune(sums, spec, candidate["learning_rate"], noise)
        return _score(config, trainable.merged(trial), task)

    about = {"start": start, "stand-in": task.name}
    rows = [row(start, None, task.name, perplexity=trials.result({**about, "candidate": None}, untouched))]
    for index, candidate in enumerate(candidates):
        found = trials.result({**about, "candidate": candidate}, partial(attempt, index, candidate))
        rows.append(row(start, candidate, task.name, perplexity=found))
    return rows


def _pretrained(
    config: Config, paths: Paths, texts: dict, task: TextStandIn, start: str, trials: Trials
) -> GPT2LMHeadModel:
    """Return the GPT-2 that a stand-in's trials start from."""
    trained, settings = tokenizer.load(paths.tokenizer()), config.text.pretrain
    end = tokenizer.end_of_text(trained)
    model = language.build(settings, trained.get_vocab_size(), config.text.context, end, settings.seed)
    if start == "uniform":
        weights = {name: 1 / len(task.others) for name in task.others}

        def train(state: Progress) -> None:
            train_mixture(model, texts, weights, config.text, settings, end, seed=settings.seed, state=state, say=say)

        trials.model({"stand-in": task.name}, model, train)
    return model


def _score(config: Config, model, task: TextStandIn) -> float:
    scores = score(model, task.test.tokens, config.text)
    return perplexities(scores, task.test.units())["perplexity"]
