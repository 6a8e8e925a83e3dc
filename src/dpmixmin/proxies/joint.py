"""The joint multi-label proxy: one network, one output per public source (DP-MixMin paper, section 4.2)."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from dpmixmin.config import Config
from dpmixmin.data.records import Records
from dpmixmin.models import networks
from dpmixmin.pretrain.train import train_public
from dpmixmin.privacy.access import Progress


def axis_labels(records: Records, config: Config) -> np.ndarray:
    """Return the 0/1 labels of all axes, float32 of shape (n, k), in the config's order."""
    return np.stack([records.label(rule) for rule in config.axes.values()], axis=1)


def train_proxy(sources: Records, config: Config, state: Progress | None = None) -> tuple[nn.Module, list[float]]:
    """Train the proxy on the public sources; return it with its loss curve.

    Args:
        sources: the public records.
        config: axes, network and budget.
        state: where the state is kept from time to time and gone on from; the caller deletes it.
    """
    model = build_proxy(sources.features.shape[1], config)
    labels = axis_labels(sources, config)
    losses = train_public(model, sources.features, labels, config.proxy, config.proxy.seed, state=state)
    return model, losses


def build_proxy(width: int, config: Config) -> nn.Module:
    """Build an untrained proxy for records of ``width`` features."""
    return networks.build(config.inputs, width, config.proxy, len(config.axes), config.proxy.seed)


def load_proxy(folder: str, width: int, config: Config) -> nn.Module:
    """Return the trained proxy of an artefact, for records of ``width`` features."""
    return networks.load_state(build_proxy(width, config), folder)


def source_predictions(model: nn.Module, features: np.ndarray, batch: int = 2000) -> np.ndarray:
    """Return f_i(x), float32 of shape (n, k), in [0, 1]; see :func:`networks.predict` for ``batch``."""
    # The sigmoid too goes batch by batch: vectorised over a whole table, its last bits depend on a row's position.
    return networks.predict(nn.Sequential(model, nn.Sigmoid()), torch.from_numpy(features), batch).numpy()
