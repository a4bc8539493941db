"""The operations of the prioritized exchange on one sharded ``EmbeddingCollection``. ``schedule.py`` orders them in a step.

The operations work around TorchRec's ``ShardedEmbeddingCollection``. Its all-to-all of ids (``input_dist``), its tables, its
fused optimizer and its ``state_dict`` stay in use. Only the exchange of rows and gradients is replaced: collision rows and
exclusive rows travel at different times, over different process groups. No row is read before every update that it must see.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding import EmbeddingCollectionAwaitable, ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.bubbles.spans import Kind
from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.embedding import all_to_all
from lightning_freescale.embedding.all_to_all import COLLISION, EXCLUSIVE, ExchangeGroups, RowKind
from lightning_freescale.embedding.batch_contents import SUMMED_BATCHES, Contents
from lightning_freescale.embedding.collisions import CollisionFinder
from lightning_freescale.embedding.gradient_return import GradientReturn, JoinRows
from lightning_freescale.embedding.held_gradients import HeldLookup
from lightning_freescale.embedding.id_exchange import NoWaitDirect, wait_directly
from lightning_freescale.embedding.index import feature_and_requester, inverse_permutation, own_rank_last
from lightning_freescale.embedding.index_results import as_kjt
from lightning_freescale.embedding.local_tables import LocalTables
from lightning_freescale.embedding.owner_counts import KnownCounts
from lightning_freescale.embedding.row_stats import RowExchangeStats
from lightning_freescale.embedding.stages import (
    ComputingBatch,
    FetchingBatch,
    RequestedBatch,
    Requests,
    RoutedBatch,
    RowSet,
    with_places,
)
from lightning_freescale.embedding.wire import wire_types_of
from lightning_freescale.embedding.zero_collision.ahead import BatchAhead, RemapsAhead
from lightning_freescale.embedding.zero_collision.sharded import ShardedZeroCollisionCollection
from lightning_freescale.runtime.streams import SideStream, int64_on_device, mark_used_on

_SPAN_OF = {COLLISION: Kind.ROW_EXCHANGE_COLLISION, EXCLUSIVE: Kind.ROW_EXCHANGE_EXCLUSIVE}


class PrioritizedEmbedding:
    """The prioritized exchange of one ``ShardedEmbeddingCollection``, or of one with zero-collision ids.

    A batch goes through ``request``, ``route``, ``plan_rows``, ``send_rows`` (twice) and ``join``. Its gradients return through
    ``gradients``.

    Args:
        module: the sharded collection. Its parameters and buffers stay where they are.
        groups: process groups for rows and gradients.
        copies: the stream on which batches are copied to the device.
        timeline: records the exchanges.
    """

    tables_type: Any = LocalTables
    finder_type: Any = CollisionFinder
    returns_type: Any = GradientReturn
    divides_windows = True  # whether the gradients of a window of micro-batches may be applied in two parts

    def __init__(
        self,
        module: ShardedEmbeddingCollection | ShardedEmbeddingBagCollection | ShardedZeroCollisionCollection,
        groups: ExchangeGroups,
        copies: SideStream | None = None,
        timeline: Timeline | None = None,
    ):
        self.module, self.copies = module, copies
        self.remaps: RemapsAhead | None = None
        self.collection: Any  # the sharded tables, without their identities
        if isinstance(module, ShardedZeroCollisionCollection):
            self.remaps, self.collection = RemapsAhead(module), module.collection
        else:
            self.collection = module
        self.timeline = timeline or Timeline()
        self.wire = wire_types_of(self.collection)
        self._counts, self._requested = KnownCounts(module), 0
        self.accumulates = False  # whether gradients are accumulated
        self.stats = RowExchangeStats()
        self.tables: Any = self.tables_type(self.collection)
        self.device = self.tables.device
        self._full_dim = getattr(self.collection, "_embedding_dim", 0)  # of rows that are not divided; bags have none
        self._anchor = torch.empty(0, device=self.device, requires_grad=True)  # see JoinRows
        self.ids_stream, self.table_stream = (SideStream(self.device, high_priority=True) for _ in range(2))
        self.finder = self.finder_type(
            self.tables, module._env.process_group, self.ids_stream, self.table_stream, self.timeline
        )
        self.gradients = self.returns_type(
            self.tables, self.finder, groups, self.table_stream, self.timeline, self.wire.gradients
        )
        self._groups, self._rank, self._world_size = groups, groups.collision.rank(), groups.collision.size()
        # TorchRec releases differ in the options of the module's output: pass those that this release has.
        options = inspect.signature(EmbeddingCollectionAwaitable.__init__).parameters
        self.output_options = {
            name: getattr(self.collection, f"_{name}")
            for name in ("use_gather_select", "use_gather_select_per_sharding", "use_sorted_select")
            if name in options and hasattr(self.collection, f"_{name}")
        }

    def resume(self) -> None:
        """Continue from the tables as steps with TorchRec's own exchange have left them."""
        self.tables.optimizer.continue_count()
        with self._identities_and_rows():
            pass

    # ---- inserted ids -----------------------------------------------------------------------------------------------
    @contextmanager
    def _identities_and_rows(self) -> Iterator[None]:
        """Work on identities and rows, after everything that uses them now and before everything that will."""
        with self.table_stream.work(self.ids_stream, compute=True):
            yield
        with self.ids_stream.work(self.table_stream):
            pass

    def undo_ahead(self) -> None:
        """Show zero-collision tables as the current step has left them, until :meth:`redo_ahead`."""
        if self.remaps is not None:
            with self._identities_and_rows():
                self.remaps.undo()

    def redo_ahead(self) -> None:
        """Show zero-collision tables with the ids of the batches ahead again."""
        if self.remaps is not None and self.remaps.undone:
            with self._identities_and_rows():
                self.remaps.redo()

    def forget_ahead(self, batch: RequestedBatch | RoutedBatch | FetchingBatch | None = None) -> None:
        """Take the ids of ``batch`` and of all batches after it out of zero-collision tables; of all by default."""
        routed = batch.routed if isinstance(batch, FetchingBatch) else batch
        if self.remaps is None or isinstance(routed, RequestedBatch):
            return
        with self._identities_and_rows():
            self.remaps.forget(None if routed is None else routed.ahead)

    # ---- ids --------------------------------------------------------------------------------------------------------
    def request(self, kjt: KeyedJaggedTensor, ahead: bool = False) -> RequestedBatch:
        """Start to tell the owners how many ids of a batch they get. This reads no weight, so it may run batches ahead.

        Args:
            kjt: the ids of the batch on the device.
            ahead: whether the batch is still to be trained, on all ranks.
        """
        context = self.module.create_context()
        if self.ids_stream.stream is not None:
            parts = kjt.values(), kjt.weights_or_none(), kjt.lengths_or_none(), kjt.offsets_or_none()
            mark_used_on(self.ids_stream, parts)
        self._requested += 1
        contents = Contents(kjt, by_value=self._requested <= SUMMED_BATCHES)
        with self.ids_stream.work(self.copies):
            return RequestedBatch(kjt, context, self._counts.input_dist(context, kjt, ahead), contents)

    def send_ids(self, batch: RequestedBatch) -> Awaitable:
        """Wait for the numbers of ids, and start to send the ids themselves, unless they are on their way."""
        if batch.arriving is None:
            with self.ids_stream.work(), self.timeline.span(Kind.ID_EXCHANGE):
                batch.arriving = wait_directly(batch.ids)
        return batch.arriving

    def route(self, batch: RequestedBatch) -> RoutedBatch:
        """Wait for the ids, and work out which rows this rank owes to which requester."""
        arriving = self.send_ids(batch)
        with self.ids_stream.work(), self.timeline.span(Kind.ID_EXCHANGE):
            received, ahead = list(wait_directly(arriving)), None
            if self.remaps is not None:  # from here on, slots take the place of ids
                received, ahead = self.remaps.remap(received)
            requests = [
                self._requests(group, features, context)
                for group, (features, context) in enumerate(zip(received, batch.context.sharding_contexts, strict=True))
            ]
            if self.accumulates:
                for group_requests in requests:
                    group_requests.count_features()
        self.finder.has_new_ids = True
        if self.table_stream.stream is not None:
            for group_requests in requests:
                mark_used_on(self.table_stream, group_requests.tensors())
            if ahead is not None:
                mark_used_on(self.table_stream, ahead.tensors())
        return RoutedBatch(batch.kjt, batch.context, requests, batch.contents, ahead=ahead)

    def await_ids(self, batch: RequestedBatch) -> None:
        """Wait for the ids of a batch that is dropped."""
        arriving = self.send_ids(batch)
        with self.ids_stream.work():
            arriving.wait()

    def _requests(self, group: int, features: KeyedJaggedTensor, context: Any) -> Requests:
        num_ids = features.values().numel()
        samples = context.batch_size_per_rank or [features.stride() // self._world_size] * self._world_size
        features.offsets()  # computed and cached here: otherwise the first stream that asks for them would compute them
        unbucketize = context.unbucketize_permute_tensor
        by_requester, by_owner = list(context.output_splits) or [num_ids], list(context.input_splits) or [num_ids]
        if self.finder.fused:
            placed = self.finder.fused[group].place(features, list(samples), by_owner, unbucketize)
            return with_places(features, placed, by_requester, by_owner, unbucketize)
        feature, requester = feature_and_requester(
            features.lengths().to(torch.int64), int64_on_device(samples, self.device), sum(samples), num_ids
        )
        return Requests(
            features=features,
            row_keys=self.tables.row_keys(group, features.values(), feature),
            owner_wire_order=own_rank_last(torch.argsort(requester, stable=True), by_requester, self._rank),
            requester_wire_order=own_rank_last(torch.arange(sum(by_owner), device=self.device), by_owner, self._rank),
            by_requester=by_requester,
            by_owner=by_owner,
            request_position=unbucketize,
            batch_position=None if unbucketize is None else inverse_permutation(unbucketize),
        )

    def find_window_collisions(self, window: Sequence[RoutedBatch], following: RoutedBatch) -> None:
        """Find the rows that the micro-batches of a window share with the batch after it."""
        self.finder.find_window(window, following)

    def find_collisions(self, first: RoutedBatch, second: RoutedBatch) -> None:
        """Find the rows that two consecutive batches share. This reads no weight either."""
        self.finder.find(first, second)

    # ---- rows -------------------------------------------------------------------------------------------------------
    def plan_rows(self, batch: RoutedBatch, all_of: RowKind | None = None) -> FetchingBatch:
        """Decide when the rows of a batch are read: collisions with the previous batch late, all others early.

        Args:
            all_of: the kind of all rows, whatever collides; None to divide the rows.
        """
        for requests in batch.requests:
            requests.note_features()
        marks = batch.with_previous if all_of is None else None
        planned = self.finder.divide(batch.requests, marks, all_of or EXCLUSIVE, self._fetch_set)
        if marks is not None and self.timeline.active:
            for requests, sets in zip(batch.requests, planned, strict=True):
                self.timeline.count("rows", sum(requests.by_requester))
                self.timeline.count("collisions", sum(sets[COLLISION].by_requester))
        self.stats.add_batch(batch.kjt.values().numel(), self._full_dim)
        for requests, sets, dim in zip(batch.requests, planned, self.tables.dims, strict=True):
            collisions = sum(sets[COLLISION].by_owner) if COLLISION in sets else 0
            self.stats.add_rows(sum(requests.by_owner), collisions, dim)
        return FetchingBatch(batch, planned)

    def _fetch_set(self, group: int, requests: Requests, rows: RowSet) -> RowSet:
        """Add what is needed to read ``rows``."""
        if rows.wire_ids is None and self.tables.only_table(group) is not None:
            rows.wire_ids = rows.features.values()[rows.owner_wire_order]
        return rows

    def send_rows(self, batch: FetchingBatch, kind: RowKind) -> None:
        """As owner: read the rows of one kind, and start to send them to their requesters."""
        batch.transfers[kind] = []
        with self.table_stream.work(), self.timeline.span(Kind.LOOKUP):
            if not batch.buffers:
                batch.buffers = [
                    torch.empty(sum(requests.by_owner), dim, dtype=self.wire.rows, device=self.device)
                    for requests, dim in zip(batch.routed.requests, self.tables.dims, strict=True)
                ]
            if batch.routed.ahead is not None:
                self._write_fresh_rows(batch.routed.ahead, batch, kind)
            for group, (sets, buffer) in enumerate(zip(batch.row_sets, batch.buffers, strict=True)):
                if kind not in sets:
                    continue
                rows = sets[kind]
                table = self.tables.only_table(group)
                if table is not None and rows.wire_ids is not None:  # one read gives the rows in wire order
                    source, order = table, rows.wire_ids
                else:
                    source, order = self.tables.read(group, rows.features), rows.owner_wire_order
                count = sum(rows.by_owner)
                start = 0 if kind == next(iter(sets)) else buffer.size(0) - count  # one kind after the other
                batch.transfers[kind].append(
                    all_to_all.start(
                        source,
                        order,
                        rows.by_requester,
                        rows.by_owner,
                        self._groups.of(kind),
                        self.timeline,
                        _SPAN_OF[kind],
                        buffer.narrow(0, start, count),
                        self.wire.rows,
                    )
                )

    @torch.no_grad()
    def _write_fresh_rows(self, ahead: BatchAhead, batch: FetchingBatch, kind: RowKind) -> None:
        """Write the fresh rows of one kind, if ids were inserted: from here on, no earlier batch needs the old rows."""
        assert self.remaps is not None
        if batch.routed.with_previous is None:  # all rows are of one kind
            self.remaps.write(ahead, None)
            return
        self.remaps.write(ahead, [as_kjt(sets[kind].features) for sets in batch.row_sets])

    def await_rows(self, batch: FetchingBatch) -> None:
        """Make the table stream wait for the rows: their memory is reused there."""
        with self.table_stream.work():
            _wait_for_rows(batch, EXCLUSIVE, COLLISION)

    def join(
        self, batch: FetchingBatch, held_by: list[HeldLookup | None] | None = None
    ) -> tuple[ComputingBatch, EmbeddingCollectionAwaitable]:
        """As requester: put the rows of both kinds together to the output of the module. Its gradients go to ``gradients``.

        Args:
            held_by: where the gradients wait that arrive at this owner; None if they update the rows at once.
        """
        optimizer, routed = self.tables.optimizer, batch.routed
        if self.remaps is not None and routed.ahead is not None:
            self.remaps.commit(routed.ahead)
        settings = optimizer.begin_step(counts=held_by is None)
        computing = ComputingBatch(routed, settings, [None] * len(routed.requests), held_by=held_by)
        with self.table_stream.work():
            optimizer.restore_count()
            joined = _in_batch_order(batch)
        with self.timeline.span(Kind.ROW_EXCHANGE_COLLISION):  # on CUDA the compute waits here; on CPU it waited above
            compute_stream = self.table_stream.join()
        if compute_stream is not None:
            reverse_indices = getattr(routed.context, "reverse_indices", ())  # of dedup
            mark_used_on(compute_stream, (*reverse_indices, *joined))
        outputs = [
            NoWaitDirect(JoinRows.apply(self._anchor, self.gradients, computing, group, [rows]))
            for group, rows in enumerate(joined)
        ]
        return computing, self._output(routed.context, outputs)

    def _output(self, context: Any, outputs: list[Any]) -> EmbeddingCollectionAwaitable:
        """The output of the module, as its own forward would build it from the rows of each sharding group."""
        module = self.collection
        return EmbeddingCollectionAwaitable(
            awaitables_per_sharding=outputs,
            features_per_sharding=[sharding.features_before_input_dist for sharding in context.sharding_contexts],
            embedding_names_per_sharding=module._embedding_names_per_sharding,
            need_indices=module._need_indices,
            features_to_permute_indices=module._features_to_permute_indices,
            ctx=context,
            sharding_types=list(module._sharding_type_to_sharding),
            **self.output_options,
        )


def _wait_for_rows(batch: FetchingBatch, *kinds: RowKind) -> None:
    for kind in kinds:
        for transfer in batch.transfers.get(kind, ()):
            transfer.wait()


def _in_batch_order(batch: FetchingBatch) -> list[Tensor]:
    """``[m, D]`` float32 for each sharding group: the rows of both kinds, in the order of the batch's ids.

    Exclusive rows are put in order while collision rows still travel. Until those arrive, their places hold any numbers.
    """
    orders = [
        _batch_order(requests, sets) for requests, sets in zip(batch.routed.requests, batch.row_sets, strict=True)
    ]
    places = [_collision_places(sets, order) for sets, order in zip(batch.row_sets, orders, strict=True)]
    _wait_for_rows(batch, EXCLUSIVE)
    joined = [rows.index_select(0, order).float() for rows, order in zip(batch.buffers, orders, strict=True)]
    _wait_for_rows(batch, COLLISION)
    for rows, of_collisions, received in zip(joined, places, batch.buffers, strict=True):
        if of_collisions is not None and len(of_collisions):
            rows.index_copy_(0, of_collisions, received.narrow(0, 0, of_collisions.numel()).float())
    return joined


def _batch_order(requests: Requests, sets: dict[RowKind, RowSet]) -> Tensor:
    """``[m]``: for each id of the batch, its position in the buffer that holds the rows of all ``sets``."""
    for rows in sets.values():
        if rows.batch_order is not None:
            return rows.batch_order
    orders = [rows.requester_wire_order for rows in sets.values() if rows.requester_wire_order is not None]
    order = inverse_permutation(torch.cat(orders))
    return order if requests.request_position is None else order[requests.request_position]


def _collision_places(sets: dict[RowKind, RowSet], order: Tensor) -> Tensor | None:
    """Position in the batch of each collision row in wire order, if there are any. They come first in the buffer."""
    rows = sets.get(COLLISION)
    if rows is None:
        return None
    if rows.batch_position is not None:
        return rows.batch_position
    return inverse_permutation(order)[: sum(rows.by_owner)]
