"""Samples to bytes, and back to a batch.

The bytes of a sample are its row of ``SplitBatch.lengths``, then its rows of each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from lightning_freescale.balance.exchange.split_batch import (
    ONE_ROW_PER_SAMPLE,
    LengthColumns,
    SplitBatch,
    map_tensors,
)
from lightning_freescale.runtime.jagged import gather, lengths_to_offsets, pack, unpack

SAME_SIZE = {1: torch.uint8, 2: torch.int16}  # types that NumPy has, by bytes of a value


def packed_sizes(split: SplitBatch, columns: Sequence[LengthColumns]) -> NDArray[np.int64]:
    """Return the number of bytes of each sample of the batch, ``[n]``.

    Args:
        split: the batch.
        columns: how many rows of each tensor a sample has.
    """
    row_bytes = np.zeros(split.lengths.shape[1], dtype=np.int64)
    for tensor, own_columns in zip(split.tensors, columns, strict=True):
        for column in own_columns:
            row_bytes[column] += tensor.row_bytes
    row_bytes[-1] += row_bytes.nbytes
    return split.lengths @ row_bytes


def pack_samples(
    split: SplitBatch, columns: Sequence[LengthColumns], order: NDArray[np.int64], size: int
) -> NDArray[np.uint8]:
    """Return the bytes of the samples ``order [m]``, one sample after another. ``size`` is their number of bytes."""
    tensors = [split.lengths, *(_as_array(tensor.rows) for tensor in split.tensors)]
    return pack(tensors, [ONE_ROW_PER_SAMPLE, *columns], split.lengths, order, size)


def build_batch(
    pattern: SplitBatch,
    columns: Sequence[LengthColumns],
    packed: NDArray[np.uint8],
    sizes: NDArray[np.int64],
    pin_memory: bool = False,
) -> Any:
    """Return a batch of the same type as the batch behind ``pattern``, made of ``m`` packed samples.

    Args:
        pattern: a batch with the same layout.
        columns: how many rows of each tensor a sample has.
        packed: the bytes of the samples, as :func:`pack_samples` makes them.
        sizes: ``[m]`` bytes of each sample.
        pin_memory: put the tensors into page-locked memory.
    """
    starts, width = lengths_to_offsets(sizes)[:-1], pattern.lengths.shape[1]
    row_bytes = width * pattern.lengths.itemsize
    lengths = gather(packed, starts, np.full(len(sizes), row_bytes)).view(np.int64).reshape(-1, width)
    totals = lengths.sum(axis=0)
    remaining = iter(columns)  # The tensors come in the order of ``pattern.tensors``.
    filled: list[NDArray] = []

    def rows(like: Tensor, own_columns: LengthColumns) -> Tensor:
        count = sum(int(totals[column]) for column in own_columns)
        tensor = torch.empty((count, *like.shape[1:]), dtype=like.dtype, pin_memory=pin_memory)
        filled.append(_as_array(tensor))
        return tensor

    def rebuild(name: str, old: Any) -> Any:
        own_columns = next(remaining)
        if isinstance(old, Tensor):
            return rows(old, own_columns)
        values, weights = rows(old.values(), own_columns), None
        if (old_weights := old.weights_or_none()) is not None:
            weights = rows(old_weights, next(remaining))
        counts = torch.empty(len(own_columns) * len(lengths), dtype=old.lengths().dtype, pin_memory=pin_memory)
        counts.numpy().reshape(len(own_columns), len(lengths))[:] = lengths.T[list(own_columns)]
        if isinstance(old, JaggedTensor):
            return JaggedTensor(values, lengths=counts, weights=weights)
        by_key = totals[list(own_columns)].tolist()  # On a GPU TorchRec would let the host wait for these sums.
        return KeyedJaggedTensor(
            old.keys(), values, weights=weights, lengths=counts, stride=len(lengths), length_per_key=by_key
        )

    batch = map_tensors(rebuild, "batch", pattern.batch)
    unpack(packed, starts + row_bytes, lengths, columns, filled)
    return batch


def _as_array(tensor: Tensor) -> NDArray:
    """Return the memory of a contiguous tensor as an array of as many rows. Its dtype differs if NumPy does not have it."""
    try:
        return tensor.numpy()
    except TypeError:  # bfloat16 and the types of 8 bits
        return tensor.view(SAME_SIZE[tensor.element_size()]).numpy()
