"""What the index work of ``fused_index.py`` returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.runtime.streams import Readback


class Segments(NamedTuple):
    """Where the ids of each feature and requester start, at the owner."""

    lookup: Tensor  # [T * W + 1] int64
    wire: Tensor  # [T * W] int64


class PlacedIds(NamedTuple):
    """What :class:`~lightning_freescale.embedding.stages.Requests` holds about the ids of a batch."""

    row_keys: Tensor
    owner_wire_order: Tensor
    requester_wire_order: Tensor
    batch_position: Tensor | None
    segments: Segments


class RankBounds(NamedTuple):
    """The places of each rank in the orders of two batches."""

    table: Tensor  # [len(BOUNDS), W] int64, see fused_index.py
    rows: tuple[Tensor, ...]  # the rows of ``table``. One call makes all of them.


class PairOfBatches(NamedTuple):
    """The marks of two consecutive batches, and what follows from them."""

    marks: Tensor  # [n_a + n_b + m_a + m_b] uint8: those of both batches in lookup order, and those received
    bounds: RankBounds
    counts: tuple[Tensor, Tensor]  # [2 W + 2 T] int64: for each batch, see index.split_counts
    owned: tuple[int, int]  # n_a, n_b
    on_host: Readback | None = None  # ``counts`` of both batches one after the other, if they are not on the host
    prefix: Tensor | None = None  # sums of the marks, on CUDA

    def tensors(self) -> list[Tensor | None]:
        """One tensor of each allocation."""
        return [self.marks, self.bounds.table, self.counts[0], self.prefix]


class FusedMarks(NamedTuple):
    """Which rows of one of the two batches collide with the other batch."""

    divided: Callable[[], tuple[DividedIds, DividedIds]]  # both batches; the first call divides them
    second: bool  # whether this is the later batch


class SharedIds(NamedTuple):
    """Which of the ids that an owner has looked up for a micro-batch have a row that the batch after the window uses, too."""

    shared: Tensor  # [n] bool, lookup order
    by_feature: Readback  # [2, T] int64: number of these ids, and of all ids


@dataclass  # not frozen: that would double the time to make one
class DividedIds:
    """The rows of a batch: of each pair of arrays, the first is about the collision rows, the second about the exclusive rows.

    ``divide_batches`` in ``index_triton.py`` explains each array.
    """

    values: tuple[Tensor, Tensor]
    wire_order: tuple[Tensor, Tensor]
    wire_position: tuple[Tensor, Tensor]
    wire_ids: tuple[Tensor, Tensor]
    batch_position: tuple[Tensor, Tensor]
    batch_order: Tensor
    offsets: tuple[Tensor, Tensor]  # [T * B + 1]
    by_requester: list[int]  # [W] collision rows
    by_feature: list[int]
    all_by_feature: list[int]
    by_owner: list[int]


class PartOfFeatures:
    """Some ids of the features that an owner must look up. It has the methods of a ``KeyedJaggedTensor`` that reads need.

    The exchange makes four of them in each step. To make a ``KeyedJaggedTensor`` takes the host longer than all of its uses
    here, and most steps do not need one.

    Args:
        whole: the features.
        values: ``[n]`` the chosen ids, in lookup order.
        offsets: ``[T * B + 1]`` where the chosen ids of each feature and sample start.
        length_per_key: ``[T]`` chosen ids of each feature.
    """

    __slots__ = ("_length_per_key", "_offsets", "_values", "_whole")

    def __init__(self, whole: KeyedJaggedTensor, values: Tensor, offsets: Tensor, length_per_key: list[int]):
        self._whole, self._values, self._offsets, self._length_per_key = whole, values, offsets, length_per_key

    def values(self) -> Tensor:
        return self._values

    def offsets(self) -> Tensor:
        return self._offsets

    def length_per_key(self) -> list[int]:
        return self._length_per_key

    def kjt(self) -> KeyedJaggedTensor:
        """The same ids in TorchRec's type."""
        return KeyedJaggedTensor(
            self._whole.keys(),
            self._values,
            lengths=self._offsets.diff(),
            offsets=self._offsets,
            stride=self._whole.stride(),
            length_per_key=self._length_per_key,
        )


Features: TypeAlias = KeyedJaggedTensor | PartOfFeatures


def as_kjt(features: Features) -> KeyedJaggedTensor:
    """The features in TorchRec's type."""
    return features.kjt() if isinstance(features, PartOfFeatures) else features
