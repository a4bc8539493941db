"""Samples to bytes, and back to a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from lightning_freescale.balance.exchange.split_batch import LengthColumns, SplitBatch, map_tensors
from lightning_freescale.runtime.jagged import gather, lengths_to_offsets


def pack_samples(
    split: SplitBatch, columns: Sequence[LengthColumns], order: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the bytes of the samples ``order [n]``, one sample after another, and the number of bytes of each, ``[n]``."""
    starts, sizes, at = [], [], 0
    for tensor, own_columns in zip(split.tensors, columns, strict=True):
        own = split.lengths[:, own_columns] * tensor.row_bytes  # [n, keys]
        starts.append(at + lengths_to_offsets(own.T.ravel())[:-1].reshape(own.T.shape).T)
        sizes.append(own)
        at += own.sum()
    all_bytes = np.concatenate([tensor.rows.reshape(-1).view(torch.uint8).numpy() for tensor in split.tensors])
    start, size = np.concatenate(starts, axis=1)[order], np.concatenate(sizes, axis=1)[order]
    return gather(all_bytes, start.ravel(), size.ravel()), size.sum(axis=1)


def packed_sizes(split: SplitBatch, columns: Sequence[LengthColumns], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``[m, P]``: the bytes of each key of each tensor of each sample.

    Args:
        split: a batch with the same layout.
        columns: how many rows of each tensor a sample has.
        lengths: ``[m, S + 1]`` of the samples of any rank.
    """
    sizes = [lengths[:, own] * tensor.row_bytes for tensor, own in zip(split.tensors, columns, strict=True)]
    return np.concatenate(sizes, axis=1)


def build_batch(
    pattern: SplitBatch,
    columns: Sequence[LengthColumns],
    lengths: NDArray[np.int64],
    packed: NDArray[np.uint8],
    pin_memory: bool = False,
) -> Any:
    """Return a batch of the same type as the batch behind ``pattern``, made of ``m`` packed samples.

    Args:
        pattern: a batch with the same layout.
        columns: how many rows of each tensor a sample has.
        lengths: ``[m, S + 1]``, see :class:`SplitBatch`.
        packed: the bytes of the samples, as :func:`pack_samples` makes them.
        pin_memory: put the tensors into page-locked memory.
    """
    size = packed_sizes(pattern, columns, lengths)
    start = lengths_to_offsets(size.ravel())[:-1].reshape(size.shape)
    # The tensors come in the order of ``pattern.tensors``: each takes its own columns, and its own range of ``size``.
    ranges = iter(np.split(np.arange(size.shape[1]), np.cumsum([len(own) for own in columns])[:-1]))
    remaining = iter(columns)
    pinned = (lambda tensor: tensor.pin_memory()) if pin_memory else (lambda tensor: tensor)

    def rows(like: Tensor, own_columns: LengthColumns) -> Tensor:
        own = next(ranges)
        shape = (int(lengths[:, own_columns].sum()), *like.shape[1:])
        values = gather(packed, start[:, own].T.ravel(), size[:, own].T.ravel())
        tensor = torch.from_numpy(values).view(like.dtype) if len(values) else torch.empty(0, dtype=like.dtype)
        return pinned(tensor.reshape(shape))

    def rebuild(name: str, old: Any) -> Any:
        own_columns = next(remaining)
        if isinstance(old, Tensor):
            return rows(old, own_columns)
        values, weights = rows(old.values(), own_columns), None
        if (old_weights := old.weights_or_none()) is not None:
            weights = rows(old_weights, next(remaining))
        counts = pinned(torch.from_numpy(lengths[:, own_columns].T.ravel()).to(old.lengths().dtype))
        if isinstance(old, JaggedTensor):
            return JaggedTensor(values, lengths=counts, weights=weights)
        by_key = lengths[:, own_columns].sum(0).tolist()  # On a GPU TorchRec would let the host wait for these sums.
        return KeyedJaggedTensor(
            old.keys(), values, weights=weights, lengths=counts, stride=len(lengths), length_per_key=by_key
        )

    return map_tensors(rebuild, "batch", pattern.batch)
