"""The index work of a batch in a few calls. This file has what both implementations share.

``triton_index.py`` runs it on CUDA, ``cpp_index.py`` on a CPU. Both give what ``index.py`` and ``CollisionDetector`` give.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.embedding.index_results import DividedIds, PairOfBatches, PlacedIds, RankBounds
from lightning_freescale.runtime.streams import int64_on_device

if TYPE_CHECKING:
    from lightning_freescale.embedding.stages import Requests

LAST_STAMP = 255  # stamps are bytes

# Rows of ``bounds``: wire order of the batches A and B at the owner, the same at the requester, and request order.
BOUNDS = (
    "send_start_a", "send_end_a", "send_start_b", "send_end_b",
    "receive_start_a", "receive_end_a", "receive_start_b", "receive_end_b",
    "request_start_a", "request_start_b",
)  # fmt: skip
SEND_END_A, SEND_START_B = BOUNDS.index("send_end_a"), BOUNDS.index("send_start_b")


class FusedIndex(ABC):
    """The index work of one sharding group of a module.

    Two consecutive batches, A and B, are treated together. Their marks travel in one transfer: for each rank those of A, then
    those of B.

    Args:
        num_rows: local rows of the group. One byte is kept for each of them.
        first_key: ``[T]`` int64, number of the first row of each feature's table.
    """

    def __init__(self, num_rows: int, first_key: Tensor, rank: int, world_size: int):
        self._first_key, self._rank, self._world_size = first_key, rank, world_size
        self._device, self._num_features = first_key.device, first_key.numel()
        self._stamps = torch.zeros(max(1, num_rows), dtype=torch.uint8, device=self._device)
        self._stamp = 0
        self._stamped: Tensor | None = None  # row keys of the batch whose rows have the last stamp
        self._sample_bounds: dict[tuple[int, ...], Tensor] = {}

    @abstractmethod
    def place(
        self, features: KeyedJaggedTensor, samples: list[int], by_owner: list[int], unbucketize: Tensor | None
    ) -> PlacedIds:
        """Number the rows of the ids that this rank owns, and find the wire order at the owner and at the requester.

        Args:
            features: the ids that this rank owns, in lookup order.
            samples: ``[W]`` samples of each requester.
            by_owner: ``[W]`` ids that this rank requests from each rank.
            unbucketize: ``[m]`` position in request order of each id of the batch; None if both orders are the same.
        """

    def bounds(self, a: Requests, b: Requests) -> RankBounds:
        """``[len(BOUNDS), W]`` int64: the places of each rank in the wire orders and request orders of two batches."""
        counts = np.array([a.by_requester, b.by_requester, a.by_owner, b.by_owner])
        host = torch.empty((len(BOUNDS), self._world_size), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        table = host.numpy()
        _wire_bounds(counts, self._rank, table[0:8:2], table[1:8:2])  # starts and ends of each of the four take turns
        np.subtract(counts[2:].cumsum(1), counts[2:], out=table[8:])
        moved = host.to(self._device, non_blocking=True)
        return RankBounds(moved, moved.unbind())

    def mark(self, a: Requests, b: Requests, bounds: RankBounds) -> tuple[Tensor, Tensor]:
        """Find the rows that two consecutive batches share.

        Returns:
            ``[n_a + n_b + m_a + m_b]`` uint8, of which the marks of other ranks are to be received, and the marks to send to
            other ranks.
        """
        owned = a.row_keys.numel() + b.row_keys.numel()
        own = a.by_requester[self._rank] + b.by_requester[self._rank]
        total = owned + sum(a.by_owner) + sum(b.by_owner)
        marks = torch.empty(total, dtype=torch.uint8, device=self._device)
        sent = torch.empty(owned - own, dtype=torch.uint8, device=self._device)
        kept_from, stamp = total - own, self._stamp_of(a.row_keys)
        self._look(b, marks, sent, bounds.rows[SEND_END_A], a.row_keys.numel(), stamp, kept_from)
        self._write(b.row_keys)
        self._look(a, marks, sent, bounds.rows[SEND_START_B], 0, self._stamp, kept_from)
        return marks, sent

    def _stamp_of(self, keys: Tensor) -> int:
        """The stamp of the rows of a batch. They have one already if the batch was the later one of the last pair."""
        if self._stamp >= LAST_STAMP - 1:
            self._stamps.zero_()
            self._stamp, self._stamped = 0, None
        if self._stamped is not keys:
            self._write(keys)
        return self._stamp

    def _write(self, keys: Tensor) -> None:
        self._stamp, self._stamped = self._stamp + 1, keys
        if keys.numel():
            self._note(keys, self._stamp)

    @abstractmethod
    def _note(self, keys: Tensor, stamp: int) -> None:
        """Write ``stamp`` to these rows."""

    @abstractmethod
    def _look(
        self, batch: Requests, marks: Tensor, sent: Tensor, shifts: Tensor, first: int, stamp: int, kept_from: int
    ) -> None:
        """Look for ``stamp`` in the rows of ``batch``: marks in lookup order from ``first`` on, and in wire order.

        Args:
            sent: marks for other ranks.
            shifts: ``[W]`` distance from the wire order of the batch to that of the common transfer.
            kept_from: where marks for this rank begin in ``marks``.
        """

    @abstractmethod
    def count(self, a: Requests, b: Requests, marks: Tensor, bounds: RankBounds) -> PairOfBatches:
        """When all marks are there: count them, and start to copy the sizes of all parts to the host."""

    @abstractmethod
    def divide(self, a: Requests, b: Requests, pair: PairOfBatches) -> tuple[DividedIds, DividedIds]:
        """Divide both batches into collision rows and exclusive rows."""

    def _parts(self, counts: list[int]) -> tuple[list[int], list[int], list[int], list[int]]:
        """The counts of a batch in the order of ``index.split_counts``: by requester, by feature (twice), by owner."""
        ranks, features = self._world_size, self._num_features
        by_owner = ranks + 2 * features
        return (
            counts[:ranks],
            counts[ranks : ranks + features],
            counts[ranks + features : by_owner],
            counts[by_owner : by_owner + ranks],
        )

    def _bounds_of(self, samples: list[int]) -> Tensor:
        """``[W + 1]`` int64: where the samples of each rank start."""
        key = tuple(samples)
        if key not in self._sample_bounds:
            if len(self._sample_bounds) > 16:  # batch sizes vary from step to step: keep no others
                self._sample_bounds.clear()
            self._sample_bounds[key] = int64_on_device([0, *np.cumsum(samples).tolist()], self._device)
        return self._sample_bounds[key]


class PlacesInBounds(NamedTuple):
    """Numbers of the rows of ``bounds`` that hold the places of one of the two batches."""

    request_start: int
    receive_start: int
    receive_end: int
    receive_shift: int  # of received marks


PLACES_A, PLACES_B = (
    PlacesInBounds(*map(BOUNDS.index, names))
    for names in (
        ("request_start_a", "receive_start_a", "receive_end_a", "receive_start_b"),
        ("request_start_b", "receive_start_b", "receive_end_b", "receive_end_a"),
    )
)


def _wire_bounds(counts: np.ndarray, rank: int, starts: np.ndarray, ends: np.ndarray) -> None:
    """Starts and ends of each rank in wire order, see ``index.wire_bounds``, for each row of ``counts [n, W]``."""
    others = counts.copy()
    others[:, rank] = 0
    sums = others.cumsum(1)
    np.subtract(sums, others, out=starts)
    starts[:, rank] = sums[:, -1]
    np.add(starts, counts, out=ends)
