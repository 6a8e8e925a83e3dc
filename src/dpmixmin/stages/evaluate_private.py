"""Measure the fine-tuned model on the test part, for a price: what a deployment may know about its own model.

Reads: the fine-tuned model, the sensitive table and the split (test part). Writes, per cell, ``metrics.json`` (loss,
accuracy, AUC, each with the standard error of its noise), ``privacy.json``, ``manifest.json`` in ``released/``.
Spends: one ledger entry on the test part, disjoint from the others: at the chain's epsilon the total stays the same.
"""

from __future__ import annotations

import torch

from dpmixmin import artifacts, evaluation, provenance
from dpmixmin.cells import Cell, cells_of, finetuned_behind, select
from dpmixmin.config import Config
from dpmixmin.data import split
from dpmixmin.data.fetch import say
from dpmixmin.models import networks
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import Ledger, Mechanism
from dpmixmin.privacy.noise import noise_source
from dpmixmin.specs import evaluation_spec


def add_arguments(parser) -> None:
    """Nothing to add: a deployment has one model."""


def run(config: Config, args) -> None:
    """Measure every evaluation cell."""
    torch.set_num_threads(config.threads)
    paths, ledger = Paths(config.experiment), Ledger.of(config)
    for cell in select(cells_of(config), stage="evaluation"):
        _measure(config, ledger, paths, cell)
        say(f"  {cell.folder(paths)}")


def _measure(config: Config, ledger: Ledger, paths: Paths, cell: Cell) -> None:
    model_folder = finetuned_behind(config, cell).folder(paths)
    upstream = artifacts.read_json(f"{model_folder}/privacy.json")
    parents = [artifacts.parent(model_folder)]
    spec, options = evaluation_spec(config, cell.epsilon), config.evaluation
    spec.spent()
    noise = noise_source(config.privacy.insecure_seed, cell.folder(paths))
    purpose = Mechanism(
        spec=spec,
        cell=cell.coordinates(),
        inputs={"model": parents[0]["sha256"]},
        made=provenance.made(config.subtree("evaluate_private", cell.task), ("records", "split")),
        code=provenance.code_digest("evaluate_private"),
        private_randomness=noise.private,
        total_variation=spec.total_variation(2 + 2 * options.bins),
    )
    wanted = split.partition(ledger.keys, config.private, cell.seed)
    with ledger.open(("test",), purpose, wanted.name) as release:
        if not release.committed:
            records = split.open_part(release, paths, wanted, cell.seed)
            model = networks.build(config.inputs, records.features.shape[1], config.pretrain, 1, 0)
            networks.load_state(model, model_folder)
            # One record at a time: in a batch, a record's last bits could depend on how many others there are.
            logits = networks.predict(model, torch.from_numpy(records.features), batch=1)[:, 0].numpy()
            vectors = evaluation.unit_vectors(
                logits, records.label(config.tasks[cell.task]), records.units(), options.loss_bound, options.bins
            )
            released = spec.release_sum(vectors, noise)
            files = {
                "metrics.json": artifacts.json_bytes(evaluation.metrics(released, spec.noise_std, options.loss_bound)),
                "released.json": artifacts.json_bytes({"noisy_sum": released.tolist(), "noise_std": spec.noise_std}),
            }
            manifest = artifacts.manifest(
                "evaluate_private",
                config=config.shown("evaluate_private", cell.task),
                code=provenance.code_digest("evaluate_private"),
                parents=[*parents, release.parent(paths.records()), release.parent(paths.split(cell.seed))],
                cell=cell.coordinates(),
                seed=cell.seed,
            )
            release.commit(files, manifest)
        entries = [*(entry["entry"] for entry in upstream["entries"]), release.entry]
        statement = ledger.statement(entries, delta=config.privacy.delta, tuning=upstream["tuning"])
        release.publish(cell.folder(paths), {"privacy.json": artifacts.json_bytes(statement)})
