"""Several processes train one model: their units, their noise shares, their one update (docs/rules.md, rule 24).

Rank r of W holds the units r, r + W, r + 2W, ... In a step it draws ITS coins for them, clips and sums their
gradients, and adds ITS noise, of standard deviation sigma C / sqrt(W). The sums of all ranks are added, so the total
carries W independent shares, which is Gaussian noise of standard deviation sigma C, once. Every rank then applies the
same update. A rank without units adds its share all the same (rule 5).

The guarantee needs shares that are independent, so each rank reads its own operating system's generator; ranks whose
sources repeat each other are refused. A rank's own noisy sum carries less than the full noise: it goes to the other
ranks, which are one trusted party, and to nobody else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from dpmixmin.errors import UserError


@dataclass(frozen=True)
class Ranks:
    """This process among those that train one model; :meth:`single` is a run of one process.

    Attributes:
        world: number of processes W.
        rank: this one, 0 .. world - 1.
        device: where the tensors lie that ranks exchange.
    """

    world: int = 1
    rank: int = 0
    device: str = "cpu"

    def __post_init__(self):
        if not 0 <= self.rank < self.world:
            raise ValueError("rank must be in [0, world)")

    @classmethod
    def single(cls) -> Ranks:
        """Return a run of one process, without torch.distributed."""
        return cls()

    @classmethod
    @contextmanager
    def joined(cls, backend: str = "gloo") -> Iterator[Ranks]:
        """Join the processes that ``torchrun`` started, and leave them at the end of the block.

        Args:
            backend: ``gloo`` for CPUs, ``nccl`` for one GPU per process.

        Raises:
            UserError: the process was not started by torchrun.
        """
        from torch import distributed

        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise UserError(f"{missing[0]} is not set; start several processes with torchrun")
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}" if backend == "nccl" else "cpu"
        if backend == "nccl":
            torch.cuda.set_device(device)
        distributed.init_process_group(backend)
        try:
            yield cls(distributed.get_world_size(), distributed.get_rank(), device)
        finally:
            distributed.destroy_process_group()

    def share(self, unit_index: np.ndarray, units: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Return this rank's records: every unit belongs to one rank, with all its records.

        Args:
            unit_index: unit of each row, 0 .. units - 1, in non-decreasing order.
            units: number of units, the same on all ranks.

        Returns:
            ``(rows, index, own)``: rows of this rank (int64), their units counted anew from 0, and how many units.
        """
        rows = np.flatnonzero(unit_index % self.world == self.rank)
        return rows, unit_index[rows] // self.world, len(range(self.rank, units, self.world))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors, the same bits on every rank, on the device of ``values``."""
        if self.world == 1:
            return values
        from torch import distributed

        total = values.to(self.device, copy=True)
        distributed.all_reduce(total)
        return total.to(values.device)

    def check(self, *, same: bytes, different: bytes) -> None:
        """Compare the ranks before they train.

        Args:
            same: a digest of what must agree (spec, weights), as long on every rank.
            different: fresh bytes of the rank's noise source, as long on every rank.

        Raises:
            UserError: on every rank, when any two disagree, or draw the same noise.
        """
        if self.world == 1:
            return
        if len(set(self._gather(same))) > 1:
            raise UserError("the processes train from different models or settings; give all the same inputs")
        if len(set(self._gather(different))) < self.world:
            raise UserError("two processes draw the same noise; give each a source, or a seed's purpose, of its own")

    def _gather(self, value: bytes) -> list[bytes]:
        from torch import distributed

        own = torch.frombuffer(bytearray(value), dtype=torch.uint8).to(self.device)
        everyone = [torch.empty_like(own) for _ in range(self.world)]
        distributed.all_gather(everyone, own)
        return [bytes(one.cpu().numpy()) for one in everyone]
