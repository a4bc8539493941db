"""Jagged arrays: reorder samples of different lengths that are stored one after another. The loops run in C++.

``values`` is a C-contiguous NumPy array ``[T, ...]`` of any dtype except object. It may be read-only or a memory map; only the
rows that are asked for are copied. Sample ``i`` consists of ``lengths[i]`` consecutive rows. Indices may have any integer dtype;
returned indices are int64. Invalid input raises a ``ValueError`` that names the argument and the value, before any row is copied.

    >>> import numpy as np
    >>> values, lengths = np.array([10, 11, 20, 30, 31, 32]), [2, 1, 3]
    >>> moved = dispatch(values, lengths, ranks=[1, 0, 1], world=2)
    >>> moved.values
    array([20, 10, 11, 30, 31, 32])
    >>> moved.samples_per_rank, moved.values_per_rank
    (array([1, 2]), array([1, 5]))
    >>> combine(moved.values, moved.lengths, moved.order)
    (array([10, 11, 20, 30, 31, 32]), array([2, 1, 3]))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale import _C


class Dispatch(NamedTuple):
    """Samples grouped by destination rank, as an all-to-all sends them. Within a rank they keep their order.

    Attributes:
        values: ``[T, ...]`` rows, those for rank 0 first.
        lengths: ``[n]`` rows of each sample, in the new order.
        order: ``[n]`` old position of each sample. With it, :func:`combine` restores the old order, and :func:`permute`
            brings further columns of the same samples into the new order.
        samples_per_rank: ``[world]`` samples for each rank.
        values_per_rank: ``[world]`` rows for each rank.
    """

    values: NDArray
    lengths: NDArray[np.int64]
    order: NDArray[np.int64]
    samples_per_rank: NDArray[np.int64]
    values_per_rank: NDArray[np.int64]


def lengths_to_offsets(lengths: ArrayLike) -> NDArray[np.int64]:
    """``[n]`` lengths to ``[n + 1]`` offsets: sample ``i`` is rows ``offsets[i]`` to ``offsets[i + 1]``, end excluded."""
    return _C.lengths_to_offsets(as_indices("lengths", lengths))


def gather(values: NDArray, starts: ArrayLike, lengths: ArrayLike) -> NDArray:
    """Copy slices one after another: ``values[starts[i] : starts[i] + lengths[i]]`` for each ``i``.

    Args:
        values: ``[T, ...]``, for instance a memory map of all histories.
        starts: ``[n]`` first row of each slice; slices may overlap and come in any order.
        lengths: ``[n]`` rows of each slice.

    Returns:
        ``[sum(lengths), ...]``.
    """
    return _C.gather(values, as_indices("starts", starts), as_indices("lengths", lengths))


def permute(values: NDArray, lengths: ArrayLike, order: ArrayLike) -> tuple[NDArray, NDArray[np.int64]]:
    """Reorder samples: sample ``i`` of the output is sample ``order[i]`` of the input.

    Args:
        values: ``[sum(lengths), ...]``.
        lengths: ``[n]`` rows of each sample.
        order: ``[n]``, a permutation of ``0 .. n - 1``.

    Returns:
        ``[sum(lengths), ...]`` values and ``[n]`` lengths, in the new order.
    """
    return _C.permute(values, as_indices("lengths", lengths), as_indices("order", order))


def combine(values: NDArray, lengths: ArrayLike, order: ArrayLike) -> tuple[NDArray, NDArray[np.int64]]:
    """Inverse of :func:`permute`: sample ``i`` of the input goes to position ``order[i]`` of the output."""
    return _C.combine(values, as_indices("lengths", lengths), as_indices("order", order))


def dispatch(values: NDArray, lengths: ArrayLike, ranks: ArrayLike, world: int) -> Dispatch:
    """Group samples by destination rank. Samples of one rank keep their order.

    Args:
        values: ``[sum(lengths), ...]``.
        lengths: ``[n]`` rows of each sample.
        ranks: ``[n]`` destination of each sample, ``0 .. world - 1``.
        world: number of ranks. A rank may receive no sample.
    """
    return Dispatch(*_C.dispatch(values, as_indices("lengths", lengths), as_indices("ranks", ranks), world))


def pack(
    tensors: Sequence[NDArray],
    columns: Sequence[tuple[int, ...]],
    lengths: ArrayLike,
    order: ArrayLike,
    size: int,
) -> NDArray[np.uint8]:
    """Copy the samples of a batch of several tensors into bytes, one sample after another.

    The bytes of a sample are its rows of the first tensor, then of the second tensor, and so on.

    Args:
        tensors: ``[T, ...]`` each. If a tensor has several keys, the rows of the first key come first.
        columns: for each key of each tensor, the column of ``lengths`` that counts its rows; -1 is the last column.
        lengths: ``[n, C]`` rows of each sample.
        order: ``[m]``, the samples to copy.
        size: the number of bytes of these samples.

    >>> ids, labels, lengths = np.array([10, 20, 21], np.uint8), np.array([7, 8], np.uint8), [[1, 1], [2, 1]]
    >>> packed = pack([ids, labels], [(0,), (-1,)], lengths, [1, 0], 5)
    >>> packed
    array([20, 21,  8, 10,  7], dtype=uint8)
    >>> unpack(packed, [3, 0], lengths, [(0,), (-1,)], [copy := np.zeros_like(ids), np.zeros_like(labels)])
    >>> copy
    array([10, 20, 21], dtype=uint8)
    """
    return _C.pack(tensors, columns, as_indices("lengths", lengths), as_indices("order", order), size)


def unpack(
    packed: NDArray[np.uint8],
    starts: ArrayLike,
    lengths: ArrayLike,
    columns: Sequence[tuple[int, ...]],
    tensors: Sequence[NDArray],
) -> None:
    """Inverse of :func:`pack`: fill ``tensors`` with samples ``[m]``.

    Args:
        packed: bytes that contain the bytes of each sample.
        starts: ``[m]``, where the bytes of each sample begin.
        lengths: ``[m, C]`` rows of each sample.
        columns: as for :func:`pack`.
        tensors: ``[T, ...]`` each, with as many rows as the samples have.
    """
    _C.unpack(packed, as_indices("starts", starts), as_indices("lengths", lengths), columns, tensors)


def as_indices(name: str, values: ArrayLike) -> NDArray[np.int64]:
    """``values`` as a contiguous int64 array. Raises a ``ValueError`` that contains ``name`` if they are not integers."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:  # an empty list has dtype float64
        raise ValueError(f"{name}: dtype {array.dtype} is not an integer type")
    return np.ascontiguousarray(array, dtype=np.int64)
