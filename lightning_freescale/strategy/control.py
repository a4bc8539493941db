"""A few words between all ranks for every batch, on the host, some batches ahead of their use.

Ranks must agree before they act: on whether everybody still has data, whether a batch is sound, whether someone was asked
to stop or met a loss that is not finite. Asking with a blocking collective in every step would cost a wait for the slowest
rank each time. Here each rank posts its :class:`Header` when it *fetches* a batch and reads everybody's when it *uses* that
batch, some steps later: the answer is there by then, and all ranks act on it at the same step.
"""

from __future__ import annotations

import math
from collections import deque
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.runtime import errors
from lightning_freescale.runtime.errors import FreeScaleError
from lightning_freescale.runtime.streams import Readback

AHEAD = 2  # steps that the host may be ahead of the device: enough to keep it busy, and it holds the batches of no more
WORD_SECONDS = 2.0  # how long to wait for a failing peer's explanation


class Status(IntEnum):
    BATCH = 0  # a sound batch
    END = 1  # no batch: the data or the limit is at its end
    ERROR = 2  # fetching or checking the batch failed


class Header(NamedTuple):
    """What one rank tells the others about one batch."""

    status: Status
    weight: int = 0  # samples or tokens that this rank's mean loss is taken over
    stop: bool = False  # SIGTERM was received
    bad_step: int = -1  # first step whose loss was not finite, -1 if none


class Posted:
    """The headers of all ranks for one batch, under way."""

    def __init__(self, control: Control, header: Header, sequence: int):
        self._control, self._sequence = control, sequence
        mine = torch.tensor(header, dtype=torch.int64)
        self._received = [torch.empty_like(mine) for _ in range(control.world_size)]
        self._mine = mine  # alive until the transfer is done
        self._headers: list[Header] | None = None
        self._work = dist.all_gather(self._received, mine, group=control.header_group, async_op=True)

    def wait(self) -> list[Header]:
        """Headers in rank order."""
        if self._headers is not None:
            return self._headers
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._control.missing_ranks(f"the header of batch {self._sequence}", error) from error
        self._headers = [
            Header(Status(status), weight, bool(stop), bad_step)
            for status, weight, stop, bad_step in (row.tolist() for row in self._received)
        ]
        return self._headers


class Control:
    """The ranks' side channel: gloo groups of its own, so that it never queues behind training traffic.

    Headers and agreements have a group each: when one rank fails, the others have posted headers that it never will.
    """

    def __init__(self, timeout: timedelta):
        self.timeout = timeout
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self.header_group = dist.new_group(backend="gloo", timeout=timeout)
        self._posted = 0
        self.stop_requested = False
        self._losses: deque[tuple[int, Readback]] = deque()
        self._bad_loss: tuple[int, float] | None = None  # (step, value)

    # ---- per batch ----------------------------------------------------------------------------------------------
    def post(self, status: Status, weight: int = 0) -> Posted:
        """Tell the other ranks about the batch just fetched. Returns at once."""
        self._read_losses(keep=AHEAD)
        self._posted += 1
        bad_step = self._bad_loss[0] if self._bad_loss else -1
        return Posted(self, Header(status, weight, self.stop_requested, bad_step), self._posted)

    # ---- losses -------------------------------------------------------------------------------------------------
    def watch_loss(self, step: int, loss: Tensor) -> None:
        """Remember the loss of ``step`` and look at it later; waits for the device where it is ``AHEAD`` steps behind."""
        self._losses.append((step, Readback(loss)))
        self._read_losses(keep=AHEAD)

    def _read_losses(self, keep: int) -> None:
        """Look at the losses that have arrived, and wait for all but the last ``keep``."""
        while self._losses and (len(self._losses) > keep or self._losses[0][1].arrived()):
            step, loss = self._losses.popleft()
            number = loss.wait().sum().item()
            if self._bad_loss is None and not math.isfinite(number):
                self._bad_loss = (step, number)

    def check_losses(self) -> None:
        """Raise on every rank if any rank has met a loss that is not finite. A collective."""
        self._read_losses(keep=0)
        bad, self._bad_loss = self._bad_loss, None
        error = None
        if bad is not None:
            error = FreeScaleError(
                f"loss is {bad[1]} at step {bad[0]}; weights are invalid from that step on, earlier checkpoints are not: "
                "resume from the last one, with a lower learning rate or after looking at that batch"
            )
        self.agree(error)

    # ---- agreement ----------------------------------------------------------------------------------------------
    def agree(self, error: BaseException | None, where: str = "") -> None:
        """Raise on every rank if ``error`` is given on any of them, naming the ranks. A collective."""
        mine = None if error is None else (type(error).__name__, str(error))
        found = [(rank, *failure) for rank, failure in enumerate(self.gather(mine)) if failure is not None]
        if not found:
            return
        # A rank that only reports another's failure adds nothing to it.
        found = [failure for failure in found if failure[1] != "PeerFailed"] or found
        kind = getattr(errors, found[0][1], FreeScaleError)
        prefix = f"{where}: " if where else ""
        # Ranks that failed alike are named together; a library's own exceptions keep their type in the text.
        texts: dict[str, list[int]] = {}
        for rank, name, text in found:
            texts.setdefault(text if hasattr(errors, name) else f"{name}: {text}", []).append(rank)
        raise kind(
            "\n".join(f"rank {', '.join(map(str, ranks))}: {prefix}{text}" for text, ranks in texts.items())
        ) from error

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, in rank order. A collective."""
        values: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            raise self.missing_ranks("a gather", error) from error
        return values

    def missing_ranks(self, what: str, error: Exception) -> FreeScaleError:
        """The error to raise when ``what`` did not arrive from all ranks: says what became of the others."""
        return FreeScaleError(f"rank {self.rank}: waited for {what}; {self.last_words(error)} ({error})")

    def last_words(self, error: BaseException) -> str:
        """Leave word of why this rank ends, and say what the others left: the first to fail explains the rest.

        Goes through the rendezvous store, which still answers when collectives do not. A rank that leaves no word within a
        few seconds is stuck elsewhere or dead.
        """
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"freescale/ended/{self.rank}", f"{type(error).__name__}: {error}".split("\n")[0][:300])
        except Exception:
            return "rank 0, which hosts the rendezvous store, has ended or cannot be reached"
        words = []
        for rank in range(self.world_size):
            if rank == self.rank:
                continue
            key = f"freescale/ended/{rank}"
            try:
                store.wait([key], timedelta(seconds=WORD_SECONDS))
                words.append(f"rank {rank} ended with {store.get(key).decode()}")
            except Exception:  # no word: that rank is the missing one
                words.append(f"rank {rank} is missing: stuck or dead for {self.timeout.total_seconds():.0f} s")
        return "; ".join(words)
