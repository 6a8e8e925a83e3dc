"""Which parameters a private fine-tuning trains; the rest is frozen. A public choice (docs/rules.md, rule 9)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch
from torch import nn

from dpmixmin.errors import UserError
from dpmixmin.text_sections import Trainable

_NORMS = (nn.LayerNorm, nn.GroupNorm)
_PROJECTIONS = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
"""Every matrix of a GPT-2 block."""


def choose(model: nn.Module, trainable: Trainable, seed: int = 0) -> nn.Module:
    """Set ``requires_grad`` by a config's choice; return the model to train.

    ``blocks`` of a GPT-2 trains the last n blocks, the final norm and the output matrix. That matrix IS the token
    embedding (tied weights), so training it moves the network's input too, by the sum of both gradients.
    ``lora`` adds ``B A`` to every matrix of every block, scaled by 1, with A from the public seed (uniform, variance
    ``1 / (3 inputs)``) and B zero, so that the model starts as it is. Nothing else trains. :func:`merged` undoes it.

    Args:
        model: a GPT-2, or a network of ``models/networks.py``; changed in place.
        trainable: the choice.
        seed: public seed of LoRA's start.

    Returns:
        The model itself, or peft's wrapper around it for ``lora``.

    Raises:
        UserError: the model has not what the choice names.
    """
    is_gpt2 = hasattr(model, "transformer")
    if trainable.which in ("blocks", "lora") and not is_gpt2:
        raise UserError(f"trainable.which: {trainable.which} is for language models; take all, norms or biases")
    model.requires_grad_(False)
    if trainable.which == "lora":
        return _with_lora(model, trainable.rank, seed)
    chosen = list(_chosen(model, trainable))
    if not chosen:
        raise UserError(f"trainable.which: this model has no {trainable.which}; nothing would be trained")
    for parameter in chosen:
        parameter.requires_grad_(True)
    return model


def _chosen(model: nn.Module, trainable: Trainable) -> Iterable[nn.Parameter]:
    match trainable.which:
        case "all":
            return model.parameters()
        case "norms":
            return (p for module in model.modules() if isinstance(module, _NORMS) for p in module.parameters())
        case "biases":
            return (p for name, p in model.named_parameters() if name.rpartition(".")[2] == "bias")
        case "blocks":
            blocks = model.transformer.h
            if trainable.blocks > len(blocks):
                raise UserError(
                    f"trainable.blocks: {trainable.blocks} is more than the model's {len(blocks)}; lower it"
                )
            parts = (*blocks[-trainable.blocks :], model.transformer.ln_f, model.lm_head)
            return (parameter for part in parts for parameter in part.parameters())
    raise ValueError(trainable.which)


def _with_lora(model: nn.Module, rank: int, seed: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=rank,
        lora_dropout=0.0,
        target_modules=_PROJECTIONS,
        # transformers' Conv1D keeps its matrix as (inputs, outputs).
        fan_in_fan_out=True,
    )
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), warnings.catch_warnings():
        # peft 0.21 asks transformers 5 for a property by its former name.
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = get_peft_model(model, settings)
    # Drawn again by a generator of its own, on the CPU, so that the start is the same on every device.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_A" in name:
                bound = 1 / math.sqrt(parameter.shape[1])
                parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * bound)
    return wrapped


def merged(model: nn.Module) -> nn.Module:
    """Return the plain model again, with LoRA's updates added to its matrices; all its parameters are trainable."""
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    return model.requires_grad_(True)
