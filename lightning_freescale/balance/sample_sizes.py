"""``sample_sizes``: the numbers that determine what each sample of a batch costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.balance.errors import CannotBalance
from lightning_freescale.batch.contents import find_parts
from lightning_freescale.batch.seq_batch import SeqBatch

SampleSizes = Callable[[Any], tuple[NDArray[np.int64], NDArray[np.int64]]]


def sample_sizes(batch: Any, key: str | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the history lengths ``[n]`` and the candidate counts ``[n]`` of the samples of a batch on the host.

    In a :class:`SeqBatch` the model scores every position except the last against negatives of its sample. In any other
    batch a sample has no candidates, and its length comes from the first KeyedJaggedTensor.

    Args:
        batch: a batch of any type.
        key: the key that gives the length of a sample of other batch types. By default the lengths of all keys are added.
    """
    if isinstance(batch, SeqBatch):
        return batch.host_sizes()  # without operators of torch, because this runs beside the training
    for features in find_parts(batch, KeyedJaggedTensor):
        jagged, keys = (features, len(features.keys())) if key is None else (features[key], 1)
        lengths = jagged.lengths().numpy().reshape(keys, features.stride()).sum(axis=0, dtype=np.int64)
        return lengths, np.zeros_like(lengths)
    raise CannotBalance(f"batch: a {type(batch).__name__} without a KeyedJaggedTensor has no lengths to balance by")
