"""Collisions: rows that two consecutive batches share. The rank that owns a row finds them and tells the requesters.

Batch N updates its rows after its backward. Rows that batch N+1 uses too (*collision rows*) must wait for that update. The other
rows of batch N+1 (*exclusive rows*) can be read while batch N still computes, and have the same values.

None of this reads a weight, so it runs ahead of the tables. On CUDA the host does not wait for the device either, except in the
first prioritized step: the counts that the host needs are copied to it one step before it uses them.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.bubbles.spans import Kind
from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.embedding import all_to_all
from lightning_freescale.embedding.all_to_all import COLLISION, EXCLUSIVE, RowKind
from lightning_freescale.embedding.cpp_index import CppIndex
from lightning_freescale.embedding.fused_index import FusedIndex
from lightning_freescale.embedding.index import count_true_between, split_counts, split_orders, wire_bounds
from lightning_freescale.embedding.index_results import (
    DividedIds,
    FusedMarks,
    PairOfBatches,
    PartOfFeatures,
    SharedIds,
)
from lightning_freescale.embedding.local_tables import LocalTables
from lightning_freescale.embedding.stages import (
    CollisionMarks,
    CountedMarks,
    Requests,
    RoutedBatch,
    RowSet,
)
from lightning_freescale.runtime.log import log_once
from lightning_freescale.runtime.streams import Readback, SideStream, int64_on_device, mark_used_on


class CollisionDetector:
    """Finds the rows that two batches share.

    It keeps one flag (one byte) for each local row of the tables of one sharding group. The time of a call depends on the
    size of the batches only: it sets the flags of one batch, reads those of the other, and clears what it has set.

    Args:
        rows: number of local rows of all tables of the sharding group.
        device: the device of the ids.
    """

    def __init__(self, rows: int, device: torch.device):
        self._flags = torch.zeros(rows, dtype=torch.bool, device=device)

    def __call__(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Which ids of each batch have a row that the other batch uses too.

        Args:
            first: ``[n]`` int64 row keys of batch N, repeated as often as they are requested.
            second: ``[m]`` int64 row keys of batch N+1.

        Returns:
            ``[n]`` and ``[m]`` booleans.

        >>> detect = CollisionDetector(10, torch.device("cpu"))
        >>> detect(torch.tensor([1, 2, 2]), torch.tensor([2, 3]))
        (tensor([False,  True,  True]), tensor([ True, False]))
        """
        return self._among(first, second), self._among(second, first)

    def _among(self, keys: Tensor, others: Tensor) -> Tensor:
        self._flags.index_fill_(0, others, True)
        found = self._flags[keys]
        self._flags.index_fill_(0, others, False)
        return found


