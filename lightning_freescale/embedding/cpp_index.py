"""The index work on a CPU, in C++ (``csrc/exchange_index``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale import _C
from lightning_freescale.embedding.fused_index import PLACES_A, PLACES_B, FusedIndex, PlacesInBounds
from lightning_freescale.embedding.index_results import (
    DividedIds,
    FusedMarks,
    PairOfBatches,
    PlacedIds,
    RankBounds,
    Segments,
)

if TYPE_CHECKING:
    from lightning_freescale.embedding.stages import Requests


class CppIndex(FusedIndex):
    """One pass over the ids for each call."""

    def place(
        self, features: KeyedJaggedTensor, samples: list[int], by_owner: list[int], unbucketize: Tensor | None
    ) -> PlacedIds:
        lookup, wire, keys, owner_order, requester_order, batch_position = map(
            torch.from_numpy,
            _C.exchange_place(
                _ints(features.values()),
                _offsets(features),
                _ints(self._bounds_of(samples)),
                _ints(self._first_key),
                np.array(by_owner, dtype=np.int64),
                None if unbucketize is None else _ints(unbucketize),
                self._rank,
            ),
        )
        position = None if unbucketize is None else batch_position
        return PlacedIds(keys, owner_order, requester_order, position, Segments(lookup, wire))

    def _note(self, keys: Tensor, stamp: int) -> None:
        _C.exchange_note(keys.numpy(), stamp, self._stamps.numpy())

    def _look(
        self, batch: Requests, marks: Tensor, sent: Tensor, shifts: Tensor, first: int, stamp: int, kept_from: int
    ) -> None:
        assert batch.segments is not None
        lookup, wire = (part.numpy() for part in batch.segments)
        _C.exchange_look(
            batch.row_keys.numpy(),
            lookup,
            wire,
            shifts.numpy(),
            self._stamps.numpy(),
            stamp,
            self._rank,
            marks.numpy(),
            first,
            sent.numpy(),
            kept_from,
        )

    def count(self, a: Requests, b: Requests, marks: Tensor, bounds: RankBounds) -> PairOfBatches:
        owned = a.row_keys.numel(), b.row_keys.numel()
        rows, all_marks, features = bounds.table.numpy(), marks.numpy(), self._num_features

        def counts(batch: Requests, first: int, places: PlacesInBounds) -> Tensor:
            assert batch.segments is not None
            _, start, end, shift = (rows[place] for place in places)
            lookup = batch.segments.lookup.numpy()
            return torch.from_numpy(
                _C.exchange_count(all_marks, first, sum(owned), lookup, start, end, shift, features, self._rank)
            )

        return PairOfBatches(marks, bounds, (counts(a, 0, PLACES_A), counts(b, owned[0], PLACES_B)), owned)

    def divide(self, requests: Requests, marks: FusedMarks) -> DividedIds:
        assert requests.segments is not None
        pair, which, unbucketize = marks.pair(), int(marks.second), requests.request_position
        rows = pair.bounds.table.numpy()
        _, start, end, shift = (rows[place] for place in (PLACES_B if marks.second else PLACES_A))
        counts = pair.counts[which]
        *arrays, batch_order, offsets, lengths = _C.exchange_divide(
            pair.marks.numpy(),
            which * pair.owned[0],
            sum(pair.owned),
            _ints(requests.features.values()),
            _offsets(requests.features),
            requests.segments.lookup.numpy(),
            counts.numpy(),
            None if unbucketize is None else _ints(unbucketize),
            start,
            end,
            shift,
            self._num_features,
            self._rank,
        )
        parts = self._parts(counts.tolist())
        owned, requested = sum(parts[0]), sum(parts[3])  # number of collision rows
        firsts = (owned,) * 4 + (requested,) * 2 + (offsets.size // 2, lengths.size // 2)
        pairs = [_parts_of(array, first) for array, first in zip((*arrays, offsets, lengths), firsts, strict=True)]
        return self._divided(pairs, torch.from_numpy(batch_order), parts)


def _parts_of(array: Any, first: int) -> tuple[Tensor, Tensor]:
    """The first elements of the array, and the others."""
    flat = array.reshape(-1)
    return torch.from_numpy(flat[:first]), torch.from_numpy(flat[first:])


def _ints(tensor: Tensor) -> Any:
    return tensor.to(torch.int64).contiguous().numpy()


def _offsets(features: KeyedJaggedTensor) -> Any:
    """Offsets of all features and samples; ``[0]`` if this rank has no feature of the group."""
    offsets = features.offsets()
    return _ints(offsets) if offsets.numel() else np.zeros(1, dtype=np.int64)
