"""The gradient of each record alone, for any model and any per-record loss (docs/rules.md, rules 7 and 8).

A loss is a function ``loss(model, *batch)``: ``model`` is called like the network, each tensor of ``batch`` has the
records along its first axis, and the result has one value per record. It must treat records alike and apart. The
gradient of record i is then that of ``loss(model, *(part[i:i+1] for part in batch))``.

Two engines compute all records at once, and each is wrong or fails on some models: Opacus on position embeddings that
records share and on in-place layers, torch.func where Python code branches on the values of a tensor. So none is
believed: :func:`per_record_gradients` takes the first whose gradients equal, on public examples, those of a loop of
batches of 1. torch.func is asked first: it covers more models and is the faster one on ours.

Dropout is off in every engine. Its masks come from torch's global generator, which private code does not use (rule
14), and would change with the physical batch (rule 4).
"""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import binary_cross_entropy_with_logits

from dpmixmin.errors import UserError
from dpmixmin.models.networks import refuse_batch_statistics

Loss = Callable[..., torch.Tensor]
"""``loss(model, *batch)`` of shape (records,)."""

_RELATIVE = 1e-4
"""A parameter's gradient is wrong when it is off by this part of its largest coordinate. Wrong engines are off by a
part of order 1; equal ones, in float64, by 1e-12, or by 1e-6 where a network computes something in float32."""

_FLOOR = 1e-6
"""Differences below this part of the record's largest coordinate are rounding: some true gradients are zero."""


