"""Learn mixture weights: mechanism 1, its non-private reference, and the public mixtures.

Reads: the prediction tables (mixing part; all of train under sequential composition, and for the non-private
reference), the mixture's settings; for proportional, the sizes of the public sources.
Writes, per cell, ``weights.json``, ``trajectory.parquet``, ``privacy.json``, ``manifest.json`` in the cell's room:
``released/`` for dp_mixmin, ``study/`` for mixmin, ``public/`` for uniform and proportional.
Spends: each dp_mixmin cell is one ledger entry at (epsilon, delta) on what it reads; its share under sequential.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from dpmixmin import artifacts, jobs, provenance
from dpmixmin.cells import PUBLIC_MIXTURES, Cell, mixing_parts
from dpmixmin.config import Config
from dpmixmin.data import corpora, split
from dpmixmin.data.fetch import say
from dpmixmin.data.records import Records, binary_label
from dpmixmin.mixing.learners import Learned, learn, learn_nonprivate, proportional, uniform
from dpmixmin.mixing.tables import private_table
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import Ledger, Mechanism, Study
from dpmixmin.privacy.noise import noise_source
from dpmixmin.sections import METHODS, MixtureSettings
from dpmixmin.specs import mixture_spec

_MADE_BY = (("records", "split", "predict"), ("text_records", "split", "text_predict"))
"""Stages that made the private tables: of labels, of texts."""


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--method", required=True, choices=METHODS[1:], help="how to mix")
    parser.add_argument("--task", default="", help="sensitive task (not for uniform and proportional)")
    jobs.add_part(parser)


def run(config: Config, args) -> None:
    """Make the mixture cells of one job."""
    makers = {**dict.fromkeys(PUBLIC_MIXTURES, _public), "mixmin": _nonprivate, "dp_mixmin": _private}
    make = makers[args.method]
    ledger, paths = Ledger.of(config), Paths(config.experiment)
    for cell in jobs.own(config, "mixture", args):
        make(config, ledger, paths, cell)
        say(f"  {cell.folder(paths)}")


def _public(config: Config, ledger: Ledger, paths: Paths, cell: Cell) -> None:
    """Equal weights, or weights by the sources' sizes."""
    names, parents = corpora.source_names(config, paths), []
    if cell.method == "uniform":
        learned = uniform(len(names))
    else:
        folders = [paths.text(name) for name in names] if config.text else [paths.source("sources")]
        parents = [artifacts.parent(folder) for folder in folders]
        learned = proportional(_sizes(config, paths, names))
    statement = ledger.statement([], delta=config.privacy.delta, tuning="none")
    files = {**_files(config, paths, cell, learned), "privacy.json": artifacts.json_bytes(statement)}
    artifacts.publish(cell.folder(paths), files, _manifest(config, cell, parents))


def _sizes(config: Config, paths: Paths, names: tuple[str, ...]) -> list[int]:
    """Return the public size of each source: training tokens, or positive records."""
    if config.text:
        return [corpora.read(paths, name).size for name in names]
    records = Records.read_public(paths.source("sources"))
    return [int((binary_label(records.labels, config.axes[name]) == 1).sum()) for name in names]


def _nonprivate(config: Config, ledger: Ledger, paths: Paths, cell: Cell) -> None:
    """MixMin without privacy, on all of train: an upper bound that only a study may see."""
    folder = paths.predictions(cell.seed)
    with ledger.open(("mixing", "finetune"), Study(f"exact mixture weights of {cell.task}")) as access:
        wanted = split.partition(ledger.keys, config.private, cell.seed)
        learned = learn_nonprivate(private_table(config, paths, access, cell, wanted))
        statement = {"guarantee": None, "stamp": "NOT PRIVATE: the exact optimum on sensitive records"}
        files = {**_files(config, paths, cell, learned), "privacy.json": artifacts.json_bytes(statement)}
        artifacts.publish(cell.folder(paths), files, _manifest(config, cell, [access.parent(folder)]))


def _private(config: Config, ledger: Ledger, paths: Paths, cell: Cell) -> None:
    settings_folder, folder = paths.settings("mixture"), paths.predictions(cell.seed)
    chosen = artifacts.read_json(f"{settings_folder}/settings.json")
    settings = MixtureSettings(**chosen["choice"])
    names = corpora.source_names(config, paths)
    proxies = [artifacts.parent(paths.proxy(name)) for name in (names if config.text else ("joint",))]
    parents = [artifacts.parent(settings_folder), *proxies]
    spec = mixture_spec(config, settings, cell.epsilon)
    spec.spent()
    noise = noise_source(config.privacy.insecure_seed, cell.folder(paths))
    purpose = Mechanism(
        spec=spec,
        cell=cell.coordinates(),
        inputs={"settings": parents[0]["sha256"], "proxy": artifacts.digest([one["sha256"] for one in proxies])},
        made=provenance.made(config.subtree("mix", cell.task), _MADE_BY[config.text is not None]),
        code=provenance.code_digest("mix"),
        private_randomness=noise.private,
        total_variation=spec.total_variation(len(names)),
    )
    parts, wanted = mixing_parts(config), split.partition(ledger.keys, config.private, cell.seed)
    with ledger.open(parts, purpose, wanted.name) as release:
        if not release.committed:
            table = private_table(config, paths, release, cell, wanted)
            limit = config.private.records_per_step
            learned = learn(config.mixture.learner, table, spec, settings.learning_rate, noise, limit)
            manifest = _manifest(config, cell, [*parents, release.parent(folder)])
            release.commit(_files(config, paths, cell, learned), manifest)
        statement = ledger.statement([release.entry], delta=config.privacy.delta, tuning=chosen["chosen_by"])
        release.publish(cell.folder(paths), {"privacy.json": artifacts.json_bytes(statement)})


def _files(config: Config, paths: Paths, cell: Cell, learned: Learned) -> dict[str, bytes]:
    names = corpora.source_names(config, paths)
    weights = {name: float(value) for name, value in zip(names, learned.weights, strict=True)}
    steps = {"step": np.arange(len(learned.trajectory))}
    columns = {name: learned.trajectory[:, i] for i, name in enumerate(names)}
    body = {"task": cell.task, "method": cell.method, "epsilon": cell.epsilon, "seed": cell.seed, "weights": weights}
    if config.text:
        body |= {"objective": config.mixture.objective, "tokenizer": corpora.tokenizer_digest(paths)}
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
