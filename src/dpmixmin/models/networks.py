"""The downstream model and the proxy: a small CNN for images, an MLP for flat vectors.

Normalisation is GroupNorm, from the start: batch statistics mix records, so they would break per-example clipping
(rule 7). All outputs are logits.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from dpmixmin.errors import UserError
from dpmixmin.sections import Inputs, Network


def build(inputs: Inputs, width: int, network: Network, outputs: int, seed: int) -> nn.Module:
    """Build a network with a public initialisation.

    Args:
        inputs: says whether a record is an image.
        width: number of features of a record.
        network: channels and hidden width.
        outputs: number of logits.
        seed: public seed of the initialisation.

    Raises:
        UserError: the shape in the config does not fit the records.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if inputs.shape is None:
            return mlp(width, network.hidden, outputs)
        if math.prod(inputs.shape) != width:
            raise UserError(f"inputs.shape: {list(inputs.shape)} does not fit records of {width} features; correct it")
        return cnn(inputs.shape, network.channels, network.hidden, outputs)


def cnn(shape: tuple[int, int, int], channels: tuple[int, int], hidden: int, outputs: int) -> nn.Module:
    """Two convolutions with GroupNorm and pooling, one hidden layer."""
    depth, height, width = shape
    first, second = channels
    return nn.Sequential(
        nn.Unflatten(1, shape),
        nn.Conv2d(depth, first, 3, padding=1),
        nn.GroupNorm(math.gcd(8, first), first),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1),
        nn.GroupNorm(math.gcd(8, second), second),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * (height // 4) * (width // 4), hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


def mlp(width: int, hidden: int, outputs: int) -> nn.Module:
    """One hidden layer with GroupNorm."""
    return nn.Sequential(
        nn.Linear(width, hidden),
        nn.GroupNorm(1, hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


def refuse_batch_statistics(model: nn.Module) -> None:
    """Refuse layers that mix records (rule 7).

    Raises:
        UserError: names the layer.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.modules.instancenorm._InstanceNorm):
            raise UserError(
                f"layer `{name}` ({type(module).__name__}) keeps statistics over records and breaks per-example "
                "clipping; build the model with GroupNorm before pretraining"
            )


@torch.no_grad()
def predict(model: nn.Module, features: torch.Tensor, batch: int = 2000) -> torch.Tensor:
    """Return logits of shape (n, outputs), on the CPU.

    Args:
        model: gives logits.
        features: shape (n, d).
        batch: records at a time. With 1, a record's logits depend on it alone to the last bit; with more, their
            rounding may depend on how many others there are.
    """
    model.eval()
    device = next(model.parameters()).device
    if not len(features):
        return model(features.to(device)).cpu()
    return torch.cat([model(chunk.to(device)).cpu() for chunk in features.split(batch)])


def state_bytes(model: nn.Module) -> bytes:
    """Return a model's weights as safetensors bytes."""
    from safetensors.torch import save

    # Clones: safetensors refuses tensors that share memory, as tied weights do.
    return save({name: value.cpu().clone().contiguous() for name, value in model.state_dict().items()})


def load_bytes(model: nn.Module, data: bytes) -> nn.Module:
    """Load the bytes of :func:`state_bytes` into a model of the same shape."""
    from safetensors.torch import load

    model.load_state_dict(load(data))
    return model


def load_state(model: nn.Module, folder: str) -> nn.Module:
    """Load an artefact's ``model.safetensors`` into a model of the same shape."""
    from safetensors.torch import load_file

    model.load_state_dict(load_file(f"{folder}/model.safetensors"))
    return model
