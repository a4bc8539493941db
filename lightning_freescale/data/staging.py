"""What happens to a batch as soon as it is fetched: checks on the host, then the copy to the device on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.data.batch import SeqBatch, check_jagged
from lightning_freescale.errors import InputError
from lightning_freescale.streams import SideStream


def parts(batch: Any, kinds: type | tuple[type, ...]) -> Iterable[Any]:
    """The objects of ``kinds`` inside a batch made of tuples, lists, mappings and plain objects such as dataclasses."""
    seen: set[int] = set()
    stack = [batch]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, kinds):
            yield item
        elif isinstance(item, Mapping):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, (list, tuple)):
            stack.extend(reversed(item))
        elif hasattr(item, "__dict__") and not isinstance(item, (Tensor, type)):
            stack.extend(reversed(list(vars(item).values())))


REDUCTIONS = ("sample", "token")


def loss_weight(batch: Any, reduction: str) -> int:
    """What a mean loss over this rank's batch counts for in the mean over all ranks.

    ``"sample"``: the stride of the first KeyedJaggedTensor, else the first dimension of the first tensor. ``"token"``: the
    predicted positions of the histories, one less than their events each; for batches of other types, all ids.
    """
    if isinstance(batch, SeqBatch) and reduction == "token":
        return int((batch.lengths - 1).sum())
    for features in parts(batch, KeyedJaggedTensor):
        return features.values().numel() if reduction == "token" else features.stride()
    for tensor in parts(batch, Tensor):
        return tensor.shape[0] if tensor.ndim else 1
    return 1


def check(batch: Any, rows: Mapping[str, int]) -> None:
    """Raise :class:`InputError` for a batch that cannot be trained on; host tensors only, so there is no device sync.

    Args:
        batch: anything a loader yields.
        rows: number of rows of the table behind each feature.
    """
    if batch is None:
        raise InputError("batch: None; the loader or its collate_fn returned no batch")
    if isinstance(batch, SeqBatch) and batch.timestamps.device.type == "cpu":
        batch.validate()
    for features in parts(batch, KeyedJaggedTensor):
        if features.values().device.type != "cpu":
            continue
        if features.stride() == 0:
            raise InputError(f"{', '.join(features.keys())}: an empty batch (0 samples)")
        check_jagged(features, rows)


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
            for part in tensors(self._batch):
                part.record_stream(stream)  # its memory belongs to the copy stream's pool
        return self._batch


def peek(staged: Any) -> Any:
    """The batch inside ``staged`` before it is due, ``None`` if it is not staged. Its copy may still be under way."""
    return staged._batch if isinstance(staged, Staged) else None


def tensors(batch: Any) -> Iterable[Tensor]:
    """All tensors of a batch, those inside jagged tensors too."""
    for part in parts(batch, (Tensor, KeyedJaggedTensor)):
        yield from (leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor))


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
