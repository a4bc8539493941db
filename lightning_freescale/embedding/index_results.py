"""What the index work of ``fused_index.py`` returns. These types need no Triton."""

from __future__ import annotations

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
    """The marks of two consecutive batches, and what follows from them. Shapes are in ``index_triton.py``."""

    marks: Tensor  # [n_a + n_b + m_a + m_b] uint8: those of both batches in lookup order, and those received
    prefix: Tensor  # int32, their running sum
    bounds: Tensor
    starts: Tensor
    counts: Tensor
    on_host: Readback  # of ``counts``
    owned: tuple[int, int]  # n_a, n_b

    def tensors(self) -> list[Tensor]:
        return [self.marks, self.prefix, self.bounds, self.starts, self.counts]


class FusedMarks(NamedTuple):
    """Which rows of one of the two batches collide with the other batch."""

    pair: PairOfBatches
    second: bool  # whether this is the later batch


@dataclass(frozen=True)
class DividedIds:
    """The rows of a batch, the collision rows first. See ``divide_batch`` in ``index_triton.py``."""

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
