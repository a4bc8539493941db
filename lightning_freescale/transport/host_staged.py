"""Tensors moved through host memory by the device's copy engines: no kernel, and between ranks of one host no thread.

Every part of a tensor takes the same way, also the one a rank keeps for itself: device to pinned shared memory, a
counter written by the stream, the peer's stream waits for the counter, host memory to device. A copy within a device
would be shorter, but the GPU runs it on its cores. The protocol is in csrc/transport/queue.h.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_freescale import _C
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.transport.errors import TransportError
from lightning_freescale.transport.options import Options
from lightning_freescale.transport.rank_buffers import RankBuffers
from lightning_freescale.transport.rendezvous import Rendezvous, host_id, local_address

_open: weakref.WeakSet[HostStaged] = weakref.WeakSet()


def refuse_single_connection() -> None:
    """Raise when ``CUDA_DEVICE_MAX_CONNECTIONS=1``, as some trainers set it."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1":
        raise ConfigurationError(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one hardware queue: a transfer that waits for a peer "
            "would hold up the compute behind it. Unset it (or use 8 or more), or choose another transport."
        )


@cache
def _device(device: torch.device) -> _C.TransportDevice:
    """One per process: high-priority groups of a device and low-priority ones know each other through it."""
    if device.type == "cpu":
        return _C.host_device()
    refuse_single_connection()
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return _C.cuda_device(index)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """What the C++ queue raises, as the package's own error."""
    try:
        yield
    except RuntimeError as error:
        raise error if isinstance(error, TransportError) else TransportError(str(error)) from None


class _QueueWork(dist._Work):
    """NCCL's semantics on CUDA: ``wait()`` makes the current stream wait. On CPU it blocks, as gloo's does."""

    def __init__(self, exchange: _C.TransportExchange, device: torch.device, outputs: list[Tensor], timeout: float):
        super().__init__()
        self._exchange, self._device, self._outputs, self._timeout = exchange, device, outputs, timeout

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        with _named():
            if self._device.type == "cuda":
                self._exchange.hold(torch.cuda.current_stream(self._device).cuda_stream)
            else:
                # Without a limit of the caller's own, the queue's timeout ends it, whose error says what was missing.
                self._exchange.block(timeout.total_seconds() if timeout else 2 * self._timeout + 60)
        return True

    @override
    def synchronize(self) -> None:
        self.wait()

    @override
    def is_completed(self) -> bool:
        try:
            return self._exchange.done()
        except RuntimeError:  # failed: wait() says why
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
        return self._outputs

    @override
    def get_future(self) -> Any:
        if self._device.type == "cuda":
            future: Any = torch.futures.Future(devices=[self._device])
            with torch.cuda.stream(torch.cuda.Stream(self._device)):
                self.wait()
                future.set_result(self._outputs)  # records what is done on this side stream
            return future
        future = torch.futures.Future()

        def finish() -> None:
            try:
                self.wait()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(self._outputs)

        threading.Thread(target=finish, daemon=True).start()
        return future


class HostStaged:
    """The queue of one group on one device. Creating it is a collective."""

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
        meeting = Rendezvous(store, rank, world, timeout)
        step = "hosts"
        try:
            memory = _device(device)
            self.hosts = meeting.tell(step, host_id())
            step = "addresses"
            self._queue = _C.TransportQueue(
                device=memory,
                rank=rank,
                hosts=self.hosts,
                high=options.priority == "high",
                chunk_bytes=options.chunk_bytes,
                buffer_bytes=options.buffer_bytes,
                timeout=self._timeout,
                bind_to=local_address() if len(set(self.hosts)) > 1 else "127.0.0.1",
                network_threads=options.network_threads,
                early_flag=early_flag,
            )
            addresses = meeting.tell(step, self._queue.address())
            step = "connected"
            self._queue.connect(addresses)
            meeting.tell(step, "")
        except TransportError:
            raise
        except (RuntimeError, ValueError) as error:
            meeting.give_up(step, error)
            raise TransportError(f"the transport cannot be set up: rank {rank}: {error}") from error
        self._queue.seal()  # every rank has mapped our memory: its name is not needed any more
        self._streams: list[Any] = []
        if device.type == "cuda":
            self._streams = [torch.cuda.ExternalStream(handle, device=device) for handle in self._queue.streams()]
        self._in_use: deque[tuple[_C.TransportExchange, list[Tensor]]] = deque()
        _open.add(self)

    def exchange(self, kind: str, send: RankBuffers, receive: RankBuffers) -> _QueueWork:
        """Part ``i`` of ``send`` goes to rank ``i``; part ``i`` of ``receive`` comes from rank ``i``."""
        stream = torch.cuda.current_stream(self.device).cuda_stream if self._streams else 0
        with _named():
            exchange = self._queue.exchange(
                kind,
                [part.data_ptr() for part in send.parts],
                send.sizes,
                [part.data_ptr() for part in receive.parts],
                receive.sizes,
                stream,
            )
        self._keep(exchange, send, receive)
        return _QueueWork(exchange, self.device, receive.parts, self._timeout)

    def _keep(self, exchange: _C.TransportExchange, send: RankBuffers, receive: RankBuffers) -> None:
        """The caller may drop its tensors; their memory is in use until the transfer is done."""
        if self._streams:
            for stream, parts in zip(self._streams, (send, receive), strict=True):
                for part in parts.parts:
                    part.record_stream(stream)
            return
        with contextlib.suppress(RuntimeError):  # a failure is told to whoever waits
            while self._in_use and self._in_use[0][0].done():
                self._in_use.popleft()
        self._in_use.append((exchange, [*send.parts, *receive.parts]))

    def check(self) -> None:
        """Raise if the queue has failed."""
        failure = self._queue.failure()
        if failure is not None:
            raise TransportError(failure)

    def report(self) -> dict[str, int]:
        """Bytes pinned, in rings, at most in rings, sent and received, and the number of exchanges."""
        return self._queue.report()

    def close(self, seconds: float) -> None:
        """Wait for what is on its way, then give back memory and streams. Raises if something could not be finished."""
        known = self._queue.failure()
        self._queue.close(seconds)
        if known is None:
            self.check()


@atexit.register
def _close_all() -> None:
    for engine in list(_open):
        with contextlib.suppress(Exception):  # the process ends: nobody is left to be told
            engine.close(2)
