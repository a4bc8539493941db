"""CUDA streams beside the compute stream, and memory that several streams use. On CPU all of this runs synchronously."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_AT_ONCE: AbstractContextManager[None] = nullcontext()
_SIDE_STREAMS: set[int] = set()  # handles of the streams of all side streams


class SideStream:
    """A CUDA stream beside the compute stream. On other devices the work runs at once, where it is called.

    Args:
        device: the device of the stream.
        high_priority: whether the GPU prefers kernels of this stream to those of the compute stream. Without it, a small
            kernel waits until a large kernel of the compute stream has started all of its blocks. By then the compute has
            come to its own small kernels, and both delay each other.
    """

    def __init__(self, device: torch.device, high_priority: bool = False):
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device, priority=-int(high_priority))
            _SIDE_STREAMS.add(self.stream.cuda_stream)
            # Recorded again for each wait, on this stream and on the compute stream: a wait is for what was recorded last.
            self._queued, self._computed = torch.cuda.Event(), torch.cuda.Event()

    def work(
        self, *after: SideStream | None, compute: bool = False, event: torch.cuda.Event | None = None
    ) -> AbstractContextManager[None]:
        """Queue the work of the ``with`` block on this stream.

        Args:
            after: the work starts when everything that these streams hold now is done.
            compute: the work also starts after everything that the current stream holds now.
            event: the work also starts after this event.
        """
        if self.stream is None:
            return _AT_ONCE
        for other in after:
            if other is not None and other.stream is not None:
                other._queued.record(other.stream)
                self.stream.wait_event(other._queued)
        if compute:
            self._computed.record(torch.cuda.current_stream(self.stream.device))
            self.stream.wait_event(self._computed)
        if event is not None:
            self.stream.wait_event(event)
        return _Selected(self.stream)

    def join(self) -> torch.cuda.Stream | None:
        """Make the current stream wait for the work that is queued here, and return it. The host does not wait."""
        if self.stream is None:
            return None
        current = torch.cuda.current_stream()
        self._queued.record(self.stream)
        current.wait_event(self._queued)
        return current


class _Selected:
    """Makes a stream the current one of its device. ``torch.cuda.stream`` does the same and takes several times as long."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream):
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        torch._C._cuda_setStream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    def __exit__(self, *error: object) -> None:
        stream_id, device_index, device_type = self._before
        torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def mark_used_on(stream: torch.cuda.Stream | SideStream | None, tensors: Iterable[Tensor | None]) -> None:
    """Tell the allocator that ``stream`` uses ``tensors`` too, so that it reuses their memory only after that work."""
    target = stream.stream if isinstance(stream, SideStream) else stream
    if target is None:
        return
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(target)


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The current CUDA stream of ``device``; None on other devices."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def work_so_far(device: torch.device) -> torch.cuda.Event | None:
    """An event after everything that the current stream of ``device`` holds now; None on other devices."""
    stream = current_stream(device)
    return None if stream is None else stream.record_event()


def current_stream_handle(device: torch.device) -> int:
    """The handle of the current CUDA stream of ``device``. ``torch.cuda.current_stream`` takes longer: it makes an object."""
    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if device.index is None else device.index)


def device_failure(device: torch.device) -> Exception | None:
    """The error of a GPU whose state is lost. Every call of CUDA returns it again. Does not wait for the device."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.current_stream(device).query()
    except Exception as failure:
        return failure
    return None


@functools.cache
def _copies_to_host(device: torch.device) -> SideStream:
    return SideStream(device)


def copy_to_host(value: Tensor) -> tuple[Tensor, torch.cuda.Stream]:
    """Start to copy the present value of a CUDA tensor. Returns a page-locked tensor, and the stream that writes it.

    A value of the compute stream is copied by a stream that does nothing else. A copy waits until the GPU's copy engine has
    finished the transfers that came before, for example rows for other ranks. On the compute stream, all kernels after the copy
    would wait, too. A side stream copies its values itself: it is often far ahead of the compute, and the host needs them soon.
    """
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    if current_stream_handle(value.device) in _SIDE_STREAMS:
        host.copy_(value.detach(), non_blocking=True)
        return host, torch.cuda.current_stream(value.device)
    copies = _copies_to_host(value.device)
    assert copies.stream is not None
    present = value.detach().clone()  # by the compute stream, because later work may change the tensor in place
    with copies.work(event=work_so_far(value.device)):
        host.copy_(present, non_blocking=True)
    present.record_stream(copies.stream)
    return host, copies.stream


class Readback:
    """A copy of a tensor's present value to the host. Only :meth:`wait` makes the host wait for it. The compute does not wait."""

    def __init__(self, value: Tensor):
        self._event: torch.cuda.Event | None = None
        if value.device.type != "cuda":
            self._host = value.detach().clone()
            return
        self._host, stream = copy_to_host(value)
        self._event = stream.record_event()

    def arrived(self) -> bool:
        """Whether the copy is complete. Does not wait."""
        return self._event is None or self._event.query()

    def wait(self) -> Tensor:
        """Wait until the copy is complete, and return it: a CPU tensor of the same shape and dtype."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def int64_on_device(values: list[int], device: torch.device) -> Tensor:
    """``[n]`` int64 on ``device``. Unlike ``torch.tensor(values, device=...)``, it does not make the host wait for the stream."""
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
