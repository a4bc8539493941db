"""The emulated network of ``link.py`` in real time: transfers end by themselves, whether or not somebody waits for them.

``link.py`` works out when a transfer ends once it is waited for, which is exact and needs no clock. A timeline needs to see it
end meanwhile: here a thread is the wire. It takes no CPU but for one short sleep per chunk.
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

from benchmarks.harness.emulation.network import LinkGroup


@dataclass
class _Carried:
    bytes_left: int
    arrived: torch.futures.Future = field(default_factory=torch.futures.Future)


class LiveWire:
    """What connects one rank to all others: carries transfers chunk by chunk, those of higher priority first.

    Args:
        bandwidth: bytes a second.
        chunk: seconds after which an urgent transfer may go first.
    """

    def __init__(self, bandwidth: float, chunk: float = 1e-3):
        self._bandwidth, self._chunk = bandwidth, chunk
        self._queues: dict[int, deque[_Carried]] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="wire", daemon=True).start()

    def open(self, priority: int) -> deque[_Carried]:
        """The queue of one priority; lower goes first."""
        with self._changed:
            return self._queues.setdefault(priority, deque())

    def carry(self, queue: deque[_Carried], carried: _Carried) -> None:
        with self._changed:
            queue.append(carried)
            self._changed.notify()

    def _due(self) -> deque[_Carried] | None:
        return next((queue for _, queue in sorted(self._queues.items()) if queue), None)

    def _run(self) -> None:
        free = (
            time.monotonic()
        )  # when the wire has carried the last chunk; a late wake-up is made good by the next ones
        while True:
            with self._changed:
                while (queue := self._due()) is None:
                    self._changed.wait()
                    free = time.monotonic()
                carried = queue[0]
            seconds = min(self._chunk, carried.bytes_left / self._bandwidth)
            free += seconds
            time.sleep(max(0.0, free - time.monotonic()))
            carried.bytes_left -= round(seconds * self._bandwidth)
            if carried.bytes_left <= 0:
                with self._changed:
                    queue.popleft()
                carried.arrived.set_result(None)


class _Arrival(dist._Work):
    def __init__(self, work: Any, carried: _Carried):
        super().__init__()
        self._work, self._carried = work, carried

    @override
    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        self._carried.arrived.wait()
        return True

    @override
    def is_completed(self) -> bool:
        return self._carried.arrived.done()

    @override
    def get_future(self) -> Any:
        return self._carried.arrived


class LiveLinkGroup(LinkGroup):
    """A gloo group whose AllToAlls take the time of a :class:`LiveWire`, from the moment that all ranks have joined."""

    @override
    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        size = max(self._off_rank_bytes(input, input_splits), self._off_rank_bytes(output, output_splits))
        carried = _Carried(max(1, size))
        work = self._gloo.alltoall_base(output, input, output_splits, input_splits)
        wire, queue = self._wire, self._queue
        work.get_future().add_done_callback(lambda _: wire.carry(queue, carried))
        return _Arrival(work, carried)

    all_to_all_single = alltoall_base  # its name in torch 2.13
