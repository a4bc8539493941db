"""The index work of a batch on CUDA: how the kernels of ``index_triton.py`` are called, and what they return.

It gives what ``index.py`` and ``CollisionDetector`` give, with six kernels for each batch and one transfer for the marks of two
batches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.embedding import index_triton as kernels
from lightning_freescale.embedding.index_results import DividedIds, FusedMarks, PairOfBatches, PlacedIds, Segments
from lightning_freescale.embedding.index_triton import BLOCK_IDS, BOUNDS
from lightning_freescale.runtime.streams import Readback, int64_on_device

LAST_STAMP = 255  # stamps are bytes


class FusedIndex:
    """The index work of one sharding group of a module.

    Args:
        num_rows: local rows of the group. One byte is kept for each of them.
        first_key: ``[T]`` int64, number of the first row of each feature's table.
    """

    def __init__(self, num_rows: int, first_key: Tensor, rank: int, world_size: int):
        self._first_key, self._rank, self._world_size = first_key, rank, world_size
        self._device = first_key.device
        self._stamps = torch.zeros(max(1, num_rows), dtype=torch.uint8, device=self._device)
        self._stamp = 0
        self._stamped: Tensor | None = None  # row keys of the batch whose rows have the last stamp
        self._sample_bounds: dict[tuple[int, ...], Tensor] = {}
        self._block_ranks = _power_of_2(world_size)

    # ---- ids that have arrived --------------------------------------------------------------------------------------
    def place(
        self, features: KeyedJaggedTensor, samples: list[int], by_owner: list[int], unbucketize: Tensor | None
    ) -> PlacedIds:
        """Number the rows of the ids that this rank owns, and find the wire order at the owner and at the requester."""
        values, offsets = features.values(), _some(features.offsets())
        num_owned, num_requested, num_features = values.numel(), sum(by_owner), len(self._first_key)
        segments = num_features * self._world_size
        lookup, wire, keys, owner_order, requester_order, batch_position = self._int64(
            segments + 1, segments, num_owned, num_owned, num_requested, 0 if unbucketize is None else num_requested
        )
        kernels.segments[(1,)](
            offsets, self._bounds_of(samples), lookup, wire,
            num_features, self._world_size, sum(samples), self._rank, BLOCK=self._block_ranks,
        )  # fmt: skip
        if num_owned or num_requested:
            kernels.place_ids[_grid(num_owned, num_requested)](
                values, unbucketize if unbucketize is not None else lookup, self._first_key, lookup, wire,
                keys, owner_order, requester_order, batch_position,
                num_owned, num_requested, sum(by_owner[: self._rank]), by_owner[self._rank],
                num_features, self._world_size,
                PERMUTED=unbucketize is not None, STEPS=_steps(segments), BLOCK=BLOCK_IDS,
            )  # fmt: skip
        position = None if unbucketize is None else batch_position
        return PlacedIds(keys, owner_order, requester_order, position, Segments(lookup, wire))

    def _bounds_of(self, samples: list[int]) -> Tensor:
        key = tuple(samples)
        if key not in self._sample_bounds:
            if len(self._sample_bounds) > 16:  # batch sizes vary from step to step: keep no others
                self._sample_bounds.clear()
            self._sample_bounds[key] = int64_on_device([0, *np.cumsum(samples).tolist()], self._device)
        return self._sample_bounds[key]

    # ---- marks ------------------------------------------------------------------------------------------------------
    def bounds(self, requests: Any, next_requests: Any) -> Tensor:
        """``[len(BOUNDS), W]`` int64: the places of each rank in the wire orders and request orders of two batches."""
        rows = []
        for side in ("by_requester", "by_owner"):
            for batch in (requests, next_requests):
                rows += _wire_bounds(np.array(getattr(batch, side)), self._rank)
        for batch in (requests, next_requests):
            counts = np.array(batch.by_owner)
            rows.append(counts.cumsum() - counts)
        assert len(rows) == len(BOUNDS)
        table = torch.from_numpy(np.stack(rows).astype(np.int64, copy=False))
        return (table.pin_memory() if self._device.type == "cuda" else table).to(self._device, non_blocking=True)

    def mark(self, requests: Any, next_requests: Any, bounds: Tensor) -> tuple[Tensor, Tensor]:
        """Find the rows that two consecutive batches share.

        Returns:
            The buffer of all marks, of which those from other ranks are to be received, and the marks to send to other ranks.
        """
        a, b = requests, next_requests
        owned = len(a.row_keys), len(b.row_keys)
        own = a.by_requester[self._rank] + b.by_requester[self._rank]
        marks = torch.empty(sum(owned) + sum(a.by_owner) + sum(b.by_owner), dtype=torch.uint8, device=self._device)
        sent = torch.empty(sum(owned) - own, dtype=torch.uint8, device=self._device)
        kept_from = len(marks) - own
        first_stamp = self._stamp_of(a.row_keys)
        self._look(b, marks, sent, bounds[BOUNDS.index("send_end_a")], owned[0], first_stamp, kept_from)
        self._write(b.row_keys)
        self._look(a, marks, sent, bounds[BOUNDS.index("send_start_b")], 0, self._stamp, kept_from)
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
        if len(keys):
            kernels.note_rows[_grid(len(keys))](keys, self._stamps, len(keys), self._stamp, BLOCK=BLOCK_IDS)

    def _look(
        self, batch: Any, marks: Tensor, sent: Tensor, shifts: Tensor, first: int, stamp: int, kept_from: int
    ) -> None:
        """Look for ``stamp`` in the rows of ``batch``."""
        count, segments = len(batch.row_keys), batch.segments
        if not count:
            return
        kernels.look_for_rows[_grid(count)](
            batch.row_keys, self._stamps, segments.lookup, segments.wire, shifts, marks, sent,
            count, stamp, first, len(sent), kept_from, len(self._first_key), self._world_size,
            STEPS=_steps(len(segments.wire)), BLOCK=BLOCK_IDS,
        )  # fmt: skip

    def count(self, requests: Any, next_requests: Any, marks: Tensor, bounds: Tensor) -> PairOfBatches:
        """When all marks are there: count them, and start to copy the sizes of all parts to the host."""
        num_features, ranks = len(self._first_key), self._world_size
        counts_row, starts_row = 2 * ranks + 2 * num_features, 2 * num_features * ranks + 2 * ranks
        prefix = marks.cumsum(0, dtype=torch.int32)
        counts, starts = self._int64(2 * counts_row, 2 * starts_row)
        owned = len(requests.row_keys), len(next_requests.row_keys)
        kernels.count_marks[(1,)](
            _some(prefix), requests.segments.lookup, next_requests.segments.lookup, bounds, counts, starts,
            *owned, num_features, ranks, self._rank, BLOCK=self._block_ranks,
        )  # fmt: skip
        return PairOfBatches(
            marks, prefix, bounds, starts.view(2, starts_row), counts.view(2, counts_row), Readback(counts), owned
        )

    # ---- the two parts of a batch -----------------------------------------------------------------------------------
    def divide(self, requests: Any, marks: FusedMarks) -> DividedIds:
        """Divide a batch into collision rows and exclusive rows."""
        pair, which, ranks, num_features = marks.pair, int(marks.second), self._world_size, len(self._first_key)
        num_owned, num_requested = len(requests.row_keys), sum(requests.by_owner)
        offsets, unbucketize = _some(requests.features.offsets()), requests.request_position
        lengths = max(0, requests.features.offsets().numel() - 1)
        out = self._int64(
            *[num_owned] * 4, *[num_requested] * 3, 2 * (lengths + 1), 2 * lengths
        )  # fmt: skip
        rows = ("request_start_b", "receive_start_b", "receive_end_a") if marks.second else (
            "request_start_a", "receive_start_a", "receive_start_b")  # fmt: skip
        request_start, receive_start, receive_shift = (pair.bounds[BOUNDS.index(name)] for name in rows)
        kernels.divide_batch[_grid(num_owned, num_requested, lengths + 1)](
            pair.marks, _some(pair.prefix), requests.features.values(), offsets,
            unbucketize if unbucketize is not None else request_start,
            requests.segments.lookup, request_start, receive_start, receive_shift, pair.starts[which], pair.counts[which],
            *out, which * pair.owned[0], sum(pair.owned), num_owned, num_requested, lengths, num_features, ranks,
            PERMUTED=unbucketize is not None, STEPS=_steps(num_features * ranks), RANK_STEPS=_steps(ranks),
            BLOCK=BLOCK_IDS, BLOCK_RANKS=self._block_ranks,
        )  # fmt: skip
        sizes = [ranks, num_features, num_features, ranks]
        on_host = pair.on_host.wait().view(2, -1)[which].tolist()
        parts = [on_host[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(4)]
        values, wire_order, wire_position, wire_ids, request_order, batch_position, batch_order, *jagged = out
        both_offsets, both_lengths = (part.view(2, -1) for part in jagged)
        return DividedIds(
            values,
            wire_order,
            wire_position,
            wire_ids,
            request_order,
            batch_position,
            batch_order,
            (both_offsets[0], both_offsets[1]),
            (both_lengths[0], both_lengths[1]),
            by_requester=parts[0],
            by_feature=parts[1],
            all_by_feature=parts[2],
            by_owner=parts[3],
        )

    def _int64(self, *sizes: int) -> list[Tensor]:
        """Arrays of these sizes in one allocation. Each begins at a multiple of 16 bytes."""
        steps = [size + size % 2 for size in sizes]
        buffer = torch.empty(sum(steps), dtype=torch.int64, device=self._device)
        parts, place = [], 0
        for size, step in zip(sizes, steps, strict=True):
            parts.append(buffer.narrow(0, place, size))
            place += step
        return parts


def _wire_bounds(counts: np.ndarray, rank: int) -> list[np.ndarray]:
    """Starts and ends of each rank in wire order, see ``index.wire_bounds``."""
    others = counts.copy()
    others[rank] = 0
    starts = others.cumsum() - others
    starts[rank] = others.sum()
    return [starts, starts + counts]


def _some(tensor: Tensor) -> Tensor:
    """The tensor, or one with an element if it has none: a kernel needs memory to point to."""
    return tensor if tensor.numel() else tensor.new_zeros(1)


def _grid(*counts: int) -> tuple[int]:
    return (max(1, -(-max(counts) // BLOCK_IDS)),)


def _power_of_2(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _steps(count: int) -> int:
    """Halvings until one of ``count`` segments is left."""
    return max(0, count - 1).bit_length()
