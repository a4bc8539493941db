"""An emulated network for CPU ranks: a c10d backend, ``"link"``, whose AllToAlls take as long as asked, and no CPU meanwhile.

gloo moves the bytes; a transfer is complete when the rank's emulated wire has carried them, too. Each rank has one wire. Its
groups take turns on it chunk by chunk, those of higher priority first, so that an urgent transfer overtakes a bulky one under
way. All other collectives run over gloo untouched.

    wire = Wire(clock, bandwidth=10e6, latency=1e-4)
    group = new_link(wire, priority=0)             # like dist.new_group(): on all ranks, in the same order
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from benchmarks.harness.emulation.clock import Clock

NAME = "link"
_ProcessGroup: Any = dist.ProcessGroup  # untyped: its stubs overload each collective, this class does not


class Transfer:
    """Bytes on their way to and from this rank.

    Args:
        size: bytes to carry.
        joined: ``[world]`` float64, when each rank has joined; valid once ``told`` is done.
        told: the exchange of those times.
    """

    def __init__(self, size: int, joined: Tensor, told: Any):
        self.bytes_left = size
        self.arrived: float | None = None
        self._joined, self._told = joined, told
        self._last: float | None = None

    def last_joined(self) -> float:
        """When the last rank has joined: no AllToAll starts before."""
        if self._last is None:
            self._told.wait()
            self._last = float(self._joined.max())
        return self._last


class Queue:
    """The transfers of one group, in order."""

    def __init__(self, priority: int):
        self.priority = priority  # lower goes first
        self.transfers: deque[Transfer] = deque()
        self.turn = 0  # of its last chunk: groups of one priority take turns


class Wire:
    """What connects one rank to all others, both ways at once.

    What it carries when is worked out as far as somebody waits for it. That is exact: a rank that waits starts nothing new.

    Args:
        clock: the time it takes.
        bandwidth: bytes a second.
        latency: seconds from the moment the last rank joins an AllToAll to its first byte.
        chunk: seconds after which an urgent transfer may go first.
    """

    def __init__(self, clock: Clock, bandwidth: float, latency: float, chunk: float = 2e-4):
        self.clock, self.bandwidth, self.latency = clock, bandwidth, latency
        self._chunk = max(1, round(chunk * bandwidth))  # bytes
        self._queues: list[Queue] = []
        self._free = 0.0  # when the chunk it carries is through
        self._turn = 0

    def open(self, priority: int) -> Queue:
        self._queues.append(Queue(priority))
        return self._queues[-1]

    def arrival(self, transfer: Transfer) -> float:
        """When ``transfer`` is through."""
        while transfer.arrived is None:
            self._carry_chunk(self._next_start())
        return transfer.arrived

    def has_arrived(self, transfer: Transfer) -> bool:
        """Whether ``transfer`` is through by now. Looks no further ahead: urgent transfers may yet start."""
        while transfer.arrived is None and self._next_start() <= self.clock.now():
            self._carry_chunk(self._next_start())
        return transfer.arrived is not None and transfer.arrived <= self.clock.now()

    def _starts(self) -> dict[Queue, float]:
        return {queue: queue.transfers[0].last_joined() + self.latency for queue in self._queues if queue.transfers}

    def _next_start(self) -> float:
        """When the next chunk starts."""
        return max(self._free, min(self._starts().values()))

    def _carry_chunk(self, start: float) -> None:
        due = [queue for queue, earliest in self._starts().items() if earliest <= start]
        queue = min(due, key=lambda queue: (queue.priority, queue.turn))
        self._turn += 1
        queue.turn = self._turn
        transfer = queue.transfers[0]
        size = min(self._chunk, transfer.bytes_left)
        self._free = start + size / self.bandwidth
        transfer.bytes_left -= size
        if not transfer.bytes_left:
            queue.transfers.popleft()
            transfer.arrived = self._free


class _Arrival(dist._Work):
    """What ``all_to_all_single(async_op=True)`` returns: done when gloo and the wire are."""

    def __init__(self, work: Any, wire: Wire, transfer: Transfer):
        super().__init__()
        self._work, self._wire, self._transfer = work, wire, transfer

    @override
    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        self._wire.clock.wait_until(self._wire.arrival(self._transfer))
        return True

    @override
    def is_completed(self) -> bool:
        if not self._wire.has_arrived(self._transfer):
            return False
        self._work.wait()  # the wire is what counts; gloo may be behind it
        return True

    @override
    def get_future(self) -> Any:
        self.wait()
        return self._work.get_future()


@dataclass
class _Options:
    wire: Any
    priority: int
    kind: type
    _timeout: timedelta = field(default_factory=lambda: timedelta(seconds=60))


class LinkGroup(_ProcessGroup):
    """A gloo group whose AllToAlls take the time of the wire."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any, options: _Options):
        super().__init__(rank, size)
        kinds = dist.ProcessGroup.BackendType
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._set_default_backend(kinds.GLOO)
        self._register_backend(torch.device("cpu"), kinds.GLOO, self._gloo)
        self._wire, self._queue = options.wire, options.wire.open(options.priority)

    @override
    def getBackendName(self) -> str:
        return NAME

    @override
    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        size = max(self._off_rank_bytes(input, input_splits), self._off_rank_bytes(output, output_splits))
        joined = torch.full((self.size(),), self._wire.clock.now(), dtype=torch.float64)
        told = self._gloo.alltoall_base(joined, joined.clone(), [], [])
        transfer = Transfer(size, joined, told)
        self._queue.transfers.append(transfer)
        work = self._gloo.alltoall_base(output, input, output_splits, input_splits)
        return _Arrival(work, self._wire, transfer)

    all_to_all_single = alltoall_base  # its name in torch 2.13

    # Not left to the base class: it would enter gloo with the GIL held, which gloo's threads need to let go of tensors.
    @override
    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        return self._gloo.allreduce(*args, **kwargs)

    @override
    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        return self._gloo.broadcast(*args, **kwargs)

    @override
    def allgather(self, *args: Any, **kwargs: Any) -> Any:
        return self._gloo.allgather(*args, **kwargs)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        return self._gloo.barrier(*args, **kwargs)

    def _off_rank_bytes(self, tensor: Tensor, splits: list[int]) -> int:
        rows = tensor.shape[0] if tensor.dim() else 0
        own = splits[self.rank()] if splits else rows // self.size()
        return tensor.nbytes * (rows - own) // rows if rows else 0


def new_link(wire: Any, priority: int = 0, kind: type[LinkGroup] = LinkGroup) -> dist.ProcessGroup:
    """A group of all ranks over this rank's ``wire``; lower ``priority`` goes first.

    Args:
        wire: a :class:`Wire`, or what groups of another ``kind`` want.
        kind: of the group.
    """
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            NAME,
            lambda group, options: options.kind(
                group.store, group.group_rank, group.group_size, group.timeout, options
            ),
            extended_api=True,
            devices=["cpu"],
        )
    group = dist.new_group(backend=NAME, pg_options=_Options(wire, priority, kind))
    assert isinstance(group, dist.ProcessGroup)
    return group
