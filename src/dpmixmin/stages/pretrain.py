"""Pretrain the downstream model on the weighted public mixture; for method ``none``, write the initialisation.

Reads: weights, ``public/sources/sources``. Writes, per cell, ``model.safetensors``, ``loss.parquet``,
``privacy.json``, ``manifest.json``. Touches nothing private: it post-processes the weights, so its guarantee is
theirs, and the room is theirs too.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from dpmixmin import artifacts, jobs, progress, provenance
from dpmixmin.cells import Cell, mixture_cell
from dpmixmin.config import Config
from dpmixmin.data.fetch import say
from dpmixmin.data.records import Records
from dpmixmin.models import networks
from dpmixmin.models.device import best
from dpmixmin.paths import STUDY, Paths
from dpmixmin.pretrain.durable import Work
from dpmixmin.pretrain.inherited import statement_of
from dpmixmin.pretrain.train import soft_targets, train_public
from dpmixmin.privacy.access import Progress
from dpmixmin.privacy.ledger import Ledger
from dpmixmin.proxies.joint import axis_labels
from dpmixmin.ranks import Ranks
from dpmixmin.sections import METHODS


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--method", required=True, choices=METHODS, help="where the weights come from")
    parser.add_argument("--task", default="", help="sensitive task (not for none, uniform and proportional)")
    jobs.add_part(parser)


def run(config: Config, args) -> None:
    """Pretrain the cells of one job."""
    torch.set_num_threads(config.threads)
    paths, ledger = Paths(config.experiment), Ledger.of(config)
    source = paths.source("sources")
    source_parent = artifacts.parent(source)
    sources = Records.read_public(source)
    with Ranks.of_environment() as ranks, Work(paths, ranks) as work:
        for cell in jobs.own(config, "pretrained", args):
            progress.cell(cell.folder(paths))
            mixture = mixture_cell(config, cell.task, cell.method, cell.epsilon, cell.seed)
            manifest = artifacts.manifest(
                "pretrain",
                config=config.shown("pretrain"),
                code=provenance.code_digest("pretrain"),
                parents=[source_parent] + ([artifacts.parent(mixture.folder(paths))] if mixture else []),
                cell=cell.coordinates(),
                seed=config.pretrain.seed + cell.seed,
                device=best().type,
            )
            work.make(
                cell.folder(paths),
                manifest,
                lambda state, cell=cell, mixture=mixture: _train(config, paths, cell, mixture, sources, state, ranks),
                lambda mixture=mixture: {
                    "privacy.json": artifacts.json_bytes(statement_of(config, ledger, paths, mixture))
                },
            )
            say(f"  {cell.folder(paths)}")


def _train(
    config: Config, paths: Paths, cell: Cell, mixture: Cell | None, sources: Records, state: Progress, ranks: Ranks
) -> dict[str, bytes]:
    """Return the files of a model: trained on a mixture, or as it starts."""
    seed = config.pretrain.seed + cell.seed
    model = networks.build(config.inputs, sources.features.shape[1], config.pretrain, 1, seed)
    losses: list[float] = []
    if mixture is not None:
        named = artifacts.read_json(f"{mixture.folder(paths)}/weights.json")["weights"]
        targets = soft_targets(axis_labels(sources, config), np.array([named[name] for name in config.axes]))
        private = mixture.room == STUDY
        losses = train_public(
            model, sources.features, targets, config.pretrain, seed, state=state, ranks=ranks, private=private
        )
    curve = pa.table({"step": pa.array(range(1, len(losses) + 1), pa.int64()), "loss": pa.array(losses, pa.float64())})
    return {"model.safetensors": networks.state_bytes(model), "loss.parquet": artifacts.parquet_bytes(curve)}
