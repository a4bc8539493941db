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
    PairOfBatches,
    PlacedIds,
    RankBounds,
    Segments,
)

if TYPE_CHECKING:
    from lightning_freescale.embedding.stages import Requests


class CppIndex(FusedIndex):
    """One pass over the ids for each call."""

    def __init__(self, num_rows: int, first_key: Tensor, rank: int, world_size: int):
        super().__init__(num_rows, first_key, rank, world_size)
        self._stamp_array, self._first_keys = self._stamps.numpy(), _ints(first_key)

    def place(
        self, features: KeyedJaggedTensor, samples: list[int], by_owner: list[int], unbucketize: Tensor | None
    ) -> PlacedIds:
        lookup, wire, keys, owner_order, requester_order, batch_position = map(
            torch.from_numpy,
            _C.exchange_place(
                _ints(features.values()),
                _offsets(features),
                self._bounds_of(samples).numpy(),
                self._first_keys,
                np.array(by_owner, dtype=np.int64),
                None if unbucketize is None else _ints(unbucketize),
                self._rank,
            ),
        )
        position = None if unbucketize is None else batch_position
        return PlacedIds(keys, owner_order, requester_order, position, Segments(lookup, wire))

    def _note(self, keys: Tensor, stamp: int) -> None:
        _C.exchange_note(keys.numpy(), stamp, self._stamp_array)

    def _look(
        self, batch: Requests, marks: Tensor, sent: Tensor, shifts: Tensor, first: int, stamp: int, kept_from: int
    ) -> None:
        assert batch.segments is not None
        _C.exchange_look(
            batch.row_keys.numpy(),
            batch.segments.lookup.numpy(),
            batch.segments.wire.numpy(),
            shifts.numpy(),
            self._stamp_array,
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
            found = _C.exchange_count(
                all_marks,
                first,
                sum(owned),
                batch.segments.lookup.numpy(),
                rows[places.receive_start],
                rows[places.receive_end],
                rows[places.receive_shift],
                features,
                self._rank,
            )
            return torch.from_numpy(found)

        return PairOfBatches(marks, bounds, (counts(a, 0, PLACES_A), counts(b, owned[0], PLACES_B)), owned)

    def divide(self, a: Requests, b: Requests, pair: PairOfBatches) -> tuple[DividedIds, DividedIds]:
        marks, rows, received_from = pair.marks.numpy(), pair.bounds.table.numpy(), sum(pair.owned)

        def divided(requests: Requests, first: int, places: PlacesInBounds, counted: Tensor) -> DividedIds:
            assert requests.segments is not None
            unbucketize, counts = requests.request_position, counted.numpy()
            values, wire_order, wire_position, wire_ids, batch_position, batch_order, offsets = _C.exchange_divide(
                marks,
                first,
                received_from,
                _ints(requests.features.values()),
                _offsets(requests.features),
                requests.segments.lookup.numpy(),
                counts,
                None if unbucketize is None else _ints(unbucketize),
                rows[places.receive_start],
                rows[places.receive_end],
                rows[places.receive_shift],
                self._num_features,
                self._rank,
            )
            parts = self._parts(counts.tolist())
            owned, requested = sum(parts[0]), sum(parts[3])  # number of collision rows
            return DividedIds(
                _parts_of(values, owned),
                _parts_of(wire_order, owned),
                _parts_of(wire_position, owned),
                _parts_of(wire_ids, owned),
                _parts_of(batch_position, requested),
                torch.from_numpy(batch_order),
                _parts_of(offsets, offsets.size // 2),
                *parts,
            )

        return divided(a, 0, PLACES_A, pair.counts[0]), divided(b, pair.owned[0], PLACES_B, pair.counts[1])


def _parts_of(array: Any, first: int) -> Any:
    """The first elements of the array, and the others."""
    return torch.from_numpy(array).split_with_sizes((first, array.size - first))


def _ints(tensor: Tensor) -> Any:
    return np.ascontiguousarray(tensor.numpy(), np.int64)


def _offsets(features: KeyedJaggedTensor) -> Any:
    """Offsets of all features and samples; ``[0]`` if this rank has no feature of the group."""
    offsets = features.offsets()
    return _ints(offsets) if offsets.numel() else np.zeros(1, dtype=np.int64)
