"""Choose one method's fine-tuning settings on public stand-ins.

The method is played through on stand-in tasks at ``tune.epsilon`` and the run's nominal sizes: mixture, pretraining,
then DP-SGD for each candidate; "do not fine-tune" is one of the candidates. Every method gets the same candidates.

Reads: the proxy, the public tables, the mixture's settings. Writes: ``public/settings/finetune/method=…/
{settings.json,curve.parquet}``. Touches nothing private; its noise is on public data, so it is seeded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch

from dpmixmin import artifacts
from dpmixmin.cells import mixing_parts, train_parts
from dpmixmin.config import Config
from dpmixmin.data.fetch import say
from dpmixmin.data.records import Records
from dpmixmin.finetune.dp_sgd import ClippedSum, fine_tune
from dpmixmin.metrics import auc
from dpmixmin.mixing.learners import learn, learn_nonprivate, proportional, uniform
from dpmixmin.mixing.objective import SourceTable, source_probabilities
from dpmixmin.models import networks, trainable
from dpmixmin.paths import Paths
from dpmixmin.pretrain.train import soft_targets, train_public
from dpmixmin.privacy.access import Progress
from dpmixmin.privacy.noise import InsecureNoise
from dpmixmin.proxies.joint import axis_labels, load_proxy, source_predictions
from dpmixmin.sections import METHODS, FinetuneSettings, MixtureSettings
from dpmixmin.specs import finetune_spec, mixture_spec
from dpmixmin.tuning.finetune import KEYS, row, write
from dpmixmin.tuning.standins import StandIn, balanced_candidates, stand_ins
from dpmixmin.tuning.trials import Trials


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--method", choices=METHODS, required=True, help="method to tune")


def run(config: Config, args) -> None:
    """Try every candidate on every stand-in task and write the choice with its curve."""
    torch.set_num_threads(config.threads)
    paths = Paths(config.experiment)
    rows, parents = [], []
    tuned = config.finetune.settings is None
    if tuned:
        folders = [paths.source("sources"), paths.source("standins"), paths.proxy(), paths.settings("mixture")]
        parents = [artifacts.parent(folder) for folder in folders]
    with Trials(config, "tune_finetune", paths.finetune_settings(args.method), parents) as trials:
        if tuned:
            rows = _try_all(config, paths, args.method, trials)
        write(config, args.method, "tune_finetune", rows, "auc", parents)


def _try_all(config: Config, paths: Paths, method: str, trials: Trials) -> list[dict]:
    sources, records = (Records.read_public(paths.source(name)) for name in ("sources", "standins"))
    axes = axis_labels(records, config)
    proxy = load_proxy(paths.proxy(), records.features.shape[1], config)
    predictions = source_predictions(proxy, records.features)
    grid = config.tune.finetune
    keys = {key: getattr(grid, key) for key in KEYS}
    candidates = balanced_candidates(keys, grid.budget, config.tune.seed)
    parts = train_parts(config, method)
    alongside = ()
    if method == "dp_mixmin" and config.privacy.composition == "sequential":
        alongside = mixture_spec(config, _mixture_settings(paths), config.tune.epsilon).events()

    def pretrained(number: int, task: StandIn) -> torch.nn.Module:
        model = networks.build(config.inputs, records.features.shape[1], config.pretrain, 1, config.pretrain.seed)

        def train(state: Progress) -> None:
            weights = _weights(config, paths, method, task, predictions, number)
            targets = soft_targets(axis_labels(sources, config), weights)
            train_public(model, sources.features, targets, config.pretrain, config.pretrain.seed, state=state)

        if method != "none":
            trials.model({"method": method, "stand-in": task.name}, model, train)
        return model

    def untouched(model: Callable[[], torch.nn.Module], task: StandIn) -> float:
        found = _score(task, model())
        say(f"  {method}, stand-in {task.name}: {found:.3f} before fine-tuning")
        return found

    def attempt(model: Callable[[], torch.nn.Module], task: StandIn, candidate: dict, label: str) -> float:
        train = np.concatenate([getattr(task, part) for part in parts])
        trial = trainable.choose(copy.deepcopy(model()), config.finetune.trainable)
        unit_index = np.arange(len(train))
        sums = ClippedSum(
            trial, records.features[train], task.labels[train], unit_index, len(train),
            config.finetune.physical_batch,
        )  # fmt: skip
        spec = finetune_spec(config, FinetuneSettings(**candidate), config.tune.epsilon, parts, alongside=alongside)
        fine_tune(sums, spec, candidate["learning_rate"], InsecureNoise(config.tune.seed, label))
        return _score(task, trial)

    tasks = stand_ins(records, axes, config, grid.tasks)
    trials.expect(len(tasks) * (1 + len(candidates)))
    rows = []
    for number, task in enumerate(tasks):
        # Pretrained once, and only if some trial is left.
        model = cache(partial(pretrained, number, task))
        about = {"method": method, "stand-in": task.name}
        found = trials.result({**about, "candidate": None}, partial(untouched, model, task))
        rows.append(row(method, None, task.name, auc=found))
        for index, candidate in enumerate(candidates):
            label = f"stand-in {number} {method} {index}"
            found = trials.result({**about, "candidate": candidate}, partial(attempt, model, task, candidate, label))
            rows.append(row(method, candidate, task.name, auc=found))
    return rows


def _weights(
    config: Config, paths: Paths, method: str, task: StandIn, predictions: np.ndarray, number: int
) -> np.ndarray:
    """Return the weights that a method, not ``none``, finds for a stand-in task."""
    if method == "uniform":
        return uniform(len(config.axes)).weights
    if method == "proportional":
        axes = axis_labels(Records.read_public(paths.source("sources")), config)
        return proportional((axes == 1).sum(axis=0).tolist()).weights
    p = source_probabilities(predictions, task.labels)
    if method == "mixmin":
        return learn_nonprivate(SourceTable.of_labels(p[np.concatenate([task.mixing, task.finetune])])).weights
    settings = _mixture_settings(paths)
    mixing = np.concatenate([getattr(task, part) for part in mixing_parts(config)])
    spec = mixture_spec(config, settings, config.tune.epsilon)
    noise = InsecureNoise(config.tune.seed, f"stand-in {number} mixture")
    table = SourceTable.of_labels(p[mixing])
    return learn(config.mixture.learner, table, spec, settings.learning_rate, noise).weights


def _mixture_settings(paths: Paths) -> MixtureSettings:
    return MixtureSettings(**artifacts.read_json(f"{paths.settings('mixture')}/settings.json")["choice"])


def _score(task: StandIn, model: torch.nn.Module) -> float:
    logits = networks.predict(model, torch.from_numpy(task.records.features[task.test]))[:, 0].numpy()
    return auc(task.labels[task.test], logits)
