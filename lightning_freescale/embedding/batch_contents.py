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
    return sum(part._version for part in _parts(kjt).values())


class Contents:
    """The contents of a batch when it was requested.

    Args:
        kjt: the batch.
        by_value: whether to compare values too, if they are in host memory.
    """

    def __init__(self, kjt: KeyedJaggedTensor, by_value: bool = False):
        self._by_value = by_value
        self._noted = self._note(kjt)

    def changed(self, kjt: KeyedJaggedTensor) -> bool:
        """Whether the contents of ``kjt`` are others now."""
        now = self._note(kjt)  # it may have offsets by now, which are computed from the lengths when they are asked for
        return any(now.get(name) != noted for name, noted in self._noted.items())

    def _note(self, kjt: KeyedJaggedTensor) -> dict[str, tuple[int, int, int]]:
        """Address, version and checksum of each tensor."""
        parts = _parts(kjt).items()
        return {name: (part.data_ptr(), part._version, self._sum(part)) for name, part in parts}

    def _sum(self, part: Tensor) -> int:
        if not self._by_value or part.device.type != "cpu":
            return 0
        return zlib.adler32(part.detach().contiguous().view(-1).view(torch.uint8).numpy())


def _parts(kjt: KeyedJaggedTensor) -> dict[str, Tensor]:
    """The tensors that ``kjt`` holds. None is computed here: its stream may not have what it is computed from."""
    found = {
        "values": kjt.values(),
        "weights": kjt.weights_or_none(),
        "lengths": kjt.lengths_or_none(),
        "offsets": kjt.offsets_or_none(),
    }
    return {name: part for name, part in found.items() if part is not None}
