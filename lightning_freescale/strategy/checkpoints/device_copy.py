"""Copies of the state for asynchronous saves. On a GPU, the training waits for a copy on the device only.

A copy of large tables to host memory takes seconds, and one on the device takes milliseconds. The background thread moves the
copy to host memory while the training changes the originals.

The tables change at known points of a step only. So their copy may run beside the next step, until the first of these points: on
a GPU on a stream of its own, and on a CPU in a thread. The change waits for it.

A model has hundreds of small weights and optimizer states. Their copies are made together, because a call for each one takes
longer than the copy itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from lightning_freescale.runtime.errors import CheckpointError
from lightning_freescale.runtime.log import log_once
from lightning_freescale.runtime.streams import SideStream, mark_used_on
from lightning_freescale.strategy.checkpoints.tensors import (
    CopiedShards,
    Slot,
    copied_shards,
    host_copy,
    is_sharded,
    snapshot,
)

# Of page-locked memory. Two such buffers are in use while a copy moves to host memory. They are small, because the rows of the
# exchange wait for the copy engine while it fills one.
CHUNK_BYTES = 2 << 20
SPARE_SHARE = 0.05  # of the device's memory stays free beside the copy
CHANGED = (
    "a table was changed between an asynchronous save and the next backward pass, by other code than the training. "
    "Change tables before a save, or save without AsyncCheckpointIO and HostCopies"
)
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
        beside: copy the large shards of sharded tensors beside the training. Call :meth:`start` when they are to be copied, and
            :meth:`protect` before they change.
    """

    def __init__(self, value: Any, device: torch.device, beside: bool = False):
        self._device = device
        self._ready: torch.cuda.Event | None = None  # The copy on the device is complete.
        tensors: list[Tensor] = []
        late: set[int] = set()  # numbers of the tensors that are copied beside the training

        def slot_of(tensor: Tensor) -> Slot:
            tensors.append(tensor)
            return Slot(len(tensors) - 1)

        def slots_of_shards(value: Any, copy_of: Callable[[Any], Any]) -> CopiedShards:
            first = len(tensors)
            copied = copied_shards(value, copy_of)
            shards = range(first, len(tensors)) if beside else ()
            late.update(number for number in shards if _is_large(tensors[number]))
            return copied

        self._value = snapshot(value, slot_of, slots_of_shards)
        self._late = LateCopies([tensors[number] for number in sorted(late)])
        copies = _copies_on_device(tensors, device, self._late) if device.type == "cuda" else None
        self._on_device = copies is not None
        self._copies: TensorCopies | None = copies or TensorCopies(tensors, self._late.target_or(host_copy), ["cpu"])
        if self._on_device:
            self._ready = torch.cuda.current_stream(device).record_event()
        self._started = threading.Event()
        self._reason_against: str | None = None
        if not late:
            self.start()

    def start(self, after: Sequence[SideStream] = ()) -> None:
        """Copy the tables as they are now, unless that has begun.

        Args:
            after: the streams on which the tables have changed, besides the current one.
        """
        if not self._started.is_set():
            at_once = self._device.type == "cuda" and not self._on_device
            try:
                self._late.start(self._device if self._on_device else None, at_once, after)
            except BaseException as error:  # The thread of the save must not wait for a copy that does not come.
                self.abandon(f"the tables could not be copied: {error}")
                raise
            self._started.set()

    def compare(self) -> None:
        """The tables are about to change for the first time since the save. Changes before this point are an error."""
        self._late.compare()

    def abandon(self, reason: str) -> None:
        """Let the save fail, unless the tables have been copied."""
        if not self._started.is_set():
            self._reason_against = reason
            self._started.set()

    def protect(self, streams: Sequence[SideStream] | None = None) -> None:
        """The tables are about to change: let the change wait for their copy. On a GPU the host does not wait.

        Args:
            streams: the streams on which they change. By default it is the current one.
        """
        self._late.protect(streams)

    def on_host(self) -> Any:
        """The copy in host memory. Call this once, in any thread. It waits for :meth:`start`."""
        copies, self._copies = self._copies, None
        assert copies is not None
        self._started.wait()
        if self._reason_against is not None:
            raise CheckpointError(self._reason_against)
        self._late.wait_for_thread()
        if self._ready is None:
            tensors = copies.separate(lambda tensor: tensor)
        else:
            with torch.cuda.device(self._device):
                side = SideStream(self._device)
                buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
                with side.work(event=self._ready), side.work(event=self._late.done):
                    tensors = copies.separate(lambda tensor: to_host(tensor, buffers) if tensor.is_cuda else tensor)
        value, self._value = self._value, None
        self._late.check()
        return snapshot(value, lambda slot: tensors[slot.number])


