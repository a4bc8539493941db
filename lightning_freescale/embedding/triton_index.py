"""The index work on CUDA: how the kernels of ``index_triton.py`` are called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.embedding import index_triton as kernels
from lightning_freescale.embedding.fused_index import PLACES_A, PLACES_B, FusedIndex
from lightning_freescale.embedding.index_results import (
    DividedIds,
    FusedMarks,
    PairOfBatches,
    PlacedIds,
    RankBounds,
    Segments,
)
from lightning_freescale.embedding.index_triton import BLOCK_IDS
from lightning_freescale.runtime.streams import Readback

if TYPE_CHECKING:
    from lightning_freescale.embedding.stages import Requests


class TritonIndex(FusedIndex):
    """Six kernels for each batch. The host does not wait for the device, except for the sizes in :meth:`divide`."""

    @property
    def _block_ranks(self) -> int:
        return 1 << max(0, self._world_size - 1).bit_length()

    def place(
        self, features: KeyedJaggedTensor, samples: list[int], by_owner: list[int], unbucketize: Tensor | None
    ) -> PlacedIds:
        values, offsets = features.values(), _some(features.offsets())
        num_owned, num_requested, num_features = values.numel(), sum(by_owner), self._num_features
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

    def _note(self, keys: Tensor, stamp: int) -> None:
        kernels.note_rows[_grid(keys.numel())](keys, self._stamps, keys.numel(), stamp, BLOCK=BLOCK_IDS)

    def _look(
        self, batch: Requests, marks: Tensor, sent: Tensor, shifts: Tensor, first: int, stamp: int, kept_from: int
    ) -> None:
        count, segments = batch.row_keys.numel(), batch.segments
        assert segments is not None
        if not count:
            return
        kernels.look_for_rows[_grid(count)](
            batch.row_keys, self._stamps, segments.lookup, segments.wire, shifts, marks, sent,
            count, stamp, first, sent.numel(), kept_from, self._num_features, self._world_size,
            STEPS=_steps(segments.wire.numel()), BLOCK=BLOCK_IDS,
        )  # fmt: skip

    def count(self, a: Requests, b: Requests, marks: Tensor, bounds: RankBounds) -> PairOfBatches:
        assert a.segments is not None
        assert b.segments is not None
        num_features, ranks = self._num_features, self._world_size
        counted, started = 2 * ranks + 2 * num_features, 2 * num_features * ranks + 2 * ranks
        prefix = marks.cumsum(0, dtype=torch.int32)
        found = torch.empty(2 * (counted + started), dtype=torch.int64, device=self._device)
        counts_a, counts_b, starts_a, starts_b = found.split_with_sizes((counted, counted, started, started))
        owned = a.row_keys.numel(), b.row_keys.numel()
        kernels.count_marks[(1,)](  # it writes the counts, and the starts, of both batches
            _some(prefix), a.segments.lookup, b.segments.lookup, bounds.table, counts_a, starts_a,
            *owned, num_features, ranks, self._rank, BLOCK=self._block_ranks,
        )  # fmt: skip
        on_host = Readback(found.narrow(0, 0, 2 * counted))
        return PairOfBatches(marks, bounds, (counts_a, counts_b), owned, on_host, prefix, (starts_a, starts_b))

    def divide(self, requests: Requests, marks: FusedMarks) -> DividedIds:
        assert requests.segments is not None
        pair, which, ranks, num_features = marks.pair(), int(marks.second), self._world_size, self._num_features
        assert pair.starts is not None
        assert pair.prefix is not None
        assert pair.on_host is not None
        num_owned, num_requested = requests.row_keys.numel(), sum(requests.by_owner)
        offsets, unbucketize = requests.features.offsets(), requests.request_position
        lengths = max(0, offsets.numel() - 1)
        sizes = (num_owned,) * 4 + (num_requested,) * 3 + (2 * (lengths + 1), 2 * lengths)
        memory = self._memory(sizes)
        places, rows = PLACES_B if marks.second else PLACES_A, pair.bounds.rows
        request_start = rows[places.request_start]
        kernels.divide_batch[_grid(num_owned, num_requested, lengths + 1)](
            pair.marks, _some(pair.prefix), requests.features.values(), _some(offsets),
            unbucketize if unbucketize is not None else request_start,
            requests.segments.lookup, request_start, rows[places.receive_start], rows[places.receive_shift],
            pair.starts[which], pair.counts[which], *_arrays(memory, sizes),
            which * pair.owned[0], sum(pair.owned), num_owned, num_requested, lengths, num_features, ranks,
            PERMUTED=unbucketize is not None, STEPS=_steps(num_features * ranks), RANK_STEPS=_steps(ranks),
            BLOCK=BLOCK_IDS, BLOCK_RANKS=self._block_ranks,
        )  # fmt: skip
        counts = pair.on_host.wait().tolist()
        half = len(counts) // 2
        parts = self._parts(counts[half:] if marks.second else counts[:half])
        owned, requested = sum(parts[0]), sum(parts[3])  # number of collision rows
        firsts = (owned,) * 4 + (requested,) * 2 + (num_requested, lengths + 1, lengths)
        *pairs, (batch_order, _), of_offsets, of_lengths = _pairs(memory, sizes, firsts)
        return self._divided([*pairs, of_offsets, of_lengths], batch_order, parts)

    def _memory(self, sizes: Iterable[int]) -> Tensor:
        """Memory for arrays of these sizes. Each begins at a multiple of 16 bytes."""
        return torch.empty(sum(size + size % 2 for size in sizes), dtype=torch.int64, device=self._device)

    def _int64(self, *sizes: int) -> Sequence[Tensor]:
        """Arrays of these sizes in one allocation."""
        return _arrays(self._memory(sizes), sizes)


def _arrays(memory: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return memory.split_with_sizes([step for size in sizes for step in (size, size % 2)])[::2]


def _pairs(memory: Tensor, sizes: Sequence[int], firsts: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """The arrays of :func:`_arrays`, each divided after its ``firsts`` elements. One call makes all parts."""
    steps = [step for size, first in zip(sizes, firsts, strict=True) for step in (first, size - first, size % 2)]
    parts = memory.split_with_sizes(steps)
    return list(zip(parts[::3], parts[1::3], strict=True))


def _some(tensor: Tensor) -> Tensor:
    """The tensor, or one with an element if it has none: a kernel needs memory to point to."""
    return tensor if tensor.numel() else tensor.new_zeros(1)


def _grid(*counts: int) -> tuple[int]:
    return (max(1, -(-max(counts) // BLOCK_IDS)),)


def _steps(count: int) -> int:
    """Halvings until one of ``count`` segments is left."""
    return max(0, count - 1).bit_length()
