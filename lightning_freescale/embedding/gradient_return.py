"""The way of a gradient from autograd to the table, all of it in this file.

    step N    before backward   expect()             collisions with batch N+1 decide which gradients are urgent
              backward          JoinRows.backward    autograd hands over the gradient of the module's output
                                _send_collisions()   when the gradients of all sharding groups are there:
                                                     the host waits while it is far ahead of the GPU,
                                                     and the gradients of collision rows leave for the owners
              after backward    apply_collisions()   the owners update the collision rows
    step N+1  forward           send_late()          the gradients of exclusive rows leave for the owners
              before backward   apply_late()         the owners update the exclusive rows

Gradients of exclusive rows could leave as soon as they are known. They wait until the collision rows of batch N+1 have arrived,
because the next forward waits for those rows, and all transfers of a host share the same copy engines and network links.

While gradients are accumulated, no row is urgent until the last micro-batch. All gradients leave in the next forward, and the
owner holds them. Those of the last micro-batch leave as those of any step, and each row is updated once (``held_gradients.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_freescale.bubbles.spans import Kind
from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.embedding import all_to_all
from lightning_freescale.embedding.all_to_all import COLLISION, EXCLUSIVE, ExchangeGroups, RowKind
from lightning_freescale.embedding.collisions import CollisionFinder
from lightning_freescale.embedding.held_gradients import HeldLookup, what_is_read
from lightning_freescale.embedding.index import inverse_permutation
from lightning_freescale.embedding.local_tables import LocalTables
from lightning_freescale.embedding.stages import ComputingBatch, Requests, ReturningBatch, RowSet
from lightning_freescale.runtime.errors import FreeScaleError
from lightning_freescale.runtime.host_pacing import HostPacer
from lightning_freescale.runtime.streams import SideStream, mark_used_on


class JoinRows(torch.autograd.Function):
    """Makes rows an output of the module. Its backward hands their gradient to :class:`GradientReturn`."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, returns: GradientReturn, batch: ComputingBatch, group: int, rows: list[Tensor]
    ) -> Tensor:
        """Return the rows.

        Args:
            anchor: ``[0]``, requires a gradient, so that autograd calls backward. The rows themselves are no leaf of the graph.
            rows: one tensor, ``[m, D]`` in batch order. It is in a list, because autograd would return a view of an argument, and
                the model could not change that in place.
        """
        ctx.returns, ctx.batch, ctx.group = returns, batch, group
        return rows.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.returns.hand_over(ctx.batch, ctx.group, gradients[0])
        return (None,) * 5


