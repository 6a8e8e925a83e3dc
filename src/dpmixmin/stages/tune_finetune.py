"""Choose one method's fine-tuning settings on public stand-ins.

The method is played through on stand-in tasks at ``tune.epsilon`` and the run's nominal sizes: mixture, pretraining,
then DP-SGD for each candidate; "do not fine-tune" is one of the candidates. Every method gets the same candidates.

Reads: the proxy, the public tables, the mixture's settings. Writes: ``public/settings/finetune/method=…/
{settings.json,curve.parquet}``. Touches nothing private; its noise is on public data, so it is seeded.
"""

from __future__ import annotations

import copy

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
from dpmixmin.privacy.noise import InsecureNoise
from dpmixmin.proxies.joint import axis_labels, load_proxy, source_predictions
from dpmixmin.sections import METHODS, FinetuneSettings, MixtureSettings
from dpmixmin.specs import finetune_spec, mixture_spec
from dpmixmin.tuning.finetune import KEYS, row, write
from dpmixmin.tuning.standins import StandIn, balanced_candidates, stand_ins


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--method", choices=METHODS, required=True, help="method to tune")


def run(config: Config, args) -> None:
    """Try every candidate on every stand-in task and write the choice with its curve."""
    torch.set_num_threads(config.threads)
    paths = Paths(config.experiment)
    rows, parents = [], []
    if config.finetune.settings is None:
        folders = [paths.source("sources"), paths.source("standins"), paths.proxy(), paths.settings("mixture")]
        parents = [artifacts.parent(folder) for folder in folders]
        rows = _try_all(config, paths, args.method)
    write(config, args.method, "tune_finetune", rows, "auc", parents)


def _try_all(config: Config, paths: Paths, method: str) -> list[dict]:
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
    rows = []
    for number, task in enumerate(stand_ins(records, axes, config, grid.tasks)):
        weights = _weights(config, paths, method, task, predictions, number)
        model = networks.build(config.inputs, records.features.shape[1], config.pretrain, 1, config.pretrain.seed)
        if weights is not None:
            targets = soft_targets(axis_labels(sources, config), weights)
            train_public(model, sources.features, targets, config.pretrain, config.pretrain.seed)
        train = np.concatenate([getattr(task, part) for part in parts])
        rows.append(row(method, None, task.name, auc=_score(task, model)))
        say(f"  {method}, stand-in {task.name}: {rows[-1]['auc']:.3f} before fine-tuning")
        for index, candidate in enumerate(candidates):
            trial = trainable.choose(copy.deepcopy(model), config.finetune.trainable)
            unit_index = np.arange(len(train))
            sums = ClippedSum(
                trial, records.features[train], task.labels[train], unit_index, len(train),
                config.finetune.physical_batch,
            )  # fmt: skip
            spec = finetune_spec(
                config, FinetuneSettings(**candidate), config.tune.epsilon, parts, alongside=alongside
            )
            noise = InsecureNoise(config.tune.seed, f"stand-in {number} {method} {index}")
            fine_tune(sums, spec, candidate["learning_rate"], noise)
            rows.append(row(method, candidate, task.name, auc=_score(task, trial)))
    return rows


def _weights(
    config: Config, paths: Paths, method: str, task: StandIn, predictions: np.ndarray, number: int
) -> np.ndarray | None:
    """Return the weights that a method finds for a stand-in task, or None for ``none``."""
    if method == "none":
        return None
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
