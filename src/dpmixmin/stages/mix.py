"""Learn mixture weights: mechanism 1, and its non-private and uniform references.

Reads: the prediction tables (mixing part; all of train under sequential composition, and for the non-private
reference), the mixture's settings.
Writes, per cell, ``weights.json``, ``trajectory.parquet``, ``privacy.json``, ``manifest.json`` in the cell's room:
``released/`` for dp_mixmin, ``study/`` for mixmin, ``public/`` for uniform.
Spends: each dp_mixmin cell is one ledger entry at (epsilon, delta) on what it reads; its share under sequential.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from dpmixmin import artifacts, provenance
from dpmixmin.cells import Cell, cells_of, mixing_parts, select
from dpmixmin.config import Config
from dpmixmin.data import split
from dpmixmin.data.fetch import say
from dpmixmin.data.records import binary_label, labels_from_arrow, strings
from dpmixmin.mixing.learners import Learned, learn, learn_nonprivate, uniform
from dpmixmin.mixing.objective import source_probabilities
from dpmixmin.paths import Paths
from dpmixmin.privacy.access import Access
from dpmixmin.privacy.ledger import Ledger, Mechanism, Study
from dpmixmin.privacy.noise import noise_source
from dpmixmin.sections import MixtureSettings
from dpmixmin.specs import mixture_spec


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--method", required=True, choices=("uniform", "mixmin", "dp_mixmin"), help="how to mix")
    parser.add_argument("--task", default="", help="sensitive task (not for uniform)")


def run(config: Config, args) -> None:
    """Make every mixture cell of one task and method."""
    make = {"uniform": _uniform, "mixmin": _nonprivate, "dp_mixmin": _private}[args.method]
    ledger, paths = Ledger.of(config), Paths(config.experiment)
    for cell in select(cells_of(config), stage="mixture", task=args.task, method=args.method):
        make(config, ledger, paths, cell)
        say(f"  {cell.folder(paths)}")


def _uniform(config: Config, ledger: Ledger, paths: Paths, cell: Cell) -> None:
    statement = ledger.statement([], delta=config.privacy.delta, tuning="none")
    files = {**_files(config, cell, uniform(len(config.axes))), "privacy.json": artifacts.json_bytes(statement)}
    artifacts.publish(cell.folder(paths), files, _manifest(config, cell, []))


def _nonprivate(config: Config, ledger: Ledger, paths: Paths, cell: Cell) -> None:
    """MixMin without privacy, on all of train: an upper bound that only a study may see."""
    folder = paths.predictions(cell.seed)
    with ledger.open(("mixing", "finetune"), Study(f"exact mixture weights of {cell.task}")) as access:
        wanted = split.partition(ledger.keys, config.private, cell.seed)
        p, _ = _probabilities(config, access, folder, cell.task, wanted)
        learned = learn_nonprivate(p)
        statement = {"guarantee": None, "stamp": "NOT PRIVATE: the exact optimum on sensitive records"}
        files = {**_files(config, cell, learned), "privacy.json": artifacts.json_bytes(statement)}
        artifacts.publish(cell.folder(paths), files, _manifest(config, cell, [access.parent(folder)]))


def _private(config: Config, ledger: Ledger, paths: Paths, cell: Cell) -> None:
    settings_folder, folder = paths.settings("mixture"), paths.predictions(cell.seed)
    chosen = artifacts.read_json(f"{settings_folder}/settings.json")
    settings = MixtureSettings(**chosen["choice"])
    parents = [artifacts.parent(settings_folder), artifacts.parent(paths.proxy())]
    spec = mixture_spec(config, settings, cell.epsilon)
    spec.spent()
    noise = noise_source(config.privacy.insecure_seed, cell.folder(paths))
    purpose = Mechanism(
        spec=spec,
        cell=cell.coordinates(),
        inputs={"settings": parents[0]["sha256"], "proxy": parents[1]["sha256"]},
        made=provenance.made(config.subtree("mix", cell.task), ("records", "split", "predict")),
        code=provenance.code_digest("mix"),
        private_randomness=noise.private,
        total_variation=spec.total_variation(len(config.axes)),
    )
    parts, wanted = mixing_parts(config), split.partition(ledger.keys, config.private, cell.seed)
    with ledger.open(parts, purpose, wanted.name) as release:
        if not release.committed:
            p, units = _probabilities(config, release, folder, cell.task, wanted)
            learned = learn(config.mixture.learner, p, spec, settings.learning_rate, noise, units)
            manifest = _manifest(config, cell, [*parents, release.parent(folder)])
            release.commit(_files(config, cell, learned), manifest)
        statement = ledger.statement([release.entry], delta=config.privacy.delta, tuning=chosen["chosen_by"])
        release.publish(cell.folder(paths), {"privacy.json": artifacts.json_bytes(statement)})


def _probabilities(
    config: Config, access: Access, folder: str, task: str, wanted: split.Partition
) -> tuple[np.ndarray, tuple[int, np.ndarray]]:
    """Return the source probabilities of the open parts, and the number of units with each row's unit index."""
    table = access.table(folder, "predictions", ids=wanted.ids, partition=wanted.name)
    predictions = np.stack([table[f"source_{name}"].to_numpy() for name in config.axes], axis=1)
    labels = binary_label(labels_from_arrow(table["labels"]), config.tasks[task])
    names, index = np.unique(strings(table["unit"]), return_inverse=True)
    return source_probabilities(predictions, labels), (len(names), index)


def _files(config: Config, cell: Cell, learned: Learned) -> dict[str, bytes]:
    weights = {name: float(value) for name, value in zip(config.axes, learned.weights, strict=True)}
    steps = {"step": np.arange(len(learned.trajectory))}
    columns = {name: learned.trajectory[:, i] for i, name in enumerate(config.axes)}
    body = {"task": cell.task, "method": cell.method, "epsilon": cell.epsilon, "seed": cell.seed, "weights": weights}
    return {
        "weights.json": artifacts.json_bytes(body),
        "trajectory.parquet": artifacts.parquet_bytes(pa.table({**steps, **columns})),
    }


def _manifest(config: Config, cell: Cell, parents: list[dict]) -> dict:
    return artifacts.manifest(
        "mix",
        config=config.shown("mix", cell.task),
        code=provenance.code_digest("mix"),
        parents=parents,
        cell=cell.coordinates(),
        seed=cell.seed,
    )
