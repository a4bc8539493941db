"""The transfer itself: an asynchronous all-to-all of rows, and the process groups that the two kinds of rows use.

Masks, rows and gradients all travel through :func:`start`. Both ends list the rows in wire order (see ``index.py``).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.bubbles.spans import Kind
from lightning_freescale.bubbles.timeline import Timeline, TrackedTransfer
from lightning_freescale.embedding.wire import to_wire
from lightning_freescale.transport import direct_calls


class RowKind(StrEnum):
    """Whether the neighbouring batch uses a row too: a collision row must wait for an update, an exclusive row need not."""

    COLLISION = "collision"
    EXCLUSIVE = "exclusive"


COLLISION, EXCLUSIVE = RowKind.COLLISION, RowKind.EXCLUSIVE


class ExchangeGroups(NamedTuple):
    """One process group for each kind of row, so that a collision row never queues behind exclusive rows."""

    collision: dist.ProcessGroup
    exclusive: dist.ProcessGroup

    def of(self, kind: RowKind) -> dist.ProcessGroup:
        return self.collision if kind == COLLISION else self.exclusive


class PendingAllToAll(NamedTuple):
    """An all-to-all that has started. ``wait()`` blocks the host on CPU and the current stream on CUDA."""

    work: Any
    received: Tensor
    sent: Tensor  # must stay alive until the transfer is complete
    tracked: TrackedTransfer

    def wait(self) -> Tensor:
        """Wait for the transfer, and return what this rank has received: ``[sum(receive), ...]`` in wire order."""
        self.tracked.wait(self.work)
        return self.received


def start(
    source: Tensor,
    order: Tensor,
    send: list[int],
    receive: list[int],
    group: dist.ProcessGroup,
    timeline: Timeline,
    kind: Kind,
    into: Tensor | None = None,
    wire: torch.dtype | None = None,
) -> PendingAllToAll:
    """Start an all-to-all of the rows ``source[order]``. Both ends list the rows in wire order.

    Args:
        source: ``[n, ...]`` rows.
        order: ``[sum(send)]`` positions in ``source``, in wire order.
        send: ``[W]`` number of rows for each rank.
        receive: ``[W]`` number of rows from each rank.
        group: the process group of the transfer.
        timeline: records the transfer as a span of ``kind``.
        into: ``[sum(receive), ...]`` receive buffer of the type ``wire``; allocated here by default.
        wire: the type that the rows have while they travel; that of ``source`` by default.
    """
    wire = wire or source.dtype
    rank, rounds = group.rank(), wire != source.dtype
    own = send[rank]
    order, kept = _divide(order, own)
    sent = source.index_select(0, order)
    if rounds:
        sent = to_wire(sent, wire)
    received = source.new_empty((sum(receive), *source.shape[1:]), dtype=wire) if into is None else into
    from_others, from_self = _divide(received, own)
    pending = _start(sent, received, from_others, send, receive, rank, group, timeline, kind)
    if own:  # copied while the other rows travel; rounded like them, so that a result does not depend on the owner
        if rounds:
            from_self.copy_(to_wire(source.index_select(0, kept), wire))
        else:
            torch.index_select(source, 0, kept, out=from_self)
    return pending


def start_packed(
    sent: Tensor,
    received: Tensor,
    send: list[int],
    receive: list[int],
    group: dist.ProcessGroup,
    timeline: Timeline,
    kind: Kind,
) -> PendingAllToAll:
    """Start an all-to-all of rows that lie in wire order already. The caller writes this rank's own rows.

    Args:
        sent: the rows for other ranks.
        received: ``[sum(receive), ...]`` receive buffer, with this rank's own rows at its end.
        send, receive, group, timeline, kind: as for :func:`start`.
    """
    rank = group.rank()
    from_others, _ = _divide(received, receive[rank])
    return _start(sent, received, from_others, send, receive, rank, group, timeline, kind)


def _divide(rows: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """The rows of other ranks, and this rank's own rows at the end. Both are all rows if there are none of its own."""
    if not own:
        return rows, rows
    of_others, of_self = rows.split_with_sizes((rows.size(0) - own, own))
    return of_others, of_self


def _start(
    sent: Tensor,
    received: Tensor,
    from_others: Tensor,
    send: list[int],
    receive: list[int],
    rank: int,
    group: dist.ProcessGroup,
    timeline: Timeline,
    kind: Kind,
) -> PendingAllToAll:
    send, receive = send.copy(), receive.copy()
    send[rank] = receive[rank] = 0
    work = direct_calls.start_all_to_all(from_others, sent, receive, send, group)
    return PendingAllToAll(work, received, sent, timeline.transfer(kind, work, sent.nbytes))
