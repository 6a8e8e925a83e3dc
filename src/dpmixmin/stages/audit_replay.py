"""Replay every mechanism on neighbours with frozen randomness: exact, and a matter of seconds.

Reads: chosen settings; in a study the prediction table, the sensitive records and the splits of the first seed, in a
deployment public stand-ins. Writes: ``audits/replay/{audit.json,scores.parquet}`` in ``study/``, in a deployment in
``public/``. Spends nothing.
"""

from __future__ import annotations

import torch

from dpmixmin import artifacts
from dpmixmin.audit import replays, subjects
from dpmixmin.audit.finding import Finding
from dpmixmin.audit.replays import ReplayResult
from dpmixmin.audit.report import publish
from dpmixmin.cells import audited_mixtures, audited_trainings, audits_room
from dpmixmin.config import Config
from dpmixmin.data.fetch import say
from dpmixmin.paths import Paths
from dpmixmin.privacy.mechanisms import MechanismSpec
from dpmixmin.sections import FinetuneSettings, MixtureSettings
from dpmixmin.specs import chain_finetune_spec, evaluation_spec, mixture_spec


def add_arguments(parser) -> None:
    """Nothing to add."""


def run(config: Config, args) -> None:
    """Replay the mixture, the fine-tuning of each audited method, and a deployment's evaluation."""
    torch.set_num_threads(config.threads)
    paths = Paths(config.experiment)
    results, findings, parents = [], [], []
    for replayed, spec in (
        *_mixture(config, paths, parents),
        *_training(config, paths, parents),
        *_evaluation(config),
    ):
        results += replayed
        findings.append(_finding(replays.worst(replayed), spec))
        say(f"  {findings[-1].mechanism}: replayed on neighbours")
    folder = paths.audit(audits_room(config), "replay")
    publish(folder, "audit_replay", config, findings, replays.scores(results), parents)


def _mixture(config: Config, paths: Paths, parents: list[dict]) -> list[tuple[list[ReplayResult], MechanismSpec]]:
    # Only the noise depends on epsilon, and a replay freezes it: one cell stands for all.
    for cell in audited_mixtures(config)[:1]:
        folder = paths.settings("mixture")
        settings = MixtureSettings(**artifacts.read_json(f"{folder}/settings.json")["choice"])
        spec = mixture_spec(config, settings, cell.epsilon)
        with subjects.mixture_table(config, paths, cell) as (table, more):
            parents += [artifacts.parent(folder), *more]
            limit = None if table.names is None else config.private.records_per_step
            found = replays.replay_mixture(table, spec, config.mixture.learner, settings.learning_rate, limit)
        return [(found, spec)]
    return []


def _training(config: Config, paths: Paths, parents: list[dict]) -> list[tuple[list[ReplayResult], MechanismSpec]]:
    found = []
    for cell in {cell.method: cell for cell in reversed(audited_trainings(config))}.values():
        folder = paths.finetune_settings(cell.method)
        choice = artifacts.read_json(f"{folder}/settings.json")["choice"]
        if choice is None:
            continue
        mixture = None
        if config.privacy.composition == "sequential" and cell.method == "dp_mixmin":
            mixture = MixtureSettings(**artifacts.read_json(f"{paths.settings('mixture')}/settings.json")["choice"])
        settings = FinetuneSettings(**choice)
        spec = chain_finetune_spec(config, cell, settings, mixture)
        with subjects.training(config, paths, cell) as subject:
            parents += [artifacts.parent(folder), *subject.parents]
            found.append((replays.replay_training(subject.build, spec, settings.learning_rate), spec))
    return found


def _evaluation(config: Config) -> list[tuple[list[ReplayResult], MechanismSpec]]:
    """A study measures without charge; only a deployment has this mechanism."""
    if config.mode == "study" or config.private.parts.test == 0:
        return []
    spec = evaluation_spec(config, config.evaluation.epsilon or config.privacy.epsilons[0])
    bins = None if config.text else config.evaluation.bins
    return [(replays.replay_evaluation(spec, config.evaluation.loss_bound, bins), spec)]


def _finding(worst: ReplayResult, spec: MechanismSpec) -> Finding:
    # Exact, so its p-value is 0 or 1: it takes no share of the gate's false alarms, and is counted all the same.
    return Finding(
        audit="replay",
        mechanism=worst.mechanism,
        canary=worst.neighbour,
        statistic="distance",
        unit=spec.unit,
        delta=spec.delta,
        ratio=worst.ratio,
        p_value=float(worst.holds),
        best_p=0.0,
        gated=True,
    )
