"""DP-SGD on labelled records: small networks of one logit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import nn

from dpmixmin.config import Config
from dpmixmin.data.records import Records
from dpmixmin.finetune.dp_sgd import ClippedSum
from dpmixmin.models import networks, trainable
from dpmixmin.models.device import best


def starting_model(config: Config, width: int, folder: str | None) -> nn.Module:
    """Return the network before fine-tuning, with what is trainable chosen.

    Args:
        config: inputs, network, what is trainable.
        width: numbers in a record's features.
        folder: of the pretrained model; None: the public initialisation.
    """
    model = networks.build(config.inputs, width, config.pretrain, 1, config.pretrain.seed if folder is None else 0)
    return trainable.choose(model if folder is None else networks.load_state(model, folder), config.finetune.trainable)


def label_sums(
    model: nn.Module,
    records: Records,
    labels: np.ndarray,
    config: Config,
    make: Callable[..., ClippedSum] = ClippedSum,
) -> ClippedSum:
    """Return the sums of clipped unit gradients of a network, which goes to the GPU if there is one.

    Args:
        model: trainable parameters are those with ``requires_grad``.
        records: in the order of (unit, record).
        labels: of the records: 0, 1 or NaN, float32 of shape (n,).
        config: records per step, physical batch.
        make: the class, or what stands for it in an audit.
    """
    units, index = records.units()
    return make(
        model.to(best()),
        records.features,
        labels,
        index,
        units,
        config.finetune.physical_batch,
        names=records.names(),
        records_per_step=config.private.records_per_step,
    )
