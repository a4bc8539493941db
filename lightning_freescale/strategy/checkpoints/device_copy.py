"""Copies of the state for asynchronous saves. On a GPU, the training waits for a copy on the device only.

A copy of large tables to host memory takes seconds, and one on the device takes milliseconds. The background thread moves the
copy to host memory while the training changes the originals.

A model has hundreds of small weights and optimizer states. Their copies are made together, because a call for each one takes
longer than the copy itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from lightning_freescale.runtime.log import log_once
from lightning_freescale.runtime.streams import SideStream
from lightning_freescale.strategy.checkpoints.tensors import Slot, copied_shards, host_copy, is_sharded, snapshot

CHUNK_BYTES = 32 << 20  # of page-locked memory; two such buffers are in use while a copy moves to host memory
SPARE_SHARE = 0.05  # of the device's memory stays free beside the copy
SMALL_BYTES = 1 << 20  # Tensors up to this size are copied together.
_TYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


class DeferredCopy:
    """A copy of a checkpoint that the training cannot change, and that comes to host memory by :meth:`on_host`.

    Args:
        value: mappings and sequences of tensors and other objects.
        device: the device of the rank. If it is a GPU without the memory for a copy, the copy is made in host memory at once.
    """

    def __init__(self, value: Any, device: torch.device):
        self._device = device
        self._ready: torch.cuda.Event | None = None  # The copy on the device is complete.
        tensors: list[Tensor] = []

        def slot_of(tensor: Tensor) -> Slot:
            tensors.append(tensor)
            return Slot(len(tensors) - 1)

        self._value = snapshot(value, slot_of, copied_shards)
        copies = _copies_on_device(tensors, device) if device.type == "cuda" else None
        if copies is not None:
            self._ready = torch.cuda.current_stream(device).record_event()
        self._copies: TensorCopies | None = copies or TensorCopies(tensors, host_copy, ["cpu"])

    def on_host(self) -> Any:
        """The copy in host memory. Call this once, in any thread. The copy on the device is given up."""
        copies, self._copies = self._copies, None
        assert copies is not None
        if self._ready is None:
            tensors = copies.separate(lambda tensor: tensor)
        else:
            with torch.cuda.device(self._device):
                side = SideStream(self._device)
                buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
                with side.work(event=self._ready):
                    tensors = copies.separate(lambda tensor: to_host(tensor, buffers) if tensor.is_cuda else tensor)
        value, self._value = self._value, None
        return snapshot(value, lambda slot: tensors[slot.number])


class TensorCopies:
    """Copies of tensors. Small ones of the same type and device are made together, in one tensor.

    Args:
        copy_of: gives the copy of one tensor. It is used for large tensors, and for those on other devices than ``devices``.
        devices: the types of devices on which small tensors are copied together, to the same device.
    """

    @torch.no_grad()
    def __init__(self, tensors: Sequence[Tensor], copy_of: Callable[[Tensor], Tensor], devices: Sequence[str]):
        self._shapes = [tensor.shape for tensor in tensors]
        small: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, tensor in enumerate(tensors):
            if _is_plain(tensor) and tensor.nbytes <= SMALL_BYTES:  # A sparse tensor has no ``nbytes``.
                small.setdefault((tensor.device, tensor.dtype), []).append(index)
        groups = [indices for (device, _), indices in small.items() if device.type in devices and len(indices) > 1]
        # One call of C++ for each group. With a single tensor it would return a view, so there are at least two.
        self._together = [
            (indices, _flatten_dense_tensors([tensors[index] for index in indices])) for indices in groups
        ]
        done = {index for indices in groups for index in indices}
        self._single = {index: copy_of(tensor) for index, tensor in enumerate(tensors) if index not in done}

    def separate(self, moved: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """The copies, one tensor for each original. ``moved`` copies a tensor to the device on which they are wanted."""
        found = {index: moved(copy) for index, copy in self._single.items()}
        for indices, copy in self._together:
            parts = moved(copy).split([self._shapes[index].numel() for index in indices])
            # ``torch.save`` would write a part of a tensor with the whole of it.
            found |= {index: part.clone().view(self._shapes[index]) for index, part in zip(indices, parts, strict=True)}
        return [found[index] for index in range(len(self._shapes))]


def _is_plain(tensor: Tensor) -> bool:
    """Whether ``tensor`` can be copied together with others. A subclass of tensors may have more than its numbers."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.dtype in _TYPES and tensor.layout is torch.strided


def to_host(tensor: Tensor, buffers: list[Tensor]) -> Tensor:
    """A copy in host memory, by parts: one buffer is filled from the device while the host empties the other one."""
    if tensor.layout is not torch.strided:  # The parts of a sparse tensor are not in one piece of memory.
        return host_copy(tensor)
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


def _copies_on_device(tensors: Sequence[Tensor], device: torch.device) -> TensorCopies | None:
    """Copies of ``tensors`` where they are; ``None`` if the device does not have the memory for them."""
    needed = device_bytes(tensors)
    free, total = torch.cuda.mem_get_info(device)
    spare = int(SPARE_SHARE * total)
    if needed + spare <= free:
        try:
            return TensorCopies(tensors, _same_device_copy, ["cpu", "cuda"])
        except torch.OutOfMemoryError:  # Another process took the memory after the question.
            pass
    log_once(
        f"asynchronous saves hold the training up until the tables are in host memory: a copy on the device needs "
        f"{needed >> 20} MiB and {spare >> 20} MiB to spare, and {free >> 20} MiB are free"
    )
    return None


def _same_device_copy(tensor: Tensor) -> Tensor:
    """A copy on the device of ``tensor``."""
    if tensor.layout is not torch.strided:
        return tensor.detach().clone()  # On CUDA a sparse tensor takes no memory format, not even that of the original.
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def device_bytes(value: Any, device: str = "cuda") -> int:
    """The bytes of the tensors in ``value`` that lie on a device of this type."""
    if is_sharded(value):
        value = [shard.tensor for shard in value.local_shards()]
    if isinstance(value, Tensor):
        return value.numel() * value.element_size() if value.device.type == device else 0
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(device_bytes(part, device) for part in parts)