class LateCopies:
    """Copies of tensors that are made while the training goes on, from :meth:`start` to :meth:`protect`.

    Nothing but the training may change the tensors. Changes in place by other code, before :meth:`compare` or :meth:`protect`,
    are noticed by the versions of the tensors, and :meth:`check` raises an error then.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors, self._numbers = tensors, {id(tensor) for tensor in tensors}
        self._targets: dict[int, Tensor] = {}
        self._versions = [tensor._version for tensor in tensors]
        self._compared, self._changed = not tensors, False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._device: torch.device | None = None
        self.done: torch.cuda.Event | None = None

    def target_or(self, copy_of: Callable[[Tensor], Tensor], device: torch.device | None = None) -> Any:
        """A function that gives memory for the copy of one of the tensors, and ``copy_of`` another tensor."""

        def copied(tensor: Tensor) -> Tensor:
            if id(tensor) not in self._numbers:
                return copy_of(tensor)
            place = torch.device("cpu") if device is None else device
            self._targets[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device=place)
            return self._targets[id(tensor)]

        return copied

    def start(self, device: torch.device | None, at_once: bool = False, after: Sequence[SideStream] = ()) -> None:
        """Copy on a stream of ``device``, or in host memory in a thread or ``at_once``.

        Args:
            after: the streams on which the tensors have changed, besides the current one.
        """
        if not self._tensors:
            return
        if device is not None:
            self._device, side = device, SideStream(device)
            with side.work(*after, compute=True):
                self._copy()
                self.done = torch.cuda.current_stream(device).record_event()
            mark_used_on(side, [*self._tensors, *self._targets.values()])
        elif at_once:
            for stream in after:
                stream.join()
            self._copy()
        else:
            self._thread = threading.Thread(target=self._copy_and_note, daemon=True, name="freescale-table-copy")
            self._thread.start()

    @torch.no_grad()
    def _copy(self) -> None:
        for tensor in self._tensors:
            self._targets[id(tensor)].copy_(tensor, non_blocking=self._device is not None)

    def _copy_and_note(self) -> None:
        try:
            self._copy()
        except BaseException as error:
            self._error = error

    def wait_for_thread(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def protect(self, streams: Sequence[SideStream] | None = None) -> None:
        """Let a change of the tensors that follows on ``streams`` wait for the copies. By default it is the current stream."""
        self.compare()
        if self._thread is not None:
            self._thread.join()
        if self.done is None:
            return
        if streams is None:
            torch.cuda.current_stream(self._device).wait_event(self.done)
        for side in streams or ():
            with side.work(event=self.done):
                pass

    def check(self) -> None:
        """Raise an error if other code has changed the tensors. The copies are complete."""
        self.compare()
        self._tensors, self._targets = [], {}
        if self._changed:
            raise CheckpointError(CHANGED)

    def compare(self) -> None:
        """Look for changes since the begin. Later calls do nothing."""
        with self._lock:  # After the first comparison the training may change the tensors.
            if not self._compared:
                self._changed = [tensor._version for tensor in self._tensors] != self._versions
                self._compared = True


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


def _is_large(tensor: Tensor) -> bool:
    return _is_plain(tensor) and tensor.nbytes > SMALL_BYTES


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


def _copies_on_device(tensors: Sequence[Tensor], device: torch.device, late: LateCopies) -> TensorCopies | None:
    """Copies of ``tensors`` where they are; ``None`` if the device does not have the memory for them."""
    needed = device_bytes(tensors)
    free, total = torch.cuda.mem_get_info(device)
    spare = int(SPARE_SHARE * total)
    if needed + spare <= free:
        try:
            return TensorCopies(tensors, late.target_or(_same_device_copy, device), ["cpu", "cuda"])
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
