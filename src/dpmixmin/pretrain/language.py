"""Training a GPT-2 on PUBLIC text: the proxies and the pretraining on a mixture.

AdamW with warm-up and a cosine to zero. What is trained is a function of the model's start, the sampler and the
settings: nothing here draws at random. A run that died goes on from its saved state (``loop.py``) and, on a CPU, ends
with the weights of one that did not.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from dpmixmin.errors import UserError
from dpmixmin.models.device import best
from dpmixmin.models.language import fused_attention
from dpmixmin.pretrain import loop
from dpmixmin.pretrain.packing import MixtureSampler
from dpmixmin.privacy.access import Progress
from dpmixmin.ranks import Ranks
from dpmixmin.text_sections import LanguageModel

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

_BETAS = (0.9, 0.95)
_MAX_GRADIENT = 1.0
"""Norm that gradients are scaled down to: the usual guard of public training, no privacy clip."""
_HELDOUT_SHARE = 0.1
"""All measurements of the held-out loss together read at most this part of the training budget."""


@dataclass
class Curve:
    """How a training went (public).

    Attributes:
        rows: one per measurement: ``step``, ``tokens`` trained on so far, ``train_loss`` (mean since the last one),
            ``heldout_loss`` (the sources' means, weighted like the mixture; None if nothing is held out), both in
            nats per token, and ``learning_rate``.
        epochs: how often each source was read.
        stopped: ``budget``: all steps done; ``patience``: the held-out loss no longer fell, and the weights are those
            of its lowest value; ``exhausted``: every source reached its repetition cap.
    """

    rows: list[dict] = field(default_factory=list)
    epochs: dict[str, float] = field(default_factory=dict)
    stopped: str = "budget"


def train(
    model: GPT2LMHeadModel,
    sampler: MixtureSampler,
    heldout: Mapping[str, np.ndarray],
    settings: LanguageModel,
    *,
    state: Progress | None = None,
    say: Callable[[str], None] = lambda line: None,
    ranks: Ranks | None = None,
    private: bool = False,
) -> Curve:
    """Train in place, on the GPU if there is one; the model comes back on the CPU.

    Args:
        model: from ``models.language.build``.
        sampler: gives the batches; at its start.
        heldout: PUBLIC blocks of the sampler's sources that are not trained on, int32 of shape (n_i, context + 1).
        settings: budget and optimiser.
        state: where the state is kept from time to time and gone on from; the caller deletes it. A state of another
            run (settings, data or start differ) is not used. Left out, nowhere.
        say: takes the line that a saved state is gone on from.
        ranks: the processes that train together; left out, this one alone.
        private: whether the mixture was learned without privacy: then the public log has steps only (loop.py).

    Raises:
        UserError: ``patience`` is set and nothing is held out.
        Interrupted: a signal came; the state is saved.
    """
    ranks = ranks or Ranks.single()
    training = _Training(model, sampler, heldout, settings, ranks)
    with fused_attention(model):
        loop.run(training, state, ranks, say, private=private)
    return training.end()


class _Training:
    """One training: what changes with its steps is in :meth:`state`."""

    def __init__(self, model, sampler, heldout, settings, ranks):
        self.model, self.sampler, self.settings, self.ranks = model, sampler, settings, ranks
        self.device = best()
        self.tokens_per_step = settings.batch * sampler.context
        # With a repetition cap, no more steps than there is text for: the schedule ends where the training does.
        wanted = math.ceil(settings.tokens / self.tokens_per_step)
        self.steps = min(wanted, sampler.batches)
        self.last = "budget" if self.steps == wanted else "exhausted"
        self.heldout = self._heldout_part(heldout)
        if settings.patience and not self.heldout:
            raise UserError("patience: nothing is held out to stop by; raise text.heldout or remove patience")
        self.measured = {round((j + 1) * self.steps / settings.evaluations) for j in range(settings.evaluations)}
        self.digest = self._digest()
        model.to(self.device)
        self.parallel = loop.parallel(model, ranks)
        self.optimiser = _adamw(model, settings)
        self.curve, self.best, self.step, self.tokens = Curve(), None, 0, 0
        self.sums = [0.0, 0]

    def finished(self) -> bool:
        return self.step >= self.steps or self.curve.stopped != "budget"

    def advance(self) -> None:
        self._one_step()
        if self.step in self.measured or self.curve.stopped == "exhausted":
            self._measure()

    def note(self) -> str:
        loss = self.sums[0] / self.sums[1] if self.sums[1] else self.curve.rows[-1]["train_loss"]
        return f"public loss {loss:.4f}"

    def end(self) -> Curve:
        """Leave the final weights in the model, on the CPU."""
        if self.curve.stopped == "budget":
            self.curve.stopped = self.last
        if self.best is not None:
            self.model.load_state_dict(self.best["weights"])
        self.model.to("cpu").eval()
        self.curve.epochs = self.sampler.epochs
        return self.curve

    def _one_step(self) -> None:
        batch = self.sampler.draw()
        if batch is None:
            self.curve.stopped = "exhausted"
            return
        rate = self.settings.learning_rate * _schedule(self.step, self.steps, self.settings.warmup)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.model.train()
        self.optimiser.zero_grad(set_to_none=True)
        parts = loop.slices(batch, self.settings.accumulate, self.ranks)
        loss = loop.backward(self.parallel, self._loss, parts, self.ranks)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_GRADIENT)
        self.optimiser.step()
        self.step += 1
        self.tokens += batch.shape[0] * self.sampler.context
        self.sums[0] += loss
        self.sums[1] += 1

    def _loss(self, rows: np.ndarray) -> torch.Tensor:
        """Return the mean loss per token of full blocks."""
        ids = torch.from_numpy(rows).to(self.device, torch.long)
        with _autocast(self.settings.precision, self.device):
            model = self.parallel if torch.is_grad_enabled() else self.model
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    def _measure(self) -> None:
        """Add a row to the curve; with patience, keep the best weights and stop when it is used up."""
        if not self.sums[1]:
            return
        found = self._heldout_loss()
        self.curve.rows.append(
            {
                "step": self.step,
                "tokens": self.tokens,
                "train_loss": self.sums[0] / self.sums[1],
                "heldout_loss": found,
                "learning_rate": self.optimiser.param_groups[0]["lr"],
            }
        )
        self.sums = [0.0, 0]
        if not self.settings.patience:
            return
        if self.best is None or found < self.best["loss"]:
            weights = {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
            self.best = {"loss": found, "weights": weights, "since": 0}
        else:
            self.best["since"] += 1
            if self.best["since"] >= self.settings.patience:
                self.curve.stopped = "patience"

    @torch.no_grad()
    def _heldout_loss(self) -> float | None:
        if not self.heldout:
            return None
        self.model.eval()
        weights = dict(zip(self.sampler.blocks, self.sampler.weights, strict=True))
        size = max(1, self.settings.batch // self.settings.accumulate)
        total = 0.0
        for name, blocks in self.heldout.items():
            # The ranks read the parts in turn, so that none waits for another for long.
            starts = range(self.ranks.rank * size, len(blocks), self.ranks.world * size)
            parts = (blocks[start : start + size] for start in starts)
            total += weights[name] * sum(float(self._loss(part)) * len(part) for part in parts) / len(blocks)
        total = float(self.ranks.sum(torch.tensor(total, dtype=torch.float64)))
        return float(total / sum(weights[name] for name in self.heldout))

    def _heldout_part(self, heldout: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return blocks of each source that is drawn, evenly spaced, few enough for the share of the budget."""
        weights = dict(zip(self.sampler.blocks, self.sampler.weights, strict=True))
        present = {name: blocks for name, blocks in heldout.items() if len(blocks) and weights[name] > 0}
        budget = _HELDOUT_SHARE * self.settings.tokens / self.settings.evaluations / self.sampler.context
        each = max(1, int(budget / max(1, len(present))))
        rows = {
            name: np.linspace(0, len(blocks) - 1, min(each, len(blocks))).round() for name, blocks in present.items()
        }
        return {name: blocks[rows[name].astype(int)] for name, blocks in present.items()}

    # -- the state ----------------------------------------------------------------------------------------------

    def state(self) -> bytes:
        out = io.BytesIO()
        parts = {
            "digest": self.digest,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "sampler": self.sampler.state_dict(),
            "rows": self.curve.rows,
            "stopped": self.curve.stopped,
            "best": self.best,
            "step": self.step,
            "tokens": self.tokens,
            "sums": self.sums,
        }
        torch.save(parts, out)
        return out.getvalue()

    def restore(self, state: bytes) -> bool:
        parts = torch.load(io.BytesIO(state), map_location=self.device, weights_only=True)
        if parts["digest"] != self.digest:
            return False
        self.model.load_state_dict(parts["model"])
        self.optimiser.load_state_dict(parts["optimiser"])
        self.sampler.load_state(parts["sampler"])
        self.curve = Curve(rows=parts["rows"], stopped=parts["stopped"])
        self.best, self.step, self.tokens, self.sums = (parts[key] for key in ("best", "step", "tokens", "sums"))
        return True

    def _digest(self) -> str:
        """Return a hash of what decides the result: settings, data, start."""
        found = hashlib.sha256(f"{self.settings.model_dump_json()} {self.sampler.digest()}".encode())
        for name, blocks in self.heldout.items():
            found.update(name.encode() + np.ascontiguousarray(blocks).tobytes())
        for value in self.model.state_dict().values():
            found.update(value.detach().cpu().numpy().tobytes())
        return found.hexdigest()


def _adamw(model: torch.nn.Module, settings: LanguageModel) -> torch.optim.AdamW:
    """Return AdamW; matrices inside blocks decay, embeddings, norms and biases do not."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    decayed, others = [], []
    for parameter in model.parameters():
        (decayed if parameter.ndim >= 2 and id(parameter) not in embeddings else others).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=_BETAS, fused=True)


def _schedule(step: int, steps: int, warmup: float) -> float:
    """Return the factor of the learning rate at a step from 0: linear up over the warm-up, then a cosine to zero."""
    rising = round(warmup * steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def _autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """Return the context of a forward pass: bfloat16 if asked for, or where a GPU has it."""
    gains = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "bfloat16" or (precision == "auto" and gains):
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()
