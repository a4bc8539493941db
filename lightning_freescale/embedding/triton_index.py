"""The index work on CUDA: how the kernels of ``index_triton.py`` are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.embedding import index_triton as kernels
from lightning_freescale.embedding.fused_index import PLACES_A, PLACES_B, FusedIndex
from lightning_freescale.embedding.index_results import DividedIds, FusedMarks, PairOfBatches, PlacedIds, Segments
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

    def _note(self, keys: Tensor, stamp: int) -> None:
        kernels.note_rows[_grid(len(keys))](keys, self._stamps, len(keys), stamp, BLOCK=BLOCK_IDS)

    def _look(
        self, batch: Requests, marks: Tensor, sent: Tensor, shifts: Tensor, first: int, stamp: int, kept_from: int
    ) -> None:
        count, segments = len(batch.row_keys), batch.segments
        assert segments is not None
        if not count:
            return
        kernels.look_for_rows[_grid(count)](
            batch.row_keys, self._stamps, segments.lookup, segments.wire, shifts, marks, sent,
            count, stamp, first, len(sent), kept_from, len(self._first_key), self._world_size,
            STEPS=_steps(len(segments.wire)), BLOCK=BLOCK_IDS,
        )  # fmt: skip

    def count(self, a: Requests, b: Requests, marks: Tensor, bounds: Tensor) -> PairOfBatches:
        assert a.segments is not None
        assert b.segments is not None
        num_features, ranks = len(self._first_key), self._world_size
        counts_row, starts_row = 2 * ranks + 2 * num_features, 2 * num_features * ranks + 2 * ranks
        prefix = marks.cumsum(0, dtype=torch.int32)
        counts, starts = self._int64(2 * counts_row, 2 * starts_row)
        owned = len(a.row_keys), len(b.row_keys)
        kernels.count_marks[(1,)](
            _some(prefix), a.segments.lookup, b.segments.lookup, bounds, counts, starts,
            *owned, num_features, ranks, self._rank, BLOCK=self._block_ranks,
        )  # fmt: skip
        on_device = counts.view(2, counts_row)
        return PairOfBatches(marks, bounds, on_device, Readback(on_device), owned, (prefix, starts.view(2, starts_row)))

    def divide(self, requests: Requests, marks: FusedMarks) -> DividedIds:
        assert requests.segments is not None
        pair, which, ranks, num_features = marks.pair(), int(marks.second), self._world_size, len(self._first_key)
        prefix, starts = pair.details
        num_owned, num_requested = len(requests.row_keys), sum(requests.by_owner)
        offsets, unbucketize = _some(requests.features.offsets()), requests.request_position
        lengths = max(0, requests.features.offsets().numel() - 1)
        out = self._int64(
            *[num_owned] * 4, *[num_requested] * 3, 2 * (lengths + 1), 2 * lengths
        )  # fmt: skip
        places = PLACES_B if marks.second else PLACES_A
        request_start, receive_start, receive_shift = (
            pair.bounds[place] for place in (places.request_start, places.receive_start, places.receive_shift)
        )
        kernels.divide_batch[_grid(num_owned, num_requested, lengths + 1)](
            pair.marks, _some(prefix), requests.features.values(), offsets,
            unbucketize if unbucketize is not None else request_start,
            requests.segments.lookup, request_start, receive_start, receive_shift, starts[which], pair.counts[which],
            *out, which * pair.owned[0], sum(pair.owned), num_owned, num_requested, lengths, num_features, ranks,
            PERMUTED=unbucketize is not None, STEPS=_steps(num_features * ranks), RANK_STEPS=_steps(ranks),
            BLOCK=BLOCK_IDS, BLOCK_RANKS=self._block_ranks,
        )  # fmt: skip
        return self._divided(out, pair.on_host.wait()[which].tolist())

    def _int64(self, *sizes: int) -> Sequence[Tensor]:
        """Arrays of these sizes in one allocation. Each begins at a multiple of 16 bytes."""
        steps = [step for size in sizes for step in (size, size % 2)]
        return torch.empty(sum(steps), dtype=torch.int64, device=self._device).split(steps)[::2]


def _some(tensor: Tensor) -> Tensor:
    """The tensor, or one with an element if it has none: a kernel needs memory to point to."""
    return tensor if tensor.numel() else tensor.new_zeros(1)


def _grid(*counts: int) -> tuple[int]:
    return (max(1, -(-max(counts) // BLOCK_IDS)),)


def _steps(count: int) -> int:
    """Halvings until one of ``count`` segments is left."""
    return max(0, count - 1).bit_length()
