"""Pretrain the downstream model on the weighted public mixture; for method ``none``, write the initialisation.

Reads: weights, ``public/sources/sources``. Writes, per cell, ``model.safetensors``, ``loss.parquet``,
``privacy.json``, ``manifest.json``. Touches nothing private: it post-processes the weights, so its guarantee is
theirs, and the room is theirs too.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from dpmixmin import artifacts, provenance
from dpmixmin.cells import cells_of, mixture_cell, select
from dpmixmin.config import Config
from dpmixmin.data.fetch import say
from dpmixmin.data.records import Records
from dpmixmin.models import networks
from dpmixmin.paths import Paths
from dpmixmin.pretrain.inherited import statement_of
from dpmixmin.pretrain.train import soft_targets, train_public
from dpmixmin.privacy.ledger import Ledger
from dpmixmin.proxies.joint import axis_labels
from dpmixmin.sections import METHODS


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--method", required=True, choices=METHODS, help="where the weights come from")
    parser.add_argument("--task", default="", help="sensitive task (not for none, uniform and proportional)")


def run(config: Config, args) -> None:
    """Pretrain every cell of one task and method."""
    torch.set_num_threads(config.threads)
    paths, ledger = Paths(config.experiment), Ledger.of(config)
    source = paths.source("sources")
    source_parent = artifacts.parent(source)
    sources = Records.read_public(source)
    axes = axis_labels(sources, config)
    for cell in select(cells_of(config), stage="pretrained", task=args.task, method=args.method):
        mixture = mixture_cell(config, cell.task, cell.method, cell.epsilon, cell.seed)
        seed = config.pretrain.seed + cell.seed
        model = networks.build(config.inputs, sources.features.shape[1], config.pretrain, 1, seed)
        losses: list[float] = []
        parents = [source_parent]
        if mixture is not None:
            folder = mixture.folder(paths)
            parents.append(artifacts.parent(folder))
            named = artifacts.read_json(f"{folder}/weights.json")["weights"]
            targets = soft_targets(axes, np.array([named[name] for name in config.axes]))
            losses = train_public(model, sources.features, targets, config.pretrain, seed)
        curve = pa.table(
            {"step": pa.array(range(1, len(losses) + 1), pa.int64()), "loss": pa.array(losses, pa.float64())}
        )
        files = {
            "model.safetensors": networks.state_bytes(model),
            "loss.parquet": artifacts.parquet_bytes(curve),
            "privacy.json": artifacts.json_bytes(statement_of(config, ledger, paths, mixture)),
        }
        manifest = artifacts.manifest(
            "pretrain",
            config=config.shown("pretrain"),
            code=provenance.code_digest("pretrain"),
            parents=parents,
            cell=cell.coordinates(),
            seed=seed,
        )
        artifacts.publish(cell.folder(paths), files, manifest)
        say(f"  {cell.folder(paths)}")
