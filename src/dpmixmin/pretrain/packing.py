"""Packing PUBLIC documents into blocks of equal length, and drawing blocks from a mixture of sources.

A block has one token more than the context: all but its last are inputs, all but its first are targets.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np

from dpmixmin.errors import UserError


def pack(documents: Sequence[np.ndarray], end_of_text: int, context: int, seed: int = 0) -> np.ndarray:
    """Join documents in a shuffled order, the special token before each and after the last, and cut into blocks.

    Neighbouring blocks share one token (the last target of one is the first input of the next), so every token but
    the first is a target once; what does not fill a block is dropped.

    Args:
        documents: ids of each document.
        end_of_text: id of the special token.
        context: inputs of a block.
        seed: public seed of the order.

    Returns:
        int32 of shape (blocks, context + 1); no block if the documents are too short for one.
    """
    mark = np.asarray([end_of_text], dtype=np.int32)
    parts = [mark]
    for number in np.random.default_rng(seed).permutation(len(documents)):
        parts += [documents[number].astype(np.int32), mark]
    stream = np.concatenate(parts)
    blocks = (len(stream) - 1) // context
    rows = np.arange(blocks)[:, None] * context + np.arange(context + 1)
    return stream[rows]


class MixtureSampler:
    """Draws blocks: a source with probability lambda_i, then its next block. Reproducible from its public seed.

    A source's blocks come in a shuffled order, a new one each epoch. A source at its repetition cap is not drawn
    again and the others' weights are scaled up; when none is left, batches end.

    Args:
        blocks: of each source, int32 of shape (n_i, context + 1).
        weights: lambda in the order of ``blocks``; non-negative, with a positive sum.
        batch: blocks per batch.
        seed: public seed.
        max_epochs: repetition cap; a source is read at most ``ceil(max_epochs * n_i)`` blocks. None: no cap.

    Raises:
        UserError: a source without a block; names it.
    """

    def __init__(
        self,
        blocks: Mapping[str, np.ndarray],
        weights: Sequence[float],
        batch: int,
        seed: int,
        max_epochs: float | None = None,
    ):
        self.blocks, self.batch, self.seed = dict(blocks), batch, seed
        self.weights = np.asarray(weights, dtype=np.float64)
        if self.weights.shape != (len(self.blocks),) or not (self.weights >= 0).all() or not self.weights.sum() > 0:
            raise ValueError("one weight per source, none negative, not all zero")
        for name, found in self.blocks.items():
            if not len(found):
                raise UserError(
                    f"source {name}: shorter than one block of text.context + 1 tokens; remove the source, give it "
                    "more text or lower text.context"
                )
        self.context = next(iter(self.blocks.values())).shape[1] - 1
        self._caps = [math.inf if max_epochs is None else math.ceil(max_epochs * len(b)) for b in self.blocks.values()]
        self._coin = np.random.default_rng([seed, 0])
        self._read = [0] * len(self.blocks)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    @property
    def batches(self) -> int | float:
        """Batches that the caps leave in all; infinity without caps."""
        blocks = sum(cap for cap, weight in zip(self._caps, self.weights, strict=True) if weight > 0)
        return blocks if math.isinf(blocks) else math.ceil(blocks / self.batch)

    def draw(self) -> np.ndarray | None:
        """Return the next batch, int32 of shape (batch, context + 1); the last one may be smaller, then None."""
        rows: list[np.ndarray] = []
        sources = list(self.blocks.values())
        while len(rows) < self.batch:
            left = self.weights * [read < cap for read, cap in zip(self._read, self._caps, strict=True)]
            if not left.sum() > 0:
                break
            chosen = int(self._coin.choice(len(left), p=left / left.sum()))
            rows.append(sources[chosen][self._next(chosen)])
        return np.stack(rows) if rows else None

    def _next(self, source: int) -> int:
        """Return the position of a source's next block."""
        size = len(list(self.blocks.values())[source])
        epoch, place = divmod(self._read[source], size)
        if self._orders.get(source, (None,))[0] != epoch:
            order = np.random.default_rng([self.seed, 1, source, epoch]).permutation(size)
            self._orders[source] = (epoch, order)
        self._read[source] += 1
        return int(self._orders[source][1][place])

    @property
    def epochs(self) -> dict[str, float]:
        """How often each source was read so far."""
        return {name: read / len(found) for (name, found), read in zip(self.blocks.items(), self._read, strict=True)}

    def state_dict(self) -> dict:
        """Return where the sampler is; :meth:`load_state` goes on from there."""
        return {"coin": self._coin.bit_generator.state, "read": list(self._read)}

    def load_state(self, state: dict) -> None:
        """Go on from a state of a sampler with the same arguments."""
        self._coin.bit_generator.state = state["coin"]
        self._read = list(state["read"])

    def digest(self) -> str:
        """Return a hash of everything that decides what is drawn."""
        found = hashlib.sha256(repr((list(self.blocks), self.batch, self.seed, self._caps)).encode())
        found.update(self.weights.tobytes())
        for blocks in self.blocks.values():
            found.update(np.ascontiguousarray(blocks).tobytes())
        return found.hexdigest()