class GradientReturn:
    """Returns the gradients of one module's rows to their owners, and applies them there.

    Args:
        tables: this rank's rows.
        finder: divides a batch into collision rows and exclusive rows.
        groups: process groups of the transfers.
        table_stream: the stream on which tables are read and updated.
        wire: the type of gradients while they travel.
    """

    def __init__(
        self,
        tables: LocalTables,
        finder: CollisionFinder,
        groups: ExchangeGroups,
        table_stream: SideStream,
        timeline: Timeline,
        wire: torch.dtype = torch.float32,
    ):
        self._tables, self._finder, self._groups = tables, finder, groups
        self._stream, self._timeline, self._wire = table_stream, timeline, wire
        self._world_size = groups.collision.size()
        self._pacer = HostPacer(tables.device)
        self.on_unannounced_backward: Callable[[ComputingBatch], None] | None = None  # calls expect()
        self.before_update: Callable[[RowKind], None] = lambda kind: None  # called before rows of one kind are updated
        self.on_update: Callable[[], None] = lambda: None  # called when rows of any kind are updated
        self._expected: ReturningBatch | None = None  # this step's batch, from before its backward until after it
        self._late: ReturningBatch | None = None  # the previous step's batch: its exclusive rows are not updated yet

    # ---- step N -----------------------------------------------------------------------------------------------------
    def expect(self, batch: ComputingBatch, all_late: bool = False) -> ReturningBatch:
        """Before the backward: decide which gradients leave first. Without a next batch all of them do.

        Args:
            all_late: whether no gradient is urgent, because no row is updated after this backward.
        """
        marks = None if all_late else batch.routed.with_next
        alike = EXCLUSIVE if all_late else COLLISION  # the kind of all rows if they are not divided
        returning = ReturningBatch(batch, self._finder.divide(batch.routed.requests, marks, alike, self.return_set))
        if marks is not None and batch.held_by is None:  # without a next batch nobody waits for the rows
            self._group(returning.row_sets)
        self._pacer.backward_starts()
        self._expected = returning
        return returning

    def _group(self, row_sets: list[dict[RowKind, RowSet]]) -> None:
        """Prepare the update of the collision rows as far as that is possible before their gradients arrive."""
        with self._stream.work():
            for group, sets in enumerate(row_sets):
                rows = sets[COLLISION]
                assert rows.wire_position is not None
                rows.grouped = self._tables.group_gradients(group, rows.features, rows.wire_position)

    def return_set(self, group: int, requests: Requests, rows: RowSet) -> RowSet:
        """Add what is needed to return the gradients of ``rows``."""
        if rows.wire_position is None:
            rows.wire_position = inverse_permutation(rows.owner_wire_order)
        if rows.batch_position is None:
            order, to_batch = rows.requester_wire_order, requests.batch_position
            assert order is not None
            rows.batch_position = order if to_batch is None else to_batch[order]
        return rows

    def hand_over(self, batch: ComputingBatch, group: int, gradient: Tensor) -> None:
        """In the backward: autograd has computed the gradient of one sharding group, ``[m, D]`` in batch order."""
        if batch.gradients[group] is not None:
            raise FreeScaleError(
                "backward ran twice through the embeddings of one step, which would update their rows twice. "
                "Run one backward for each step, or set prioritize=False."
            )
        batch.gradients[group] = gradient
        if all(other is not None for other in batch.gradients):
            self._send_collisions(batch)

    def _send_collisions(self, batch: ComputingBatch) -> None:
        if self._expected is None and self.on_unannounced_backward is not None:
            self.on_unannounced_backward(batch)
        if self._expected is None or self._expected.computing is not batch:
            raise FreeScaleError(
                "the gradient of embedding rows arrived outside of the backward of their own step. "
                "Run the backward of each loss in its own training step, or set prioritize=False."
            )
        self._pacer.hold_host()
        self.send(self._expected, COLLISION)

    def apply_collisions(self, batch: ReturningBatch) -> None:
        """After the backward: update the collision rows."""
        if COLLISION not in batch.transfers:  # some groups have no gradient: the loss does not depend on them
            self.send(batch, COLLISION)
        self.apply(batch, COLLISION)
        self._expected, self._late = None, batch

    def apply_held(self, batch: ReturningBatch) -> None:
        """After the last micro-batch: update the collision rows with the sum of the gradients that this owner holds.

        If its gradients are not divided, all rows are updated.
        """
        held_by = _lookups_of(batch)
        self.before_update(COLLISION)
        self.on_update()
        for lookup in held_by:
            for one in lookup.held:
                mark_used_on(self._stream, one.tensors())
        from_compute = any(lookup.on_compute_stream for lookup in held_by)
        with self._stream.work(compute=from_compute), self._timeline.span(Kind.LOOKUP):
            for lookup in held_by:
                if batch.divided:
                    lookup.apply_urgent()
                else:
                    lookup.apply()
        self._tables.optimizer.continue_count()

    # ---- step N+1 ---------------------------------------------------------------------------------------------------
    def begin_forward(self) -> None:
        """In the forward of the next step, when its rows have been joined."""
        self._pacer.forward_starts()
        self.send_late()

    @property
    def has_late(self) -> bool:
        """Whether rows of the previous step are still to be updated."""
        return self._late is not None and any(EXCLUSIVE in sets for sets in self._late.row_sets)

    def send_late(self) -> None:
        """Send the gradients of the previous step's exclusive rows, unless they have been sent."""
        if self._late is not None and EXCLUSIVE not in self._late.transfers:
            self.send(self._late, EXCLUSIVE)

    def apply_late(self) -> None:
        """Update the previous step's exclusive rows, unless that has been done."""
        self.send_late()
        late, self._late = self._late, None
        if late is not None:
            self.apply(late, EXCLUSIVE)

    def cancel(self) -> None:
        """Expect no backward any more: the batch is dropped."""
        self._expected = None

    # ---- the two operations -----------------------------------------------------------------------------------------
    def send(self, batch: ReturningBatch, kind: RowKind) -> None:
        """As requester: start to send the gradients of one kind of rows to the owners."""
        batch.transfers[kind] = []
        gradients = batch.computing.gradients
        # Collision gradients are sent first, so only then the compute stream is awaited, and the memory marked.
        if kind == COLLISION:
            mark_used_on(self._stream, gradients)
        with self._stream.work(compute=kind == COLLISION):
            for gradient, sets in zip(gradients, batch.row_sets, strict=True):
                if kind not in sets or gradient is None:  # no gradient: the loss does not depend on this group
                    continue
                rows = sets[kind]
                assert rows.batch_position is not None
                batch.transfers[kind].append(
                    all_to_all.start(
                        gradient,
                        rows.batch_position,
                        rows.by_owner,
                        rows.by_requester,
                        self._groups.of(kind),
                        self._timeline,
                        Kind.GRADIENT_EXCHANGE,
                        wire=self._wire,
                    )
                )

    def apply(self, batch: ReturningBatch, kind: RowKind) -> None:
        """As owner: update the rows of one kind, with the learning rates and the step count of the batch's own step.

        While gradients are accumulated, they are held. With the exclusive rows of the last micro-batch, all others that wait are
        updated.
        """
        if kind not in batch.transfers:
            return
        holds = batch.computing.held_by is not None
        if holds and not (kind == EXCLUSIVE and batch.divided):
            self._receive(batch, kind)
            return
        self.before_update(kind)
        self.on_update()
        optimizer, settings = self._tables.optimizer, batch.computing.settings
        present_rates = optimizer.learning_rates()
        other_rates = settings.learning_rates != present_rates
        if other_rates:
            optimizer.set_learning_rates(settings.learning_rates)
        self._receive(batch, kind)
        if holds:
            with self._stream.work(), self._timeline.span(Kind.LOOKUP):
                for lookup in _lookups_of(batch):
                    lookup.apply_late(settings.step)
                optimizer.restore_count()
        if other_rates:
            optimizer.set_learning_rates(present_rates)

    def _receive(self, batch: ReturningBatch, kind: RowKind) -> None:
        """Update or hold the gradients of one kind when they have arrived."""
        transfers = iter(batch.transfers.pop(kind))
        with self._stream.work(), self._timeline.span(Kind.LOOKUP):
            for group, (gradient, sets) in enumerate(zip(batch.computing.gradients, batch.row_sets, strict=True)):
                if kind not in sets or gradient is None:
                    continue
                received = next(transfers).wait()
                if batch.computing.held_by is None:
                    self.update(group, sets[kind], received, batch.computing)
                elif received.numel():
                    self.hold(group, kind, received, batch)

    def update(self, group: int, rows: RowSet, received: Tensor, batch: ComputingBatch) -> None:
        """Update rows with ``received``, the ``[n, D]`` gradients in wire order."""
        if not received.numel():
            return
        assert rows.wire_position is not None
        grouped = rows.grouped or self._tables.group_gradients(group, rows.features, rows.wire_position)
        if grouped is not None:
            divisor = self._world_size if batch.settings.divide_by_ranks else 1
            self._tables.update_grouped(group, grouped, received, divisor)
            return
        self._tables.update(group, rows.features, self._in_lookup_order(rows, received, batch), batch.settings)

    def _in_lookup_order(self, rows: RowSet, received: Tensor, batch: ComputingBatch) -> Tensor:
        assert rows.wire_position is not None
        # A gather of rows is faster than a scatter.
        return self.divided(received.index_select(0, rows.wire_position).float(), batch)

    def divided(self, gradient: Tensor, batch: ComputingBatch) -> Tensor:
        """``gradient``, divided in place by the number of ranks if TorchRec does so."""
        return gradient.div_(self._world_size) if batch.settings.divide_by_ranks else gradient

    def hold(self, group: int, kind: RowKind, received: Tensor, batch: ReturningBatch) -> None:
        """Hold ``received``, the ``[n, D]`` gradients of one kind in wire order, as TorchRec's look-up would get them."""
        rows, requests = batch.row_sets[group][kind], batch.computing.routed.requests[group]
        gradient = self._in_lookup_order(rows, received, batch.computing)
        if batch.divided:
            lookup_of(batch, group).hold_part(rows.features, gradient, urgent=kind == COLLISION)
        else:
            lookup_of(batch, group).hold(what_is_read(requests.features), gradient, requests)


def lookup_of(batch: ReturningBatch, group: int) -> HeldLookup:
    """Where the gradients of a sharding group wait. They arrive where the rows are, so there is a look-up."""
    assert batch.computing.held_by is not None
    lookup = batch.computing.held_by[group]
    assert lookup is not None
    return lookup


def _lookups_of(batch: ReturningBatch) -> list[HeldLookup]:
    return [lookup for lookup in batch.computing.held_by or () if lookup is not None]
