"""Finds ids that user code has changed after they were requested in advance.

A batch is requested up to two steps before its own step, and user code may change it until then. The tensors of a batch show
this by their address, if they were replaced, and by their version counter, if they were changed in place. The counter does not
count changes through ``tensor.data`` or through NumPy. So the sums of the first batches in host memory are compared as well.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

SUMMED_BATCHES = 16  # the first batches of a module, whose sums are compared


def contents_version(kjt: KeyedJaggedTensor) -> int:
    """A number that grows when user code changes the ids, their weights or their lengths in place."""
    return sum(part._version for part in _parts(kjt))


class Contents:
    """The contents of a batch when it was requested.

    Args:
        kjt: the batch.
        by_value: whether to compare values too, if they are in host memory.
    """

    def __init__(self, kjt: KeyedJaggedTensor, by_value: bool = False):
        self._by_value = by_value
        self._tensors = _tensors(kjt)
        self._sums = _sums(kjt) if by_value else []

    def changed(self, kjt: KeyedJaggedTensor) -> bool:
        """Whether the contents of ``kjt`` are others now."""
        return self._tensors != _tensors(kjt) or (self._by_value and self._sums != _sums(kjt))


def _parts(kjt: KeyedJaggedTensor) -> list[Tensor]:
    found = [kjt.values(), kjt.weights_or_none(), kjt.lengths()]
    return [part for part in found if part is not None]


def _tensors(kjt: KeyedJaggedTensor) -> list[tuple[int, int]]:
    """Address and version of each tensor."""
    return [(part.data_ptr(), part._version) for part in _parts(kjt)]


def _sums(kjt: KeyedJaggedTensor) -> list[int]:
    """A checksum of each tensor in host memory."""
    parts = [part.detach().contiguous().view(-1) for part in _parts(kjt) if part.device.type == "cpu"]
    return [zlib.adler32(part.view(torch.uint8).numpy()) for part in parts]
