"""The prioritized exchange of one sharded ``EmbeddingBagCollection``, at the granularity of bags.

Owners pool the rows of a bag before they send them, so a bag travels as a whole:

    rows        A bag of batch N+1 is *exclusive* if batch N updates none of its rows. It is pooled and sent while N computes.
                All other bags are pooled and sent after the update by N.
    gradients   The gradient of a bag of batch N is *urgent* if batch N+1 uses any of its rows. Urgent gradients are sent first.
    updates     A row is updated once per step, with all of its gradients. A row that N+1 uses occurs in urgent bags only, so it
                is updated when the urgent gradients are there. Every other row waits for the late gradients, although some
                of its gradients have arrived with the urgent ones. The owner keeps those until then.

The bags of row-wise tables are sums of partial sums of all ranks. Each partial sum travels as a bag of its own, and the requester
adds them (``partial_sums.py``). Bags travel in pieces of equal width (``bag_tables.py``). Stages, transfers and the order of a
step are those of rows.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionAwaitable, ShardedEmbeddingBagCollection
from torchrec.distributed.types import NoWait
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from lightning_freescale.bubbles.spans import Kind
from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.embedding.all_to_all import COLLISION, EXCLUSIVE, ExchangeGroups, RowKind
from lightning_freescale.embedding.bag_tables import BagTables, choose_bags, choose_ids, marked_by_bag
from lightning_freescale.embedding.collisions import CollisionFinder
from lightning_freescale.embedding.gradient_return import GradientReturn, lookup_of
from lightning_freescale.embedding.held_gradients import what_is_read
from lightning_freescale.embedding.index import (
    count_true_between,
    feature_and_requester,
    own_rank_last,
    true_first,
    wire_bounds,
)
from lightning_freescale.embedding.index_results import as_kjt
from lightning_freescale.embedding.partial_sums import SumOfPartials, own_segments
from lightning_freescale.embedding.prioritized import PrioritizedEmbedding
from lightning_freescale.embedding.stages import (
    CollisionMarks,
    ComputingBatch,
    CountedMarks,
    Requests,
    ReturningBatch,
    RoutedBatch,
    RowSet,
)
from lightning_freescale.embedding.zero_collision.sharded import ShardedZeroCollisionCollection
from lightning_freescale.runtime.streams import Readback, SideStream, current_stream, int64_on_device, mark_used_on

MOST_KNOWN_ORDERS = 32


@dataclass(frozen=True)
class BagMarks(CollisionMarks):
    """Which bags of a batch collide with one neighbouring batch, and which ids cause it."""

    bags: Tensor  # [T, B] bool, owner
    ids: Tensor  # [n] bool, owner, lookup order of the ids
    by_feature: Readback  # [3, T] int64, owner: ids of these bags, these ids, all ids


@dataclass(kw_only=True)
class BagSet(RowSet):
    """The pieces of one kind of bags. Its ``features`` are the ids of all bags."""

    kind: RowKind
    marks: BagMarks

    def ids_by_feature(self, of_bags: bool) -> list[int]:
        """``[T]`` number of the ids of these bags, or of the ids that are updated with them."""
        in_bags, marked, all_ids = self.marks.by_feature.wait()
        collisions = in_bags if of_bags else marked
        counts: list[int] = (collisions if self.kind == COLLISION else all_ids - collisions).tolist()
        return counts


class PieceOrders(NamedTuple):
    """Orders of the pieces of a batch, see :class:`~lightning_freescale.embedding.stages.Requests`."""

    owner_wire_order: Tensor
    requester_wire_order: Tensor
    request_position: Tensor
    batch_position: Tensor


class BagCollisionFinder(CollisionFinder):
    """Finds the bags that share rows with a neighbouring batch."""

    fuses = False  # the fused index work is for rows only

    def __init__(self, tables: BagTables, *args: Any, **kwargs: Any):
        super().__init__(tables, *args, **kwargs)
        self._tables = tables

    def find(self, first: RoutedBatch, second: RoutedBatch) -> None:
        of_first: list[BagMarks] = []
        of_second: list[BagMarks] = []
        with self._ids_stream.work(), self._timeline.span(Kind.ID_EXCHANGE, joined=math.nan):
            pairs = zip(self.detectors, first.requests, second.requests, strict=True)
            for group, (detect, a, b) in enumerate(pairs):
                in_first, in_second = detect(a.row_keys, b.row_keys)
                of_first.append(self._mark(group, a, in_first))
                of_second.append(self._mark(group, b, in_second))
        first.with_next, second.with_previous = of_first, of_second
        for marks in (*of_first, *of_second):
            requested = marks.counted and marks.counted.requested_collides
            mark_used_on(self._table_stream, (marks.collides, marks.bags, marks.ids, requested))

    def _mark(self, group: int, requests: Requests, ids: Tensor) -> BagMarks:
        marked = marked_by_bag(requests.features, ids)
        bags = marked > 0
        lengths = requests.features.lengths().to(torch.int64).view(marked.shape)
        by_feature = Readback(torch.stack([(lengths * bags).sum(1), marked.sum(1), lengths.sum(1)]))
        marks = self._tell_requesters(requests, self._tables.pieces_of_bags(group, bags))
        return BagMarks(marks.collides, marks.transfer, marks.counted, bags, ids, by_feature)

    def _count(self, requests: Requests, marks: CollisionMarks) -> CountedMarks:
        requested_collides = marks.transfer.wait().bool()
        starts_and_ends = [
            place
            for counts in (requests.by_requester, requests.by_owner)
            for places in wire_bounds(counts, self._group.rank())
            for place in places
        ]
        bounds = int64_on_device(starts_and_ends, self._device).view(4, -1)
        counts = [
            count_true_between(marks.collides[requests.owner_wire_order], bounds[0], bounds[1]),
            count_true_between(requested_collides, bounds[2], bounds[3]),
        ]
        return CountedMarks(requested_collides, Readback(torch.cat(counts)))

    def _divide(self, requests: Requests, marks: CollisionMarks) -> dict[RowKind, RowSet]:
        assert isinstance(marks, BagMarks)
        counted = marks.counted or self._count(requests, marks)
        by_requester, by_owner = (part.tolist() for part in counted.counts.wait().split(self._group.size()))
        owned = requests.owner_wire_order[true_first(marks.collides[requests.owner_wire_order])]
        requested = requests.requester_wire_order[true_first(counted.requested_collides)]
        at_owner, at_requester = sum(by_requester), sum(by_owner)  # number of pieces that collide

        def pieces(kind: RowKind, owner: Tensor, requesters: list[int], requester: Tensor, owners: list[int]) -> BagSet:
            return BagSet(
                features=requests.features,
                owner_wire_order=owner,
                by_requester=requesters,
                requester_wire_order=requester,
                by_owner=owners,
                kind=kind,
                marks=marks,
            )

        others = [
            [total - part for total, part in zip(totals, parts, strict=True)]
            for totals, parts in ((requests.by_requester, by_requester), (requests.by_owner, by_owner))
        ]
        return {
            COLLISION: pieces(COLLISION, owned[:at_owner], by_requester, requested[:at_requester], by_owner),
            EXCLUSIVE: pieces(EXCLUSIVE, owned[at_owner:], others[0], requested[at_requester:], others[1]),
        }


class BagGradientReturn(GradientReturn):
    """Returns the gradients of bags, and updates each row when all of its gradients are there."""

    _tables: BagTables

    def return_set(self, group: int, requests: Requests, rows: RowSet) -> RowSet:
        features = as_kjt(rows.features)
        if isinstance(rows, BagSet):
            updated = rows.marks.ids == (rows.kind == COLLISION)
            features = choose_ids(features, updated, rows.ids_by_feature(of_bags=False))
        assert requests.batch_position is not None
        assert rows.requester_wire_order is not None
        return RowSet(
            features=features,
            owner_wire_order=rows.owner_wire_order,
            by_requester=rows.by_requester,
            requester_wire_order=rows.requester_wire_order,
            by_owner=rows.by_owner,
            batch_position=requests.batch_position[rows.requester_wire_order],
        )

    def _group(self, row_sets: list[dict[RowKind, RowSet]]) -> None:
        """FBGEMM updates the rows of bags."""

    def update(self, group: int, rows: RowSet, received: Tensor, batch: ComputingBatch) -> None:
        """Add ``received`` to the gradients of the batch, and update the rows of ``rows.features`` with all of them."""
        requests = batch.routed.requests[group]
        pieces = requests.owner_wire_order.numel()
        if group not in batch.received:
            batch.received[group] = received.new_zeros(pieces, received.shape[1], dtype=torch.float32)
        gradients = batch.received[group]
        if received.numel():
            gradients.index_copy_(0, rows.owner_wire_order, self.divided(received.float(), batch))
        self._tables.update_bags(group, requests.features, rows.features, gradients, batch.settings)

    def hold(self, group: int, kind: RowKind, received: Tensor, batch: ReturningBatch) -> None:
        """Hold the gradients of all bags: those of a micro-batch are never divided."""
        rows, features = batch.row_sets[group][kind], batch.computing.routed.requests[group].features
        pieces = received.new_empty(received.shape, dtype=torch.float32)
        pieces.index_copy_(0, rows.owner_wire_order, self.divided(received.float(), batch.computing))
        lookup_of(batch, group).hold(what_is_read(features), self._tables.pooled(group, pieces, features.stride()))


class PrioritizedBags(PrioritizedEmbedding):
    """The prioritized exchange of one ``ShardedEmbeddingBagCollection`` with row-wise, table-wise or column-wise tables."""

    divides_windows = False
    tables_type = BagTables
    finder_type = BagCollisionFinder
    returns_type = BagGradientReturn
    tables: BagTables

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._known_orders: dict[tuple[tuple[int, ...], ...], PieceOrders] = {}

    def _requests(self, group: int, features: KeyedJaggedTensor, context: Any) -> Requests:
        pieces = self.tables.pieces_by_rank[group]
        samples = list(context.batch_size_per_rank or [features.stride() // self._world_size] * self._world_size)
        features.offsets()  # computed and cached here: otherwise the first stream that asks for them would compute them
        feature, _ = feature_and_requester(
            features.lengths().to(torch.int64),
            int64_on_device(samples, self.device),
            sum(samples),
            features.values().numel(),
        )
        return Requests(
            features=features,
            row_keys=self.tables.row_keys(group, features.values(), feature),
            by_requester=[pieces[self._rank] * number for number in samples],
            by_owner=[number * samples[self._rank] for number in pieces],
            **self._orders(tuple(pieces), tuple(samples))._asdict(),
        )

    def _orders(self, pieces: tuple[int, ...], samples: tuple[int, ...]) -> PieceOrders:
        """Orders of the pieces of a batch. They are kept, because most steps have the same numbers of samples.

        Args:
            pieces: ``[W]`` pieces of a sample that each rank owns.
            samples: ``[W]`` samples of each rank.
        """
        if (pieces, samples) not in self._known_orders:
            if len(self._known_orders) >= MOST_KNOWN_ORDERS:
                self._known_orders.clear()
            self._known_orders[pieces, samples] = self._compute_orders(pieces, samples)
        return self._known_orders[pieces, samples]

    def _compute_orders(self, pieces: tuple[int, ...], samples: tuple[int, ...]) -> PieceOrders:
        rank = self._rank
        by_requester, by_owner = [pieces[rank] * number for number in samples], [n * samples[rank] for n in pieces]
        owned = torch.arange(sum(by_requester), device=self.device).view(pieces[rank], sum(samples))
        of_requesters = torch.cat([part.flatten() for part in owned.split(samples, dim=1)])
        # The batch lists the pieces of one sample after the other, so that they are the rows of the module's output.
        place = torch.arange(sum(by_owner), device=self.device)
        return PieceOrders(
            owner_wire_order=own_rank_last(of_requesters, by_requester, rank),
            requester_wire_order=own_rank_last(place, by_owner, rank),
            request_position=place.view(sum(pieces), samples[rank]).t().flatten(),
            batch_position=place.view(samples[rank], sum(pieces)).t().flatten(),
        )

    def _fetch_set(self, group: int, requests: Requests, rows: RowSet) -> RowSet:
        features = as_kjt(rows.features)
        if isinstance(rows, BagSet):
            pooled = rows.marks.bags == (rows.kind == COLLISION)
            features = choose_bags(features, pooled, rows.ids_by_feature(of_bags=True))
        return RowSet(
            features=features,
            owner_wire_order=rows.owner_wire_order,
            by_requester=rows.by_requester,
            requester_wire_order=rows.requester_wire_order,
            by_owner=rows.by_owner,
        )

    def _output(self, context: Any, outputs: list[Any]) -> Any:
        """The output of the module, as its own forward would build it from the bags of each sharding group."""
        module: Any = self.module
        pooled = []
        for group, (output, dist) in enumerate(zip(outputs, module._output_dists, strict=True)):
            width = sum(self.tables.pieces_by_rank[group]) * self.tables.dims[group]
            bags = output.wait().view(-1, width)
            if self.tables.row_wise[group]:
                width //= self._world_size
                samples = list(context.sharding_contexts[group].batch_size_per_rank or [len(bags)] * self._world_size)
                partials = bags.view(-1, self._world_size, width)
                bags = SumOfPartials.apply(partials, own_segments(width, samples, self._rank))
            for callback in (
                getattr(dist, "_callbacks", None) or ()
            ):  # puts the columns of column-wise tables into order
                bags = callback(bags)
            pooled.append(NoWait(bags))
        result = EmbeddingBagCollectionAwaitable(
            awaitables=pooled, embedding_dims=module._embedding_dims, embedding_names=module._embedding_names
        )
        if module._has_mean_pooling_callback:  # TorchRec divides the sums of row-wise tables by the lengths of the bags
            mark_used_on(current_stream(self.device), (context.divisor,))
            result.callbacks.append(functools.partial(_divide, divisor=context.divisor))
        return result


def _divide(pooled: KeyedTensor, divisor: Tensor) -> KeyedTensor:
    return KeyedTensor(pooled.keys(), pooled.length_per_key(), pooled.values() / divisor)


def make_exchange(
    module: ShardedEmbeddingCollection | ShardedEmbeddingBagCollection | ShardedZeroCollisionCollection,
    groups: ExchangeGroups,
    copies: SideStream | None = None,
    timeline: Timeline | None = None,
) -> PrioritizedEmbedding:
    """The prioritized exchange of a sharded collection of any kind."""
    kind = PrioritizedBags if isinstance(module, ShardedEmbeddingBagCollection) else PrioritizedEmbedding
    return kind(module, groups, copies, timeline)
