"""Moves tensors by copy engines, through pinned host memory. No kernel runs, and between ranks of one host no thread moves data.

For each buffer, a stream copies it from the device to shared memory and increments a counter. The stream of the receiving rank
waits for the counter and copies the data to its device. What a rank sends to itself takes the same path: a direct copy within
a device would be shorter, but the GPU runs such copies on its SMs. The buffers between ranks of one host can also lie in the
memory of the receiving GPU (``rings.py``). ``csrc/README.md`` and ``csrc/transport/queue.h`` describe
the protocol.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_freescale import _C
from lightning_freescale.runtime.errors import ConfigurationError, FreeScaleError
from lightning_freescale.runtime.streams import current_stream_handle
from lightning_freescale.transport import nixl, rings
from lightning_freescale.transport.addresses import Place, address_of, shared_secret
from lightning_freescale.transport.errors import TransportError
from lightning_freescale.transport.options import Options
from lightning_freescale.transport.rank_buffers import RankBuffers
from lightning_freescale.transport.rendezvous import Rendezvous

_open_movers: weakref.WeakSet[HostStagedMover] = weakref.WeakSet()


def check_cuda_connections() -> None:
    """Raise a ConfigurationError if ``CUDA_DEVICE_MAX_CONNECTIONS=1``, which some training frameworks set."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1":
        raise ConfigurationError(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one hardware queue, so a transfer that waits for a peer "
            "would block the compute behind it. Unset it, set it to 8 or more, or choose another transport."
        )


@cache
def _device(device: torch.device) -> _C.TransportDevice:
    """The C++ device, one per process and device, because high- and low-priority groups coordinate through it."""
    if device.type == "cpu":
        return _C.host_device()
    check_cuda_connections()
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return _C.cuda_device(index)


def _transport_error(error: RuntimeError) -> TransportError:
    """The error of the C++ queue as a TransportError."""
    return error if isinstance(error, TransportError) else TransportError(str(error))


class _HostStagedWork(dist._Work):
    """A transfer. As with NCCL, ``wait()`` makes the current CUDA stream wait. On CPU it blocks the host, as with gloo."""

    def __init__(self, exchange: _C.TransportExchange, device: torch.device, received: RankBuffers, timeout: float):
        super().__init__()
        self._exchange, self._device, self._received, self._timeout = exchange, device, received, timeout

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            if self._device.type == "cuda":
                self._exchange.block_stream(current_stream_handle(self._device))
            else:
                # Without a timeout of the caller, the queue's own timeout comes first, whose error says what is missing.
                self._exchange.wait(timeout.total_seconds() if timeout else 2 * self._timeout + 60)
        except RuntimeError as error:
            raise _transport_error(error) from None
        return True

    @override
    def synchronize(self) -> None:
        self.wait()

    @override
    def is_completed(self) -> bool:
        try:
            return self._exchange.done()
        except RuntimeError:  # it has failed; wait() raises the reason
            return True

    @override
    def is_success(self) -> bool:
        return self.exception() is None

    @override
    def exception(self) -> Exception | None:
        try:
            self._exchange.done()
        except RuntimeError as error:
            return TransportError(str(error))
        return None

    @override
    def result(self) -> list[Tensor]:
        return self._received.buffers

    @override
    def get_future(self) -> Any:
        if self._device.type == "cuda":
            future: Any = torch.futures.Future(devices=[self._device])
            with torch.cuda.stream(torch.cuda.Stream(self._device)):
                self.wait()
                future.set_result(self._received.buffers)  # records the work of this side stream
            return future
        future = torch.futures.Future()

        def finish() -> None:
            try:
                self.wait()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(self._received.buffers)

        threading.Thread(target=finish, daemon=True).start()
        return future