class CollisionFinder:
    """Finds the collisions of consecutive batches of one module, and divides batches by them.

    Args:
        tables: this rank's rows.
        ids_group: the process group of TorchRec's all-to-all of ids. The marks queue behind the ids of the same batch there,
            and not behind gradients of the batch before, which wait for their backward.
        ids_stream: the stream on which collisions are found.
        table_stream: the stream on which tables are read and updated.
    """

    fuses = True  # whether the index work may run in a few calls

    def __init__(
        self,
        tables: LocalTables,
        ids_group: dist.ProcessGroup,
        ids_stream: SideStream,
        table_stream: SideStream,
        timeline: Timeline,
    ):
        self._device, self._group, self._timeline = tables.device, ids_group, timeline
        self._ids_stream, self._table_stream = ids_stream, table_stream
        self.fused = _fused_indices(tables, ids_group) if self.fuses else []
        self._num_rows = tables.num_rows
        self.has_new_ids = False  # whether the ids stream has results for which the table stream has not waited
        self.detectors = [] if self.fused else [CollisionDetector(rows, tables.device) for rows in tables.num_rows]

    def find(self, first: RoutedBatch, second: RoutedBatch) -> None:
        """Find the rows that two consecutive batches share, and send the result to the requesters. All ranks must call it."""
        self.has_new_ids = True
        if self.fused:
            self._find_fused(self.fused, first, second)
            return
        with_next: list[CollisionMarks] = []
        with_previous: list[CollisionMarks] = []
        with self._ids_stream.work(), self._timeline.span(Kind.ID_EXCHANGE, joined=math.nan):
            for detect, a, b in zip(self.detectors, first.requests, second.requests, strict=True):
                of_first, of_second = detect(a.row_keys, b.row_keys)
                with_next.append(self._tell_requesters(a, of_first))
                with_previous.append(self._tell_requesters(b, of_second))
        first.with_next, second.with_previous = with_next, with_previous
        for marks in (*with_next, *with_previous):
            mark_used_on(self._table_stream, (marks.collides, marks.counted and marks.counted.requested_collides))

    def find_window(self, window: Sequence[RoutedBatch], following: RoutedBatch) -> None:
        """Find the rows that the micro-batches of a window share with the batch after it. All ranks must call it.

        The marks of the last micro-batch and of ``following`` are sent to the requesters. Those of the others stay at the owner,
        which holds their gradients.
        """
        self.has_new_ids = True
        last = window[-1]
        with_next: list[CollisionMarks] = []
        with_previous: list[CollisionMarks] = []
        with self._ids_stream.work(), self._timeline.span(Kind.ID_EXCHANGE, joined=math.nan):
            # Here, because this stream uses the flags at once: it does not wait until the model's stream has cleared them.
            self.detectors = self.detectors or [CollisionDetector(rows, self._device) for rows in self._num_rows]
            for group, (detect, second) in enumerate(zip(self.detectors, following.requests, strict=True)):
                requests = [batch.requests[group] for batch in window]
                of_window, of_second = detect(torch.cat([one.row_keys for one in requests]), second.row_keys)
                of_each = of_window.split([one.row_keys.numel() for one in requests])
                for one, shared in zip(requests[:-1], of_each, strict=False):
                    one.after_window = _shared_ids(one, shared)
                with_next.append(self._tell_requesters(last.requests[group], of_each[-1]))
                with_previous.append(self._tell_requesters(second, of_second))
        last.with_next, following.with_previous = with_next, with_previous
        for marks in (*with_next, *with_previous):
            mark_used_on(self._table_stream, (marks.collides, marks.counted and marks.counted.requested_collides))
        for batch in window[:-1]:
            mark_used_on(self._table_stream, [one.after_window and one.after_window.shared for one in batch.requests])

    def _find_fused(self, indices: list[FusedIndex], first: RoutedBatch, second: RoutedBatch) -> None:
        pairs = []
        with self._ids_stream.work(), self._timeline.span(Kind.ID_EXCHANGE, joined=math.nan):
            for index, a, b in zip(indices, first.requests, second.requests, strict=True):
                pairs.append(self._pair(index, a, b))
        first.with_next = [FusedMarks(pair, second=False) for pair in pairs]
        second.with_previous = [FusedMarks(pair, second=True) for pair in pairs]

    def _pair(self, index: FusedIndex, a: Requests, b: Requests) -> Callable[[], tuple[DividedIds, DividedIds]]:
        """Send the marks of two batches to the requesters. The result divides both batches by the marks of all ranks."""
        bounds = index.bounds(a, b)
        marks, sent = index.mark(a, b, bounds)
        received_from = a.row_keys.numel() + b.row_keys.numel()
        transfer = all_to_all.start_packed(
            sent,
            marks.narrow(0, received_from, marks.numel() - received_from),
            _plus(a.by_requester, b.by_requester),
            _plus(a.by_owner, b.by_owner),
            self._group,
            self._timeline,
            Kind.ID_EXCHANGE,
        )

        pair: PairOfBatches | None = None
        if self._device.type == "cuda":  # elsewhere the wait would block the host: it waits when it needs the counts
            transfer.wait()
            pair = index.count(a, b, marks, bounds)
            mark_used_on(self._table_stream, pair.tensors())
        result: tuple[DividedIds, DividedIds] | None = None

        def divided() -> tuple[DividedIds, DividedIds]:
            nonlocal pair, result
            if result is None:
                if pair is None:
                    transfer.wait()
                    pair = index.count(a, b, marks, bounds)
                result = index.divide(a, b, pair)
            return result

        return divided

    def _tell_requesters(self, requests: Requests, collides: Tensor) -> CollisionMarks:
        transfer = all_to_all.start(
            collides.to(torch.uint8),
            requests.owner_wire_order,
            requests.by_requester,
            requests.by_owner,
            self._group,
            self._timeline,
            Kind.ID_EXCHANGE,
        )
        marks = CollisionMarks(collides, transfer, None)
        if self._device.type != "cuda":  # the wait would block the host: it waits when it needs the counts
            return marks
        return CollisionMarks(collides, transfer, self._count(requests, marks))

    def _count(self, requests: Requests, marks: CollisionMarks) -> CountedMarks:
        """Wait for the marks at the requester, and start to copy the sizes of both parts to the host."""
        requested_collides = marks.transfer.wait().bool()
        feature_offsets = requests.features.offsets()[:: requests.features.stride()].to(torch.int64)
        rank, world_size = self._group.rank(), self._group.size()
        sides = (requests.by_requester, requests.by_owner)
        bounds = [place for counts in sides for ends in wire_bounds(counts, rank) for place in ends]
        send_start, send_end, receive_start, receive_end = int64_on_device(bounds, self._device).split(world_size)
        counts = split_counts(
            marks.collides,
            requested_collides,
            requests.owner_wire_order,
            (send_start, send_end),
            (receive_start, receive_end),
            feature_offsets,
        )
        return CountedMarks(requested_collides, Readback(counts))

    # ---- the two parts of a batch -----------------------------------------------------------------------------------
    def divide(
        self,
        requests: list[Requests],
        marks: Sequence[CollisionMarks | FusedMarks] | None,
        without_marks: RowKind,
        complete: Callable[[int, Requests, RowSet], RowSet],
    ) -> list[dict[RowKind, RowSet]]:
        """Divide the rows of a batch into collision rows and exclusive rows, for each sharding group.

        Args:
            marks: the collisions with one neighbouring batch. None if there is no neighbour: all rows are then of the kind
                ``without_marks``, and the other kind has no entry.
            complete: adds to the rows of one kind what the caller needs. Its arguments are the number of the sharding group,
                its requests, and the rows.
        """
        divided = []
        after = self._ids_stream if self.has_new_ids else None
        self.has_new_ids = False
        with self._table_stream.work(after), self._timeline.span(Kind.ID_EXCHANGE, joined=math.nan):
            for group, of_group in enumerate(requests):
                found = marks[group] if marks is not None else None
                if found is None:
                    sets = {without_marks: _all_rows(of_group)}
                elif isinstance(found, FusedMarks):
                    sets = _divide_fused(of_group, found)
                else:
                    sets = self._divide(of_group, found)
                for kind in sets:
                    sets[kind] = complete(group, of_group, sets[kind])
                divided.append(sets)
        return divided

    def _divide(self, requests: Requests, marks: CollisionMarks) -> dict[RowKind, RowSet]:
        counted = marks.counted or self._count(requests, marks)
        features = requests.features
        keys, lengths, world_size = features.keys(), features.lengths(), self._group.size()
        sizes = [world_size, len(keys), len(keys), world_size]
        by_requester, by_feature, all_by_feature, by_owner = (
            part.tolist() for part in counted.counts.wait().split(sizes)
        )
        owned, requested = sum(by_requester), sum(by_owner)  # number of collision rows
        values_offsets = features.offsets().to(torch.int64)
        orders = split_orders(
            marks.collides,
            counted.requested_collides,
            requests.owner_wire_order,
            requests.requester_wire_order,
            values_offsets,
        )
        values, collisions = features.values()[orders.lookup], orders.collisions.to(lengths.dtype)

        def part(values: Tensor, lengths: Tensor, length_per_key: list[int]) -> KeyedJaggedTensor:
            return KeyedJaggedTensor(
                keys, values, lengths=lengths, stride=features.stride(), length_per_key=length_per_key
            )

        return {
            COLLISION: RowSet(
                part(values[:owned], collisions, by_feature),
                orders.wire[:owned],
                by_requester,
                orders.request[:requested],
                by_owner,
            ),
            EXCLUSIVE: RowSet(
                part(values[owned:], lengths - collisions, _minus(all_by_feature, by_feature)),
                orders.wire[owned:],
                _minus(requests.by_requester, by_requester),
                orders.request[requested:],
                _minus(requests.by_owner, by_owner),
            ),
        }


