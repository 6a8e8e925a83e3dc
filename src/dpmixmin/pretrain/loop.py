"""The loop around the steps of a PUBLIC training: state, signals, progress lines, several processes.

A training that was stopped goes on from its saved state and, on a CPU, ends with the bits of one that was not. Of
several processes (``ranks.py``) each draws the same batch from the same public seed, takes its own slice of it, and
DistributedDataParallel adds the gradients up: the result is that of one process up to rounding, and a state that two
processes left can be gone on from by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import nn

from dpmixmin.interrupt import Interrupted, held
from dpmixmin.privacy.access import Progress
from dpmixmin.progress import Steps
from dpmixmin.ranks import Ranks


class Training(Protocol):
    """What is trained.

    Attributes:
        steps: steps of the whole training.
        step: finished ones.
    """

    steps: int
    step: int

    def finished(self) -> bool:
        """Whether no step follows."""

    def advance(self) -> None:
        """Do one step."""

    def note(self) -> str:
        """Return what a progress line says beside the steps; public."""

    def state(self) -> bytes:
        """Return everything that the next steps depend on."""

    def restore(self, state: bytes) -> bool:
        """Take over a state; return whether it was this training's, and change nothing if not."""


def run(
    training: Training, state: Progress | None, ranks: Ranks, say: Callable[[str], None], *, private: bool = False
) -> None:
    """Do the steps that are left.

    Args:
        training: the same on every rank.
        state: where the leader keeps the state from time to time, and goes on from; the caller deletes it. None:
            nowhere.
        ranks: who trains.
        say: takes the line that a saved state is gone on from.
        private: whether what is trained on tells of sensitive records: weights that were learned without privacy.
            Then the public log has steps only, no loss and no time.

    Raises:
        Interrupted: a signal came; the state is saved.
    """
    if state is not None:
        saved = ranks.led(lambda: (state.load() or (0, b""))[1])
        if saved and training.restore(saved) and ranks.leads:
            say(f"  going on after step {training.step}/{training.steps}")
    lines, started = Steps(training.steps, private=private, start=training.step), time.monotonic()
    with held() as asked_to_stop:
        while not training.finished():
            with _others_there(ranks):
                training.advance()
            lines.at(training.step, training.note)
            # One answer for all, so that none of them waits for a step that the others do not do.
            if _any(asked_to_stop(), ranks):
                if state is not None:
                    ranks.led(lambda: _save(state, training, now=True))
                raise Interrupted
            # What takes less time than lies between two states is done again as fast.
            if state is not None and ranks.leads and time.monotonic() - started >= state.seconds:
                _save(state, training)


def _save(state: Progress, training: Training, now: bool = False) -> bytes:
    state.save(training.step, training.state, now=now)
    return b""


def _any(value: bool, ranks: Ranks) -> bool:
    return value if ranks.world == 1 else bool(ranks.sum(torch.tensor([float(value)])) > 0)


# -- what a rank does of a step ---------------------------------------------------------------------------------


def parallel(model: nn.Module, ranks: Ranks) -> nn.Module:
    """Return the model as it is called in training: its backward pass leaves the mean of all ranks' gradients."""
    if ranks.world == 1:
        return model
    device = next(model.parameters()).device
    with _others_there(ranks):
        return nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def slices(batch: np.ndarray, parts: int, ranks: Ranks) -> list[tuple[np.ndarray, float]]:
    """Cut a batch into what this rank computes one after the other.

    Args:
        batch: the same on every rank, with at least one row.
        parts: that a single process would cut it into at most.
        ranks: who trains.

    Returns:
        ``(rows, weight)``: over all ranks, the weights times the rows' mean losses add up to the batch's mean. A rank
        without rows gets one of weight 0, because every rank takes part in every backward pass.
    """
    own = np.array_split(batch, ranks.world)[ranks.rank]
    if not len(own):
        return [(batch[:1], 0.0)]
    return [(rows, len(rows) / len(batch)) for rows in np.array_split(own, min(-(-parts // ranks.world), len(own)))]


def backward(
    model: nn.Module, loss: Callable[[np.ndarray], torch.Tensor], parts: list[tuple[np.ndarray, float]], ranks: Ranks
) -> float:
    """Leave the gradient of the batch's mean loss in the parameters, and return that loss.

    Args:
        model: from :func:`parallel`; ``loss`` calls it.
        loss: mean loss of some rows.
        parts: from :func:`slices`.
        ranks: who trains.
    """
    total = 0.0
    for number, (rows, weight) in enumerate(parts):
        # The ranks' gradients are exchanged once, with those of the last part.
        waits = ranks.world > 1 and number < len(parts) - 1
        with model.no_sync() if waits else nullcontext():
            mean = loss(rows) * weight
            # DistributedDataParallel divides by the number of ranks; the weights have done so already.
            (mean * ranks.world).backward()
        total += float(mean.detach())
    return total if ranks.world == 1 else float(ranks.sum(torch.tensor([total], dtype=torch.float64)))


@contextmanager
def _others_there(ranks: Ranks) -> Iterator[None]:
    """Turn what DistributedDataParallel raises when a rank is gone into an interruption, as ``Ranks`` does."""
    try:
        yield
    except RuntimeError as error:
        gone = isinstance(error, torch.distributed.DistError) or any(name in str(error) for name in ("gloo", "NCCL"))
        if ranks.world > 1 and gone:
            raise Interrupted from error
        raise
