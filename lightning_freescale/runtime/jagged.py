"""Jagged index kernels: move samples of different lengths, stored one after another, in one pass of C++.

``values`` is any C-contiguous NumPy array ``[T, ...]`` of any dtype but object; it may be read-only or a memory map and
is never copied whole. Sample ``i`` owns ``lengths[i]`` of its rows. Indices may have any integer dtype and come back as
int64. Input that does not fit raises ``ValueError`` with the argument and the value, before anything moves.

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

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale import _C


class Dispatch(NamedTuple):
    """Samples grouped by destination rank, in their old order within a rank: what an AllToAll sends.

    Attributes:
        values: ``[T, ...]`` rows, those for rank 0 first.
        lengths: ``[n]`` rows of each sample, in the new order.
        order: ``[n]`` old position of each sample; :func:`combine` takes it to undo the move, and :func:`permute` to
            move further columns of the same samples.
        samples_per_rank: ``[world]`` samples for each rank.
        values_per_rank: ``[world]`` rows for each rank.
    """

    values: NDArray
    lengths: NDArray[np.int64]
    order: NDArray[np.int64]
    samples_per_rank: NDArray[np.int64]
    values_per_rank: NDArray[np.int64]


def lengths_to_offsets(lengths: ArrayLike) -> NDArray[np.int64]:
    """``[n]`` lengths to ``[n + 1]`` offsets: sample ``i`` owns rows ``offsets[i]`` to ``offsets[i + 1]``."""
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
        values and lengths, in the new order.
    """
    return _C.permute(values, as_indices("lengths", lengths), as_indices("order", order))


def combine(values: NDArray, lengths: ArrayLike, order: ArrayLike) -> tuple[NDArray, NDArray[np.int64]]:
    """Inverse of :func:`permute`: sample ``i`` of the input goes to position ``order[i]`` of the output."""
    return _C.combine(values, as_indices("lengths", lengths), as_indices("order", order))


def dispatch(values: NDArray, lengths: ArrayLike, ranks: ArrayLike, world: int) -> Dispatch:
    """Group samples by destination rank, stable.

    Args:
        values: ``[sum(lengths), ...]``.
        lengths: ``[n]`` rows of each sample.
        ranks: ``[n]`` destination of each sample, ``0 .. world - 1``.
        world: number of ranks; a rank may receive nothing.
    """
    return Dispatch(*_C.dispatch(values, as_indices("lengths", lengths), as_indices("ranks", ranks), world))


def as_indices(name: str, values: ArrayLike) -> NDArray[np.int64]:
    """``values`` as contiguous int64; ``ValueError`` with ``name`` if that would round them."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:  # an empty list has dtype float64
        raise ValueError(f"{name}: dtype {array.dtype} is not an integer type")
    return np.ascontiguousarray(array, dtype=np.int64)
