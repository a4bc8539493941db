"""Copies of the state for asynchronous saves. On a GPU, the training waits for a copy on the device only.

A copy of large tables to host memory takes seconds, and one on the device takes milliseconds. The background thread moves the
copy to host memory while the training changes the originals.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_freescale.runtime.log import log_once
from lightning_freescale.runtime.streams import SideStream
from lightning_freescale.strategy.checkpoints.tensors import copied_shards, is_sharded, snapshot

CHUNK_BYTES = 32 << 20  # of page-locked memory; two such buffers are in use while a copy moves to host memory
SPARE_SHARE = 0.05  # of the device's memory stays free beside the copy


class DeferredCopy:
    """A copy of a checkpoint that the training cannot change, and that comes to host memory by :meth:`on_host`.

    Args:
        value: mappings and sequences of tensors and other objects.
        device: the device of the rank. If it is a GPU without the memory for a copy, the copy is made in host memory at once.
    """

    def __init__(self, value: Any, device: torch.device):
        self._device = device
        self._ready: torch.cuda.Event | None = None  # The copy on the device is complete.
        copied = _copy_on_device(value, device) if device.type == "cuda" else None
        if copied is not None:
            self._ready = torch.cuda.current_stream(device).record_event()
        self._value = snapshot(value, of_sharded=copied_shards) if copied is None else copied

    def on_host(self) -> Any:
        """The copy in host memory. Call this once, in any thread. The copy on the device is given up."""
        value, self._value = self._value, None
        if self._ready is None:
            return snapshot(value, lambda tensor: tensor)  # Makes sharded tensors of the copied shards.
        with torch.cuda.device(self._device):
            side = SideStream(self._device)
            buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            with side.work(event=self._ready):
                return snapshot(value, lambda tensor: to_host(tensor, buffers) if tensor.is_cuda else tensor)


def to_host(tensor: Tensor, buffers: list[Tensor]) -> Tensor:
    """A copy in host memory, by parts: one buffer is filled from the device while the host empties the other one."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    source, target = (part.detach().contiguous().reshape(-1).view(torch.uint8) for part in (tensor, host))
    filled: list[tuple[Tensor, Tensor, torch.cuda.Event | None]] = []

    def empty_one() -> None:
        place, buffer, event = filled.pop(0)
        if event is not None:
            event.synchronize()
        place.copy_(buffer)

    size = len(buffers[0])
    for number, begin in enumerate(range(0, len(source), size)):
        part = source[begin : begin + size]
        buffer = buffers[number % len(buffers)][: len(part)]
        buffer.copy_(part, non_blocking=True)
        event = torch.cuda.Event(blocking=True) if tensor.is_cuda else None
        if event is not None:
            event.record()
        filled.append((target[begin : begin + size], buffer, event))
        if len(filled) == len(buffers):
            empty_one()
    while filled:
        empty_one()
    return host


def _copy_on_device(value: Any, device: torch.device) -> Any:
    """A copy of ``value`` whose tensors stay where they are; ``None`` if the device does not have the memory for it."""
    needed = device_bytes(value)
    free, total = torch.cuda.mem_get_info(device)
    spare = int(SPARE_SHARE * total)
    if needed + spare <= free:
        try:
            return snapshot(value, _device_copy, copied_shards)
        except torch.OutOfMemoryError:  # Another process took the memory after the question.
            pass
    log_once(
        f"asynchronous saves hold the training up until the tables are in host memory: a copy on the device needs "
        f"{needed >> 20} MiB and {spare >> 20} MiB to spare, and {free >> 20} MiB are free"
    )
    return None


def _device_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def device_bytes(value: Any, device: str = "cuda") -> int:
    """The bytes of the tensors in ``value`` that lie on a device of this type."""
    if is_sharded(value):
        value = [shard.tensor for shard in value.local_shards()]
    if isinstance(value, Tensor):
        return value.numel() * value.element_size() if value.device.type == device else 0
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(device_bytes(part, device) for part in parts)