class HostStagedMover:
    """Moves the tensors of one group on one device, over a C++ queue. Creating it is a collective.

    Args:
        early_flag: a fault for tests. Chunks are announced before they are copied, so the receiver gets wrong bytes.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        timeout: timedelta,
        device: torch.device,
        options: Options,
        early_flag: bool = False,
    ):
        self.device, self._timeout = device, timeout.total_seconds()
        self._process = os.getpid()
        rendezvous = Rendezvous(store, rank, world, timeout)
        try:
            self._queue = self._set_up(rendezvous, rank, options, early_flag)
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            rendezvous.report_failure(error)
            if isinstance(error, FreeScaleError):
                raise
            raise TransportError(f"the transport cannot be set up: rank {rank}: {error}") from error
        self._queue.unlink_segment()  # every rank has mapped our memory, so nobody needs its name any more
        self._streams: list[Any] = []
        if device.type == "cuda":
            self._streams = [torch.cuda.ExternalStream(handle, device=device) for handle in self._queue.streams()]
        self._in_use: deque[tuple[_C.TransportExchange, list[Tensor]]] = deque()
        _open_movers.add(self)

    def _set_up(self, rendezvous: Rendezvous, rank: int, options: Options, early_flag: bool) -> _C.TransportQueue:
        """Make the queue of this rank and connect it to those of all ranks. A collective."""
        cpp_device = _device(self.device)
        own = Place.of_this_rank(*rings.gpu_of(self.device), no_rdma=nixl.why_no_rdma())
        places = [Place.from_text(text) for text in rendezvous.share("places", own.as_text())]
        placement = rings.place_rings(options.rings, rank, places)
        self.hosts = [place.host for place in places]
        several = len(set(self.hosts)) > 1
        queue = _C.TransportQueue(
            device=cpp_device,
            rank=rank,
            hosts=self.hosts,
            high_priority=options.priority == "high",
            chunk_bytes=options.chunk_bytes,
            buffer_bytes=options.buffer_bytes,
            timeout=self._timeout,
            bind_to=address_of(rank, places) if several else "127.0.0.1",
            secret=shared_secret() if several else "",
            network_threads=options.network_threads,
            device_rings=placement.on_device,
            nixl_library=nixl.library_of_group(options.network, places),
            early_flag=early_flag,
        )
        addresses = rendezvous.share("addresses", queue.address())
        rings.map_rings(queue, options.rings, rank, placement, rings.Meeting(rendezvous, self.hosts, addresses))
        queue.connect(addresses, rendezvous.raise_failure)
        rendezvous.share("connected", "")
        return queue

    def exchange(self, kind: str, send: RankBuffers, receive: RankBuffers) -> _HostStagedWork:
        """Send the bytes ``i`` of ``send`` to rank ``i``, and receive the bytes ``i`` of ``receive`` from rank ``i``.

        ``kind`` is the name of the collective, for messages. It must be the same on every rank.
        """
        stream = current_stream_handle(self.device) if self._streams else 0
        try:
            exchange = self._queue.exchange(
                kind,
                send.addresses,
                send.sizes,
                receive.addresses,
                receive.sizes,
                stream,
            )
        except RuntimeError as error:
            raise _transport_error(error) from None
        self._keep_alive(exchange, send, receive)
        return _HostStagedWork(exchange, self.device, receive, self._timeout)

    def _keep_alive(self, exchange: _C.TransportExchange, send: RankBuffers, receive: RankBuffers) -> None:
        """Keep the memory of the tensors until the transfer is done, even if the caller drops them."""
        if self._streams:
            out, into = self._streams
            for tensor in send.memory:
                tensor.record_stream(out)
            for tensor in receive.memory:
                tensor.record_stream(into)
            return
        with contextlib.suppress(RuntimeError):  # wait() raises the failure
            while self._in_use and self._in_use[0][0].done():
                self._in_use.popleft()
        self._in_use.append((exchange, [*send.memory, *receive.memory]))

    def check(self) -> None:
        """Raise if the queue has failed."""
        failure = self._queue.failure()
        if failure is not None:
            raise TransportError(failure)

    def report(self) -> dict[str, int]:
        """Memory and traffic so far.

        ``pinned_bytes``: host memory that this rank has pinned. ``ring_bytes`` and ``ring_bound_bytes``: memory of the ring
        buffers that it sends from, now and at most. ``device_bytes``: GPU memory of the ring buffers that it receives into,
        if they are in GPU memory. ``exchanges``, ``sent_bytes``, ``received_bytes``: totals.
        """
        return self._queue.report()

    def close(self, seconds: float) -> None:
        """Wait at most ``seconds`` for outstanding transfers, then free memory and streams.

        Raises a TransportError if a transfer could not be finished, unless the group had failed before. Does nothing in a
        forked child: the queue belongs to its parent.
        """
        if os.getpid() != self._process:
            return
        known = self._queue.failure()
        _open_movers.discard(self)
        self._queue.close(seconds)
        if known is None:
            self.check()


def failed_transfer() -> TransportError | None:
    """The failure of any host-staged transfer of this process, or None.

    A failed transfer leaves NaN in its outputs, and work that was queued behind it may have used them. Ask after the values in
    question have been copied to the host: what was computed from a failed transfer is then known to be so.
    """
    for mover in list(_open_movers):
        try:
            mover.check()
        except TransportError as error:
            return error
    return None


@atexit.register
def _close_all() -> None:
    for mover in list(_open_movers):
        with contextlib.suppress(Exception):  # the process ends, so nobody could handle an error
            mover.close(2)


def _leave_to_parent() -> None:
    """In a forked child: forget the queues, which belong to the parent, and close their sockets.

    The child has none of their threads. A peer that waits for the parent would not see its end while the child lives.
    """
    _open_movers.clear()
    _C.close_sockets_after_fork()


os.register_at_fork(after_in_child=_leave_to_parent)
