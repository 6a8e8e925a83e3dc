"""Several processes train one model: who they are, what they exchange (docs/rules.md, rule 24).

``torchrun`` starts W processes (ranks). Rank r holds the units r, r + W, r + 2W, ... In a step it draws ITS coins for
them, clips and sums their gradients, and adds ITS noise, of standard deviation sigma C / sqrt(W). The sums of all
ranks are added, so the total carries W independent shares, which is Gaussian noise of standard deviation sigma C,
once. Every rank then applies the same update. A rank without units adds its share all the same (rule 5).

The guarantee needs shares that are independent, so each rank reads its own operating system's generator; ranks whose
sources repeat each other are refused. A rank's own noisy sum carries less than the full noise: it goes to the other
ranks, which are one trusted party, and to nobody else.

Rank 0 leads: it alone writes files and the ledger, and decides when to stop. The ranks live and end together. Whoever
is left alone in an exchange is interrupted like by SIGTERM: a later run goes on from what the leader saved.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch

from dpmixmin.errors import UserError
from dpmixmin.interrupt import STATUS, Interrupted

if TYPE_CHECKING:
    from dpmixmin.data.records import OfUnits

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others in one exchange: longer than a step, or than what the leader does alone."""


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

    # -- joining ----------------------------------------------------------------------------------------------

    @classmethod
    def single(cls) -> Ranks:
        """Return a run of one process, without torch.distributed."""
        return cls()

    @classmethod
    @contextmanager
    def of_environment(cls) -> Iterator[Ranks]:
        """Join the other processes if ``torchrun`` started this one, else be alone.

        With GPUs, every process of a machine has one of its own.

        Raises:
            UserError: the processes do not find each other, or there are more of them than GPUs.
        """
        if "RANK" not in os.environ:
            yield cls.single()
            return
        with cls.joined("nccl" if torch.cuda.is_available() else "gloo") as ranks:
            yield ranks

    @classmethod
    @contextmanager
    def joined(cls, backend: str = "gloo") -> Iterator[Ranks]:
        """Join the processes that ``torchrun`` started, and leave them at the end of the block.

        Args:
            backend: ``gloo`` for CPUs, ``nccl`` for one GPU per process.

        Raises:
            UserError: the process was not started by torchrun, does not find the others, or has no GPU of its own.
        """
        from torch import distributed

        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise UserError(f"{missing[0]} is not set; start several processes with torchrun")
        device = _own_gpu() if backend == "nccl" else "cpu"
        try:
            distributed.init_process_group(backend, timeout=PATIENCE)
        except RuntimeError as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise UserError(f"the processes do not find each other at {where}: {_first_line(error)}") from None
        try:
            yield cls(distributed.get_world_size(), distributed.get_rank(), device)
        finally:
            distributed.destroy_process_group()

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes, says and decides."""
        return self.rank == 0

    # -- who holds what ---------------------------------------------------------------------------------------

    def own(self, records: OfUnits) -> OfUnits:
        """Return this rank's records of a table in the order of (unit, record)."""
        if self.world == 1:
            return records
        units, index = records.units()
        return records.take(self.share(index, units)[0])

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

    # -- exchanges: every rank makes the same ones, in the same order -----------------------------------------

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors, the same bits on every rank, on the device of ``values``.

        Raises:
            Interrupted: another rank is gone.
        """
        if self.world == 1:
            return values
        from torch import distributed

        total = values.to(self.device, copy=True)
        with _others_there():
            distributed.all_reduce(total)
            return total.to(values.device)

    def broadcast(self, value: bytes | None) -> bytes:
        """Return the leader's bytes on every rank.

        Args:
            value: what the leader sends; the others give None.

        Raises:
            Interrupted: another rank is gone.
        """
        if self.leads and value is None:
            raise ValueError("the leader broadcasts bytes")
        if self.world == 1:
            return value
        from torch import distributed

        size = torch.tensor([len(value) if self.leads else 0], dtype=torch.int64, device=self.device)
        with _others_there():
            distributed.broadcast(size, src=0)
            size = int(size.item())
        if size == 0:
            return b""
        data = _tensor(value) if self.leads else torch.empty(size, dtype=torch.uint8)
        data = data.to(self.device)
        with _others_there():
            distributed.broadcast(data, src=0)
            return value if self.leads else bytes(data.cpu().numpy())

    def led(self, make: Callable[[], bytes]) -> bytes:
        """Return on every rank what the leader makes; where it fails, the others end too instead of waiting.

        Args:
            make: called by the leader alone.

        Raises:
            SystemExit: on the other ranks, when the leader failed; it says why, they say nothing.
            Interrupted: on the other ranks, when the leader was; on any, when another rank is gone.
        """
        if self.world == 1:
            return make()
        if not self.leads:
            answer = self.broadcast(None)
            if answer[0] == STATUS:
                raise Interrupted
            if answer[0]:
                raise SystemExit(answer[0])
            return answer[1:]
        try:
            made = make()
        except BaseException as error:
            status = STATUS if isinstance(error, KeyboardInterrupt | SystemExit) else 1
            with suppress(Interrupted):
                self.broadcast(bytes([status]))
            raise
        self.broadcast(b"\0" + made)
        return made

    def led_at_length(self, make: Callable[[], bytes]) -> bytes:
        """Do as :meth:`led` does, for what may take longer than the ranks' patience: waiting for another job.

        The leader does it in a thread, and meanwhile tells the others to wait on.

        Args:
            make: called by the leader alone.
        """
        if self.world == 1:
            return make()
        aside = _Aside(make) if self.leads else None
        while (answer := self.led(lambda: aside.ask())) == _WAIT:
            pass
        return answer[1:]

    def check(self, *, same: bytes, different: bytes) -> None:
        """Compare the ranks before they train.

        Args:
            same: a digest of what must agree (spec, weights, step), as long on every rank.
            different: fresh bytes of the rank's noise source, as long on every rank.

        Raises:
            UserError: on every rank, when any two disagree, or draw the same noise.
            Interrupted: another rank is gone.
        """
        if self.world == 1:
            return
        if len(set(self._gather(same))) > 1:
            raise UserError("the processes train from different models or settings; give all the same inputs")
        if len(set(self._gather(different))) < self.world:
            raise UserError("two processes draw the same noise; give each a source, or a seed's purpose, of its own")

    def _gather(self, value: bytes) -> list[bytes]:
        from torch import distributed

        own = _tensor(value).to(self.device)
        everyone = [torch.empty_like(own) for _ in range(self.world)]
        with _others_there():
            distributed.all_gather(everyone, own)
            return [bytes(one.cpu().numpy()) for one in everyone]


_WAIT, _ASK_SECONDS = b"wait", 60.0
"""What the others hear from a leader that waits, and how often: before their patience ends."""


class _Aside:
    """Something that a thread does, beside which the leader can talk to the other ranks."""

    def __init__(self, make: Callable[[], bytes]):
        self._made, self._failed = b"", None
        self._thread = threading.Thread(target=self._run, args=(make,), daemon=True)
        self._thread.start()

    def _run(self, make: Callable[[], bytes]) -> None:
        try:
            self._made = make()
        except BaseException as error:
            self._failed = error

    def ask(self) -> bytes:
        self._thread.join(_ASK_SECONDS)
        if self._failed is not None:
            raise self._failed
        return _WAIT if self._thread.is_alive() else b"\0" + self._made


def _own_gpu() -> str:
    """Choose this process' GPU as the current one and return its name."""
    local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local >= count:
        raise UserError(f"process {local + 1} of this machine has no GPU of its own; there are {count}")
    # A rank that is left alone must see an error in the exchange instead of being aborted by another thread.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    torch.cuda.set_device(local)
    return f"cuda:{local}"


@contextmanager
def _others_there() -> Iterator[None]:
    """Turn the error of an exchange that lacks a rank (torch's are all RuntimeErrors) into an interruption."""
    try:
        yield
    except RuntimeError as error:
        raise Interrupted from error


def _tensor(value: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