def binary_cross_entropy(model: Callable, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return each record's loss for a model of one logit; a record whose label is NaN has loss 0.

    Args:
        model: gives logits of shape (n, 1).
        features: shape (n, d).
        labels: 0, 1 or NaN, shape (n,).
    """
    present = torch.isfinite(labels)
    targets = torch.where(present, labels, 0.0)
    losses = binary_cross_entropy_with_logits(model(features).squeeze(1), targets, reduction="none")
    return torch.where(present, losses, 0.0)


class PerRecordGradients(ABC):
    """Per-record gradients of a model; build with :func:`per_record_gradients`, which checks them.

    Args:
        model: the network; its weights are read at every call, so it may be trained in between.
        loss: see the module's docstring.

    Attributes:
        parameters: the trainable parameters, tied ones once; the order of a gradient's coordinates.
        size: number of their coordinates.
    """

    engine: str

    def __init__(self, model: nn.Module, loss: Loss):
        self.model, self.loss = model, loss
        self._named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.parameters = list(self._named.values())
        self.size = sum(parameter.numel() for parameter in self.parameters)

    def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
        """Return the records' gradients, shape (records, size)."""
        records = len(batch[0])
        if not records:
            return self.parameters[0].new_zeros(0, self.size)
        return torch.cat([part.reshape(records, -1) for part in self.by_parameter(*batch).values()], dim=1)

    @abstractmethod
    def by_parameter(self, *batch: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the gradients by the parameter's name, each of shape (records, *parameter.shape)."""


class TorchFunc(PerRecordGradients):
    """``vmap`` of the gradient of one record."""

    engine = "torch.func"

    def by_parameter(self, *batch: torch.Tensor) -> dict[str, torch.Tensor]:
        """See the base class."""

        def of_one(weights: dict[str, torch.Tensor], *record: torch.Tensor) -> torch.Tensor:
            def model(*args, **kwargs):
                return functional_call(self.model, weights, args, kwargs)

            return self.loss(model, *(part.unsqueeze(0) for part in record)).squeeze(0)

        weights = {name: parameter.detach() for name, parameter in self._named.items()}
        with _modes(self.model):
            return vmap(grad(of_one), in_dims=(None, *(0 for _ in batch)))(weights, *batch)


class Opacus(PerRecordGradients):
    """Opacus' hooks, attached for the time of a call."""

    engine = "Opacus"

    def by_parameter(self, *batch: torch.Tensor) -> dict[str, torch.Tensor]:
        """See the base class."""
        from opacus.grad_sample import GradSampleModule

        # The hooks listen to layers in training mode only.
        with _modes(self.model, training=_holds_trainable), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hooked = GradSampleModule(self.model, loss_reduction="sum")
            try:
                # `grad` and not `backward`: it leaves the parameters' own .grad alone.
                torch.autograd.grad(self.loss(hooked, *batch).sum(), self.parameters, allow_unused=True)
                return {
                    name: parameter.new_zeros(len(batch[0]), *parameter.shape)
                    if parameter.grad_sample is None
                    else parameter.grad_sample
                    for name, parameter in self._named.items()
                }
            finally:
                hooked.to_standard_module()


ENGINES = (TorchFunc, Opacus)
"""In the order in which they are tried."""


def per_record_gradients(model: nn.Module, loss: Loss, examples: tuple[torch.Tensor, ...]) -> PerRecordGradients:
    """Return the first engine that is right for a model.

    The check runs on a copy of the model in float64, where rounding does not tip a ReLU over, with its weights moved
    a little, so that weights that start at zero hide nothing. The model and torch's generators are left as they were.

    Args:
        model: the network; trainable parameters are those with ``requires_grad``.
        loss: see the module's docstring.
        examples: a batch of at least two PUBLIC records, made up for the check: never private ones.

    Raises:
        UserError: a layer mixes records, nothing is trainable, or no engine is right; names the layer or parameter.
    """
    refuse_batch_statistics(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("the model has no trainable parameter; nothing can be fine-tuned")
    if len(examples[0]) < 2:
        raise ValueError("the check needs two examples: with one, engines that mix records look right")
    device = next(model.parameters()).device
    trial = _moved_copy(model)
    batch = tuple(part.to(device, torch.float64 if part.is_floating_point() else part.dtype) for part in examples)
    faults = []
    # The fork is for networks that draw although dropout is off; their gradients differ, so they are refused.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for engine in ENGINES:
            fault = _fault(engine(trial, loss), batch)
            if fault is None:
                return engine(model, loss)
            faults.append(f"{engine.engine} {fault}")
    raise UserError(
        f"no engine computes this model's per-record gradients: {'; '.join(faults)}; freeze or replace that layer "
        "(for transformers, attn_implementation='eager' often helps)"
    )


def loop_gradient(model: nn.Module, loss: Loss, record: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Return one record's gradient by plain autograd in a batch of 1, by parameter: what the engines must equal.

    Args:
        model: the network.
        loss: see the module's docstring.
        record: a batch of one record.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with _modes(model), torch.enable_grad():
        value = loss(model, *record)
        if value.shape != (1,):
            raise ValueError("a loss must give one value per record")
        parts = torch.autograd.grad(value.sum(), list(named.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(named, parts, strict=True))


def _fault(engine: PerRecordGradients, batch: tuple[torch.Tensor, ...]) -> str | None:
    """Return what is wrong with an engine's gradients, in words, or None."""
    try:
        found = engine.by_parameter(*batch)
    except Exception as error:  # whatever a model and an engine do to each other: the engine is not for this model
        return f"fails ({type(error).__name__}: {str(error).strip().splitlines()[0][:120] if str(error) else ''})"
    for number in range(len(batch[0])):
        expected = loop_gradient(engine.model, engine.loss, tuple(part[number : number + 1] for part in batch))
        largest = max(float(part.abs().max()) for part in expected.values())
        for name, part in expected.items():
            if found[name].shape != (len(batch[0]), *part.shape):
                return f"gives the wrong number of gradients of `{name}`"
            allowed = _RELATIVE * float(part.abs().max()) + _FLOOR * largest
            # Written so that NaN is a fault.
            if not float((found[name][number] - part).abs().max()) <= allowed:
                return f"gives wrong gradients of `{name}`"
    return None


def _moved_copy(model: nn.Module) -> nn.Module:
    """Return a float64 copy, its trainable weights moved by N(0, 0.02**2) from a generator of its own."""
    trial = copy.deepcopy(model).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trial.parameters():
            if parameter.requires_grad:
                step = 0.02 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter += step.to(parameter.device)
    return trial


def _holds_trainable(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


@contextmanager
def _modes(model: nn.Module, training: Callable[[nn.Module], bool] = lambda module: False) -> Iterator[None]:
    """Put each layer into training mode where ``training`` says so, else into evaluation; restore afterwards."""
    before = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in before:
            module.training = training(module)
        yield
    finally:
        for module, mode in before:
            module.training = mode
