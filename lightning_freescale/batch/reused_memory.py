"""``ReusedMemory``: finds loaders that write a batch into the memory of earlier batches.

Batches wait for their training. A loader that fills the same tensors again and again would change a waiting batch. The first
batches of every iteration show whether a loader does so: a new batch lies in the memory of a waiting one, and the values there
have changed. Both are asked, because a loader may yield one batch again and again, and because a training step may change its
own batch while another thread loads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from lightning_freescale.batch.contents import checksum, find_parts
from lightning_freescale.runtime.errors import InputError

CHECKED_BATCHES = 8  # of an iteration


class ReusedMemory:
    """Takes batches from an iterator, and raises if that changes one of the batches before.

    Args:
        waiting: the number of batches that may wait for their training.
    """

    def __init__(self, waiting: int):
        self._waiting: deque[list[Tensor]] = deque(maxlen=waiting)
        self._loaded = 0

    def next(self, iterator: Iterator[Any]) -> Any:
        """The next batch of ``iterator``."""
        if self._loaded >= CHECKED_BATCHES:
            self._waiting.clear()
            return next(iterator)
        # The training may change a batch on purpose, so the tensors are noted again right before the loader runs.
        noted = [[(tensor, checksum(tensor)) for tensor in tensors] for tensors in self._waiting]
        batch = next(iterator)
        tensors = list(_host_tensors(batch))
        places = [_memory(tensor) for tensor in tensors]
        for back, earlier in enumerate(reversed(noted), 1):
            shared = [one for one in earlier if any(_overlap(_memory(one[0]), place) for place in places)]
            if any(checksum(tensor) != before for tensor, before in shared):
                raise InputError(
                    f"the loader wrote batch {self._loaded} into the memory of batch {self._loaded - back}, which was not "
                    "trained yet: some batches are loaded in advance. Yield new tensors each time, for example "
                    "copy.deepcopy(batch)"
                )
        self._waiting.append(tensors)
        self._loaded += 1
        return batch


def _host_tensors(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch whose memory can be read. A jagged tensor computes others later, so those are left out."""
    for part in find_parts(batch, (Tensor, JaggedTensor, KeyedJaggedTensor)):
        held = [part] if isinstance(part, Tensor) else [part.values(), part.weights_or_none(), part.lengths_or_none()]
        for tensor in held:
            if tensor is None or tensor.device.type != "cpu":
                continue
            if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized:
                yield tensor


def _memory(tensor: Tensor) -> tuple[int, int]:
    """The address of a tensor, and the address behind its last element."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]
