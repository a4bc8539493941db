"""An emulated network for CPU ranks: the c10d backend ``"link"``, whose all-to-alls take a given time and use no CPU meanwhile.

gloo moves the bytes. A transfer is complete when gloo is done and the rank's emulated wire has carried the bytes, too.
Each rank has one wire. The process groups of a rank share the wire in chunks, groups of higher priority first, so an
urgent transfer overtakes a large one that has already started. All other collectives run over gloo and take no emulated
time.

    wire = Wire(clock, bandwidth=10e6, latency=1e-4)
    group = new_emulated_group(wire, priority=0)   # like dist.new_group(): on all ranks, in the same order
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

BACKEND = "link"
_ProcessGroup: Any = dist.ProcessGroup  # untyped: its stubs overload each collective, and this class does not


class EmulatedTransfer:
    """One all-to-all as this rank's wire sees it.

    Args:
        size: bytes that the wire has to carry.
        joined: ``[world]`` float64, the time at which each rank joined; valid once ``join_times`` is done.
        join_times: the exchange that fills ``joined``.
    """

    def __init__(self, size: int, joined: Tensor, join_times: Any):
        self.bytes_left = size
        self.arrived: float | None = None
        self._joined, self._join_times = joined, join_times
        self._last_joined: float | None = None

    def last_joined(self) -> float:
        """When the last rank joined. An all-to-all does not start before that."""
        if self._last_joined is None:
            self._join_times.wait()
            self._last_joined = float(self._joined.max())
        return self._last_joined


class TransferQueue:
    """The transfers of one process group, in order."""

    def __init__(self, priority: int):
        self.priority = priority  # lower goes first
        self.transfers: deque[EmulatedTransfer] = deque()
        self.last_chunk = 0  # number of the last chunk from this queue: groups of equal priority alternate


class Wire:
    """The connection of one rank to all others, in both directions at once.

    The wire computes its schedule only as far as somebody waits for it. This is exact, because a rank that waits starts no new
    transfer.

    Args:
        clock: provides the time.
        bandwidth: bytes per second.
        latency: seconds from the moment the last rank joins an all-to-all to its first byte.
        chunk: seconds after which an urgent transfer may overtake.
    """

    def __init__(self, clock: Clock, bandwidth: float, latency: float, chunk: float = 2e-4):
        self.clock, self.bandwidth, self.latency = clock, bandwidth, latency
        self._chunk = max(1, round(chunk * bandwidth))  # bytes
        self._queues: list[TransferQueue] = []
        self._free = 0.0  # when the wire has carried its current chunk
        self._chunks = 0

    def open(self, priority: int) -> TransferQueue:
        """A new queue."""
        self._queues.append(TransferQueue(priority))
        return self._queues[-1]

    def arrival(self, transfer: EmulatedTransfer) -> float:
        """When ``transfer`` is complete."""
        while transfer.arrived is None:
            self._carry_chunk(self._next_start())
        return transfer.arrived

    def has_arrived(self, transfer: EmulatedTransfer) -> bool:
        """Whether ``transfer`` is complete now. Computes nothing beyond now, because urgent transfers may still start."""
        while transfer.arrived is None and self._next_start() <= self.clock.now():
            self._carry_chunk(self._next_start())
        return transfer.arrived is not None and transfer.arrived <= self.clock.now()

    def _starts(self) -> dict[TransferQueue, float]:
        return {queue: queue.transfers[0].last_joined() + self.latency for queue in self._queues if queue.transfers}

    def _next_start(self) -> float:
        """When the next chunk starts."""
        return max(self._free, min(self._starts().values()))

    def _carry_chunk(self, start: float) -> None:
        ready = [queue for queue, earliest in self._starts().items() if earliest <= start]
        queue = min(ready, key=lambda queue: (queue.priority, queue.last_chunk))
        self._chunks += 1
        queue.last_chunk = self._chunks
        transfer = queue.transfers[0]
        size = min(self._chunk, transfer.bytes_left)
        self._free = start + size / self.bandwidth
        transfer.bytes_left -= size
        if not transfer.bytes_left:
            queue.transfers.popleft()
            transfer.arrived = self._free


class _EmulatedWork(dist._Work):
    """Result of ``all_to_all_single(async_op=True)``: complete when gloo and the wire are."""

    def __init__(self, work: Any, wire: Wire, transfer: EmulatedTransfer):
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
        self._work.wait()  # emulated time decides; gloo may need a moment longer
        return True

    @override
    def get_future(self) -> Any:
        self.wait()
        return self._work.get_future()


@dataclass
class _GroupOptions:
    wire: Any
    priority: int
    kind: type
    _timeout: timedelta = field(default_factory=lambda: timedelta(seconds=60))


class EmulatedGroup(_ProcessGroup):
    """A gloo group whose all-to-alls take the time of the wire."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any, options: _GroupOptions):
        super().__init__(rank, size)
        kinds = dist.ProcessGroup.BackendType
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._set_default_backend(kinds.GLOO)
        self._register_backend(torch.device("cpu"), kinds.GLOO, self._gloo)
        self._wire, self._queue = options.wire, options.wire.open(options.priority)

    @override
    def getBackendName(self) -> str:
        return BACKEND

    @override
    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        size = max(self._off_rank_bytes(input, input_splits), self._off_rank_bytes(output, output_splits))
        joined = torch.full((self.size(),), self._wire.clock.now(), dtype=torch.float64)
        join_times = self._gloo.alltoall_base(joined, joined.clone(), [], [])
        transfer = EmulatedTransfer(size, joined, join_times)
        self._queue.transfers.append(transfer)
        work = self._gloo.alltoall_base(output, input, output_splits, input_splits)
        return _EmulatedWork(work, self._wire, transfer)

    all_to_all_single = alltoall_base  # the name of the method in torch 2.13

    # The base class would call these gloo functions with the GIL held. gloo's threads need the GIL to release tensors: deadlock.
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
        """Bytes of ``tensor`` that belong to other ranks."""
        rows = tensor.shape[0] if tensor.dim() else 0
        own = splits[self.rank()] if splits else rows // self.size()
        return tensor.nbytes * (rows - own) // rows if rows else 0


def new_emulated_group(wire: Any, priority: int = 0, kind: type[EmulatedGroup] = EmulatedGroup) -> dist.ProcessGroup:
    """A process group of all ranks over this rank's ``wire``. A collective.

    Args:
        wire: a :class:`Wire`, or the wire that groups of another ``kind`` require.
        priority: groups with a lower value go first.
        kind: class of the group.
    """
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            BACKEND,
            lambda group, options: options.kind(
                group.store, group.group_rank, group.group_size, group.timeout, options
            ),
            extended_api=True,
            devices=["cpu"],
        )
    group = dist.new_group(backend=BACKEND, pg_options=_GroupOptions(wire, priority, kind))
    assert isinstance(group, dist.ProcessGroup)
    return group
