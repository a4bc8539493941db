"""Streams beside the compute, and memory that is safe to share between them. On CPU everything here does nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A CUDA stream beside the compute; on other devices the work runs where it is called.

    Args:
        first: whether its kernels go before the compute's. A small kernel that does not waits until a large one of the compute
            has started all of its blocks, hence until the compute comes to its own small kernels, and holds those up.
    """

    def __init__(self, device: torch.device, first: bool = False):
        self.stream = torch.cuda.Stream(device, priority=-int(first)) if device.type == "cuda" else None

    @contextmanager
    def work(self, *after: SideStream | None, compute: bool = False) -> Iterator[None]:
        """Queue work here, behind what is queued now on the streams ``after`` and, with ``compute``, on the current one."""
        if self.stream is None:
            yield
            return
        for other in after:
            if other is not None and other.stream is not None:
                self.stream.wait_stream(other.stream)
        if compute:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for what is queued here. The host does not wait."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


def keep_for(stream: torch.cuda.Stream | SideStream | None, tensors: Iterable[Tensor | None]) -> None:
    """Tell the allocator that ``tensors`` are used on ``stream`` too: their memory is not reused before that is done."""
    target = stream.stream if isinstance(stream, SideStream) else stream
    if target is None:
        return
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(target)


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class Readback:
    """A tensor as it is now, on its way to the host, which does not wait for it unless it asks."""

    def __init__(self, value: Tensor):
        value = value.detach()
        self._event: torch.cuda.Event | None = None
        if value.device.type != "cuda":
            self._host = value.clone()
            return
        self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> Tensor:
        """The copy on the host, complete."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def on_device(values: list[int], device: torch.device) -> Tensor:
    """``[n]`` int64. Unlike ``torch.tensor(values, device=...)`` the host does not wait for what the stream holds."""
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
