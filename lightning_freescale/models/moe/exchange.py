"""How copies of tokens travel between ranks: all-to-alls that start early and are waited for late.

On CUDA a transfer is issued from a stream of its own, so that it starts when its rows are ready and not after the work that the
compute stream got since then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.runtime.streams import Readback, SideStream, current_stream, mark_used_on

Waiting = Callable[[], AbstractContextManager[Any]]


class PendingRows(NamedTuple):
    """An exchange of some arrays that has started."""

    works: list[Any]
    received: list[Tensor]
    sent: list[Tensor]  # must stay alive until the transfer is complete
    waiting: Waiting

    def wait(self) -> list[Tensor]:
        """Wait for the exchange, and return what has arrived. It blocks the host on a CPU, and the current stream on CUDA."""
        with self.waiting():
            for work in self.works:
                work.wait()
        mark_used_on(current_stream(self.received[0].device), self.received)
        return self.received


class PendingCounts(NamedTuple):
    """Counts of copies that travel, and on CUDA their way to the host."""

    pending: PendingRows
    on_host: tuple[Readback, Readback] | None

    def wait(self) -> tuple[list[int], list[int], Tensor]:
        """The sent and the received counts, and the received ones on the device. The host waits."""
        if self.on_host is None:
            (received,) = self.pending.wait()
            return self.pending.sent[0].tolist(), received.tolist(), received
        with self.pending.waiting():
            sent, arrived = (copy.wait().tolist() for copy in self.on_host)
        (received,) = self.pending.received
        mark_used_on(current_stream(received.device), [received])
        return sent, arrived, received


class ExpertExchange:
    """The exchange of the experts of one layer.

    Attributes:
        group: process group of the exchange; ``None`` is the default group. All of its ranks must take part in every forward
            and backward of training, in the same order.
        observe: called with each transfer that has started and the bytes that this rank sends. It returns a function whose
            result is a context for the wait.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.observe: Callable[[Any, int], Waiting] = _unobserved

    def __reduce__(self) -> Any:
        """A copy of a model has an exchange of its own. A process group belongs to one run and cannot be copied."""
        return ExpertExchange, ()

    @property
    def world_size(self) -> int:
        """Ranks that share the experts; 1 without process groups."""
        return dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1

    def start(
        self, arrays: Sequence[Tensor], send: list[int], receive: list[int], ready: torch.cuda.Event | None = None
    ) -> PendingRows:
        """Start to send ``send[r]`` rows of each array to rank ``r`` and to receive ``receive[r]`` rows of it.

        Args:
            arrays: they have ``sum(send)`` rows each.
            send: ``[W]``.
            receive: ``[W]``.
            ready: on CUDA, when the arrays are computed; when all work of the current stream is done, by default.
        """
        sent = [array.contiguous() for array in arrays]
        received = None if ready is not None else _new_rows(sent, sum(receive))
        with side_stream(sent[0].device).work(compute=ready is None, event=ready):
            if received is None:
                # With ``ready`` the transfer may write before the compute stream is done with memory that the host has
                # released. So the memory must be the side stream's own.
                received = _new_rows(sent, sum(receive))
            works = [
                dist.all_to_all_single(into, array, receive, send, group=self.group, async_op=True)
                for into, array in zip(received, sent, strict=True)
            ]
        nbytes = sum(array.numel() * array.element_size() for array in sent)
        # A group does its transfers in order, so the last one tells when all are complete.
        return PendingRows(works, received, sent, self.observe(works[-1], nbytes))

    def start_counts(self, counts: Tensor, ready: torch.cuda.Event | None) -> PendingCounts:
        """Start to send ``counts [E]``, the same number of entries to each rank. ``ready`` as for :meth:`start`."""
        share = [len(counts) // self.world_size] * self.world_size
        pending = self.start([counts], share, share, ready)
        if not counts.is_cuda:
            return PendingCounts(pending, None)
        # Copy engines bring the counts to the host. A kernel would wait behind those of the compute stream.
        with side_stream(counts.device).work():
            for work in pending.works:
                work.wait()
            mark_used_on(current_stream(counts.device), [counts])
            return PendingCounts(pending, (Readback(counts), Readback(pending.received[0])))


def _new_rows(arrays: list[Tensor], rows: int) -> list[Tensor]:
    return [array.new_empty(rows, *array.shape[1:]) for array in arrays]


@cache
def side_stream(device: torch.device) -> SideStream:
    """The stream from which all exchanges of a device are issued."""
    return SideStream(device)


def _unobserved(work: Any, sent_bytes: int) -> Waiting:
    return nullcontext
