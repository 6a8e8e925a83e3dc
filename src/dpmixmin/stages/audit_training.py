"""Attack private fine-tuning: one run of it with canaries, and one more without noise.

Reads: the method's settings; in a study the pretrained model and the sensitive records that the method fine-tunes on,
in a deployment public stand-ins and a network at its public initialisation. Writes, per epsilon,
``audits/training/task=…/method=…/eps=…/{audit.json,scores.parquet}`` in ``study/``, in a deployment in ``public/``.
Spends nothing: nothing that is trained here is released, and no model is kept.
"""

from __future__ import annotations

import torch

from dpmixmin import artifacts
from dpmixmin.audit import subjects
from dpmixmin.audit.evidence import of_training
from dpmixmin.audit.report import publish
from dpmixmin.audit.training import audit_training, no_scores
from dpmixmin.cells import Cell, audited_trainings, audits_room, select
from dpmixmin.config import Config
from dpmixmin.data.fetch import say
from dpmixmin.paths import Paths
from dpmixmin.privacy.noise import NoiseSource
from dpmixmin.sections import METHODS, FinetuneSettings, MixtureSettings
from dpmixmin.specs import chain_finetune_spec


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--method", required=True, choices=METHODS, help="method whose fine-tuning is attacked")


def run(config: Config, args) -> None:
    """Audit every epsilon of one method; each distinct spec is trained with canaries once."""
    torch.set_num_threads(config.threads)
    paths = Paths(config.experiment)
    folder = paths.finetune_settings(args.method)
    choice = artifacts.read_json(f"{folder}/settings.json")["choice"]
    for cell in select(audited_trainings(config), method=args.method):
        place = paths.audit(audits_room(config), "training", task=cell.task, method=cell.method, eps=cell.epsilon)
        if choice is None:
            # The stand-ins chose not to fine-tune: there is no mechanism to attack.
            publish(place, "audit_training", config, [], no_scores(), [artifacts.parent(folder)])
            say(f"  {cell.method} at epsilon {cell.epsilon:g}: is not fine-tuned, so there is nothing to attack")
            continue
        _audit(config, paths, cell, FinetuneSettings(**choice), place, [artifacts.parent(folder)])


def _audit(config: Config, paths: Paths, cell: Cell, settings: FinetuneSettings, place: str, parents: list) -> None:
    mixture = None
    if config.privacy.composition == "sequential" and cell.method == "dp_mixmin":
        folder = paths.settings("mixture")
        mixture = MixtureSettings(**artifacts.read_json(f"{folder}/settings.json")["choice"])
        parents = [*parents, artifacts.parent(folder)]
    spec = chain_finetune_spec(config, cell, settings, mixture)
    with subjects.training(config, paths, cell) as subject:
        audit = audit_training(
            subject.build,
            spec,
            settings.learning_rate,
            NoiseSource(),
            canaries=config.audit.canaries,
            records=config.audit.canaries,
            altered=subject.altered,
            seed=config.audit.seed,
        )
        found = of_training(audit, spec, cell)
        publish(place, "audit_training", config, found, audit.scores, [*parents, *subject.parents], spec=spec)
    say(f"  {cell.method} at epsilon {cell.epsilon:g}: one run with canaries, one without noise")
