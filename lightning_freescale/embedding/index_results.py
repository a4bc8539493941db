"""What the index work of ``fused_index.py`` returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

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


class PairOfBatches(NamedTuple):
    """The marks of two consecutive batches, and what follows from them."""

    marks: Tensor  # [n_a + n_b + m_a + m_b] uint8: those of both batches in lookup order, and those received
    bounds: Tensor  # [len(BOUNDS), W] int64, see fused_index.py
    counts: Tensor  # [2, 2 W + 2 T] int64: for each batch, see index.split_counts
    on_host: Readback  # of ``counts``
    owned: tuple[int, int]  # n_a, n_b
    details: tuple[Tensor, ...]  # what the implementation keeps for itself

    def tensors(self) -> list[Tensor]:
        return [self.marks, self.bounds, self.counts, *self.details]


class FusedMarks(NamedTuple):
    """Which rows of one of the two batches collide with the other batch."""

    pair: Callable[[], PairOfBatches]  # on a CPU, the first call waits for the marks of other ranks
    second: bool  # whether this is the later batch


@dataclass(frozen=True)
class DividedIds:
    """The rows of a batch, the collision rows first. ``divide_batch`` in ``index_triton.py`` explains each array."""

    values: Tensor
    wire_order: Tensor
    wire_position: Tensor
    wire_ids: Tensor
    request_order: Tensor
    batch_position: Tensor
    batch_order: Tensor
    offsets: tuple[Tensor, Tensor]  # of the collision rows, of the exclusive rows: [T * B + 1]
    lengths: tuple[Tensor, Tensor]
    by_requester: list[int]  # [W] collision rows
    by_feature: list[int]
    all_by_feature: list[int]
    by_owner: list[int]


class KnownPlaces(NamedTuple):
    """Places of the collision rows, or of the exclusive rows, of a batch."""

    wire_ids: Tensor  # [n] owner: id of each row in wire order
    wire_position: Tensor  # [n] owner: position in wire order of each row in lookup order
    batch_position: Tensor  # [m] requester: position in the batch of each row in wire order
    batch_order: Tensor  # [all m] requester: for each id of the batch, its position among the rows of both kinds
