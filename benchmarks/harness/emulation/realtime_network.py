"""The emulated network in real time: a transfer completes on its own, even if nobody waits for it.

``network.py`` computes the end of a transfer when somebody waits for it, which is exact and works in virtual time. A
timeline has to observe the end when it happens. Here a thread emulates the wire; it sleeps once per chunk and uses
almost no CPU.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from benchmarks.harness.emulation.network import EmulatedGroup


@dataclass
class RealtimeTransfer:
    bytes_left: int
    arrived: torch.futures.Future = field(default_factory=torch.futures.Future)


class RealtimeWire:
    """The connection of one rank to all others. It carries transfers in chunks, those of higher priority first.

    Args:
        bandwidth: bytes per second.
        chunk: seconds after which an urgent transfer may overtake.
    """

    def __init__(self, bandwidth: float, chunk: float = 1e-3):
        self._bandwidth, self._chunk = bandwidth, chunk
        self._queues: dict[int, deque[RealtimeTransfer]] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="wire", daemon=True).start()

    def open(self, priority: int) -> deque[RealtimeTransfer]:
        """The queue of one priority; queues with a lower value go first."""
        with self._changed:
            return self._queues.setdefault(priority, deque())

    def carry(self, queue: deque[RealtimeTransfer], transfer: RealtimeTransfer) -> None:
        """Start a transfer."""
        with self._changed:
            queue.append(transfer)
            self._changed.notify()

    def _next_queue(self) -> deque[RealtimeTransfer] | None:
        return next((queue for _, queue in sorted(self._queues.items()) if queue), None)

    def _run(self) -> None:
        # When the wire has carried its last chunk. A sleep that takes too long shortens the next ones.
        free = time.monotonic()
        while True:
            with self._changed:
                while (queue := self._next_queue()) is None:
                    self._changed.wait()
                    free = time.monotonic()
                transfer = queue[0]
            seconds = min(self._chunk, transfer.bytes_left / self._bandwidth)
            free += seconds
            time.sleep(max(0.0, free - time.monotonic()))
            transfer.bytes_left -= round(seconds * self._bandwidth)
            if transfer.bytes_left <= 0:
                with self._changed:
                    queue.popleft()
                transfer.arrived.set_result(None)


class _RealtimeWork(dist._Work):
    """Result of ``all_to_all_single(async_op=True)``."""

    def __init__(self, work: Any, transfer: RealtimeTransfer):
        super().__init__()
        self._work, self._transfer = work, transfer

    @override
    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        self._transfer.arrived.wait()
        return True

    @override
    def is_completed(self) -> bool:
        return self._transfer.arrived.done()

    @override
    def get_future(self) -> Any:
        return self._transfer.arrived


class RealtimeGroup(EmulatedGroup):
    """A gloo group whose all-to-alls take the time of a :class:`RealtimeWire` from the moment that all ranks have joined."""

    @override
    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        size = max(self._off_rank_bytes(input, input_splits), self._off_rank_bytes(output, output_splits))
        transfer = RealtimeTransfer(max(1, size))
        work = self._gloo.alltoall_base(output, input, output_splits, input_splits)
        wire, queue = self._wire, self._queue
        work.get_future().add_done_callback(lambda _: wire.carry(queue, transfer))
        return _RealtimeWork(work, transfer)

    all_to_all_single = alltoall_base  # the name of the method in torch 2.13
