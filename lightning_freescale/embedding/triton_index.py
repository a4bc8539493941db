"""The index work on CUDA: how the kernels of ``index_triton.py`` are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.embedding import index_triton as kernels
from lightning_freescale.embedding.fused_index import FusedIndex
from lightning_freescale.embedding.index_results import (
    DividedIds,
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
    """Seven kernels for each pair of batches. The host does not wait for the device, except for the sizes in :meth:`divide`."""

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
        owned = a.row_keys.numel(), b.row_keys.numel()
        kernels.count_marks[(1,)](
            _some(prefix), a.segments.lookup, b.segments.lookup, bounds.table, found,
            *owned, num_features, ranks, self._rank, BLOCK=self._block_ranks,
        )  # fmt: skip
        counts_a, counts_b, _ = found.split_with_sizes((counted, counted, 2 * started))
        on_host = Readback(found.narrow(0, 0, 2 * counted))
        return PairOfBatches(marks, bounds, (counts_a, counts_b), owned, on_host, prefix)

    def divide(self, a: Requests, b: Requests, pair: PairOfBatches) -> tuple[DividedIds, DividedIds]:
        assert a.segments is not None
        assert b.segments is not None
        assert pair.prefix is not None
        assert pair.on_host is not None
        num_features, ranks = self._num_features, self._world_size
        offsets_a, offsets_b = _some(a.features.offsets()), _some(b.features.offsets())
        numbers_a = a.row_keys.numel(), sum(a.by_owner), offsets_a.numel() - 1
        numbers_b = b.row_keys.numel(), sum(b.by_owner), offsets_b.numel() - 1
        memory = torch.empty(_size(*numbers_a) + _size(*numbers_b), dtype=torch.int64, device=self._device)
        permuted = a.request_position is not None
        assert permuted == (b.request_position is not None), "both batches are of one sharding group"
        (blocks,) = _grid(*numbers_a[:2], *numbers_b[:2], 1 + numbers_a[2], 1 + numbers_b[2])
        kernels.divide_batches[(blocks, 2)](
            pair.marks, _some(pair.prefix), pair.bounds.table, pair.counts[0], memory,
            a.features.values(), offsets_a, a.request_position if permuted else memory, a.segments.lookup,
            b.features.values(), offsets_b, b.request_position if permuted else memory, b.segments.lookup,
            *numbers_a, *numbers_b, num_features, ranks,
            PERMUTED=permuted, STEPS=_steps(num_features * ranks), RANK_STEPS=_steps(ranks),
            BLOCK=BLOCK_IDS, BLOCK_RANKS=self._block_ranks,
        )  # fmt: skip
        counts = pair.on_host.wait().tolist()
        half = len(counts) // 2
        counts_a, counts_b = self._parts(counts[:half]), self._parts(counts[half:])
        sizes = [*_parts_of(*numbers_a, counts_a), *_parts_of(*numbers_b, counts_b)]
        arrays = memory.split_with_sizes(sizes)  # one call makes all of them
        half = len(arrays) // 2
        return _divided(arrays[:half], counts_a), _divided(arrays[half:], counts_b)

    def _int64(self, *sizes: int) -> Sequence[Tensor]:
        """Arrays of these sizes in one allocation. Each begins at a multiple of 16 bytes."""
        memory = torch.empty(sum([size + size % 2 for size in sizes]), dtype=torch.int64, device=self._device)
        return memory.split_with_sizes([step for size in sizes for step in (size, size % 2)])[::2]


def _size(owned: int, requested: int, lengths: int) -> int:
    """Memory for one batch in ``divide_batches``, whose kernel computes the same."""
    return 4 * owned + 2 * requested + 2 * lengths + 2


def _parts_of(owned: int, requested: int, lengths: int, counts: Sequence[list[int]]) -> list[int]:
    """Sizes of the arrays of one batch in this memory: of collision rows and of exclusive rows in turn."""
    of_owner, of_requester = sum(counts[0]), sum(counts[3])  # collision rows
    at_owner, at_requester = [of_owner, owned - of_owner], [of_requester, requested - of_requester]
    return [*at_owner * 4, *at_requester, requested, lengths + 1, lengths + 1]


def _divided(arrays: Sequence[Tensor], counts: tuple[list[int], list[int], list[int], list[int]]) -> DividedIds:
    return DividedIds(
        (arrays[0], arrays[1]),
        (arrays[2], arrays[3]),
        (arrays[4], arrays[5]),
        (arrays[6], arrays[7]),
        (arrays[8], arrays[9]),
        arrays[10],
        (arrays[11], arrays[12]),
        *counts,
    )


def _some(tensor: Tensor) -> Tensor:
    """The tensor, or one with an element if it has none: a kernel needs memory to point to."""
    return tensor if tensor.numel() else tensor.new_zeros(1)


def _grid(*counts: int) -> tuple[int]:
    return (max(1, -(-max(counts) // BLOCK_IDS)),)


def _steps(count: int) -> int:
    """Halvings until one of ``count`` segments is left."""
    return max(0, count - 1).bit_length()
