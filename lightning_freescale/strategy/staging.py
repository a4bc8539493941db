"""What happens to a batch as soon as it is fetched: checks on the host, then the copy to the device on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.batch.contents import find_tensors
from lightning_freescale.batch.seq_batch import SeqBatch
from lightning_freescale.runtime.streams import SideStream


class Staged:
    """A batch that is on the device already. Lightning's transfer hooks must leave it alone: see :func:`unwrap`."""

    __slots__ = ("_batch", "_copied")

    def __init__(self, batch: Any, copied: torch.cuda.Event | None):
        self._batch, self._copied = batch, copied

    def use(self) -> Any:
        """The batch, safe to use on the current stream."""
        if self._copied is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self._copied)
            for part in find_tensors(self._batch):
                part.record_stream(stream)  # its memory belongs to the copy stream's pool
        return self._batch


def peek(staged: Any) -> Any:
    """The batch inside ``staged`` before it is due, ``None`` if it is not staged. Its copy may still be under way."""
    return staged._batch if isinstance(staged, Staged) else None


def to_device(batch: Any, device: torch.device) -> Any:
    """Start the copies of a batch's tensors, jagged ones too. Lightning, which moves what is left, would wait for the latter."""
    return apply_to_collection(
        batch,
        (Tensor, KeyedJaggedTensor, SeqBatch),
        lambda part: part.to(device, non_blocking=True),
        allow_frozen=True,  # left as it is
    )


def copy_ahead(move: Callable[[], Any], copies: SideStream | None) -> Staged:
    """Run ``move`` (host to device) on the stream ``copies``, so that it does not queue behind the current step's compute."""
    if copies is None or copies.stream is None:
        return Staged(move(), None)
    with copies.work():
        batch = move()
        copied = torch.cuda.Event()
        copied.record(copies.stream)
    return Staged(batch, copied)


def unwrap(batch: Any) -> tuple[Any, bool]:
    """``batch`` with every :class:`Staged` in it replaced by what it holds, and whether there was one.

    With several train loaders Lightning combines their batches into a list or mapping.
    """
    if isinstance(batch, Staged):
        return batch.use(), True
    if isinstance(batch, (list, tuple)) and any(isinstance(item, Staged) for item in batch):
        return type(batch)(unwrap(item)[0] for item in batch), True
    if isinstance(batch, dict) and any(isinstance(item, Staged) for item in batch.values()):
        return {key: unwrap(item)[0] for key, item in batch.items()}, True
    return batch, False
