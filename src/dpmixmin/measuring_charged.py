"""Measuring a deployment's model on its test part, for a price: what all kinds of models share.

One ledger entry on a part that no other mechanism reads: at the chain's epsilon the total stays the same. Writes, per
evaluation cell, ``metrics.json`` (each metric with the standard error of its noise), ``released.json`` (the noisy sum
behind it), ``privacy.json``, ``manifest.json`` in ``released/``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dpmixmin import artifacts, evaluation, provenance
from dpmixmin.cells import Cell, cells_of, finetuned_behind, select
from dpmixmin.config import Config
from dpmixmin.data import split
from dpmixmin.data.fetch import say
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import Ledger, Mechanism
from dpmixmin.privacy.noise import noise_source
from dpmixmin.specs import evaluation_spec

UnitVectors = Callable[[Cell, str, object], np.ndarray]
"""Gives the vectors of norm at most 1 of the units (evaluation.py): of a cell, the model's folder, the records of the
test part."""


def measure(config: Config, stage: str, made_by: tuple[str, ...], unit_vectors: UnitVectors) -> None:
    """Measure the model of every evaluation cell.

    Args:
        config: the experiment.
        stage: name of the stage, for its code.
        made_by: stages that made the private tables.
        unit_vectors: what each unit contributes; a unit's must not depend on another's.
    """
    paths, ledger = Paths(config.experiment), Ledger.of(config)
    for cell in select(cells_of(config), stage="evaluation"):
        _measure(config, ledger, paths, cell, stage, made_by, unit_vectors)
        say(f"  {cell.folder(paths)}")


def _measure(
    config: Config,
    ledger: Ledger,
    paths: Paths,
    cell: Cell,
    stage: str,
    made_by: tuple[str, ...],
    unit_vectors: UnitVectors,
) -> None:
    model_folder = finetuned_behind(config, cell).folder(paths)
    upstream = artifacts.read_json(f"{model_folder}/privacy.json")
    parents = [artifacts.parent(model_folder)]
    spec = evaluation_spec(config, cell.epsilon)
    spec.spent()
    noise = noise_source(config.privacy.insecure_seed, cell.folder(paths))
    purpose = Mechanism(
        spec=spec,
        cell=cell.coordinates(),
        inputs={"model": parents[0]["sha256"]},
        made=provenance.made(config.subtree("evaluate_private", cell.task), made_by),
        code=provenance.code_digest(stage),
        private_randomness=noise.private,
        total_variation=spec.total_variation(evaluation.dimension(config)),
    )
    wanted = split.partition(ledger.keys, config.private, cell.seed)
    with ledger.open(("test",), purpose, wanted.name) as release:
        if not release.committed:
            records = split.open_part(release, paths, wanted, cell.seed)
            released = spec.release_sum(unit_vectors(cell, model_folder, records), noise)
            files = {
                "metrics.json": artifacts.json_bytes(evaluation.metrics_of(config, released, spec.noise_std)),
                "released.json": artifacts.json_bytes({"noisy_sum": released.tolist(), "noise_std": spec.noise_std}),
            }
            manifest = artifacts.manifest(
                "evaluate_private",
                config=config.shown("evaluate_private", cell.task),
                code=provenance.code_digest(stage),
                parents=[*parents, release.parent(paths.records()), release.parent(paths.split(cell.seed))],
                cell=cell.coordinates(),
                seed=cell.seed,
            )
            release.commit(files, manifest)
        entries = [*(entry["entry"] for entry in upstream["entries"]), release.entry]
        statement = ledger.statement(entries, delta=config.privacy.delta, tuning=upstream["tuning"])
        release.publish(cell.folder(paths), {"privacy.json": artifacts.json_bytes(statement)})
