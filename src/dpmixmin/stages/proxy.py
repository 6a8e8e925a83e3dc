"""Train the joint multi-label proxy.

Reads: ``public/sources/sources``. Writes: ``public/proxies/joint/{model.safetensors,loss.parquet}``. Touches nothing
private.
"""

from __future__ import annotations

import pyarrow as pa
import torch

from dpmixmin import artifacts, provenance
from dpmixmin.config import Config
from dpmixmin.data.fetch import say
from dpmixmin.data.records import Records
from dpmixmin.models.device import best
from dpmixmin.models.networks import state_bytes
from dpmixmin.paths import Paths
from dpmixmin.pretrain.durable import Work
from dpmixmin.privacy.access import Progress
from dpmixmin.proxies.joint import train_proxy


def add_arguments(parser) -> None:
    """Nothing to add."""


def run(config: Config, args) -> None:
    """Train and write the proxy with its public loss curve."""
    torch.set_num_threads(config.threads)
    paths = Paths(config.experiment)
    source = paths.source("sources")
    manifest = artifacts.manifest(
        "proxy",
        config=config.shown("proxy"),
        code=provenance.code_digest("proxy"),
        parents=[artifacts.parent(source)],
        seed=config.proxy.seed,
        device=best().type,
    )

    def train(state: Progress) -> dict[str, bytes]:
        model, losses = train_proxy(Records.read_public(source), config, state)
        say(f"proxy of {len(config.axes)} sources: public loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        curve = pa.table({"step": list(range(1, len(losses) + 1)), "loss": losses})
        return {"model.safetensors": state_bytes(model), "loss.parquet": artifacts.parquet_bytes(curve)}

    with Work(paths) as work:
        work.make(paths.proxy(), manifest, train)