def _shared_ids(requests: Requests, shared: Tensor) -> SharedIds:
    """``shared [n]`` bool in lookup order."""
    features = requests.features
    ends = features.offsets()[:: features.stride()].to(torch.int64)
    counts = count_true_between(shared, ends[:-1], ends[1:])
    return SharedIds(shared, Readback(torch.stack([counts, ends.diff()])))


def _divide_fused(requests: Requests, marks: FusedMarks) -> dict[RowKind, RowSet]:
    rows = marks.divided()[marks.second]

    def part(number: int, by_requester: list[int], by_feature: list[int], by_owner: list[int]) -> RowSet:
        return RowSet(
            PartOfFeatures(requests.features, rows.values[number], rows.offsets[number], by_feature),
            rows.wire_order[number],
            by_requester,
            None,
            by_owner,
            rows.wire_ids[number],
            rows.wire_position[number],
            rows.batch_position[number],
            rows.batch_order,
        )

    return {
        COLLISION: part(0, rows.by_requester, rows.by_feature, rows.by_owner),
        EXCLUSIVE: part(
            1,
            _minus(requests.by_requester, rows.by_requester),
            _minus(rows.all_by_feature, rows.by_feature),
            _minus(requests.by_owner, rows.by_owner),
        ),
    }


def _all_rows(requests: Requests) -> RowSet:
    return RowSet(
        requests.features,
        requests.owner_wire_order,
        requests.by_requester,
        requests.requester_wire_order,
        requests.by_owner,
    )


def _fused_indices(tables: LocalTables, group: dist.ProcessGroup) -> list[FusedIndex]:
    """The index work in a few calls, by sharding group; empty if it cannot run here."""
    if tables.device.type != "cuda":
        return make_fused_indices(CppIndex, tables, group)
    if importlib.util.find_spec("triton") is None:
        log_once("prioritize: Triton is not installed, so the index work of the exchange takes many small kernels")
        return []
    from lightning_freescale.embedding.triton_index import TritonIndex

    return make_fused_indices(TritonIndex, tables, group)


def make_fused_indices(kind: type[FusedIndex], tables: LocalTables, group: dist.ProcessGroup) -> list[FusedIndex]:
    """One of these for each sharding group."""
    return [
        kind(rows, tables.first_key(number), group.rank(), group.size()) for number, rows in enumerate(tables.num_rows)
    ]


def _plus(counts: list[int], others: list[int]) -> list[int]:
    return [count + other for count, other in zip(counts, others, strict=True)]


def _minus(all_counts: list[int], counts: list[int]) -> list[int]:
    return [total - count for total, count in zip(all_counts, counts, strict=True)]
