"""What travels in a prioritized exchange: the ids of a batch, their division into two pieces, and the transfers.

Orders of the rows of one batch, in one sharding group:
    lookup order    at the owner: by feature, then requester, then sample
    request order   at the requester: by owner, then as it asked
    wire order      of both ends: as above, but by the other rank first, the rank itself last

Rows that a rank asks of itself do not travel: they are put into their place, the end of what arrives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.bubbles.timeline import Kind, Timeline
from lightning_freescale.bubbles.timeline import Transfer as Watched
from lightning_freescale.runtime.streams import Readback

COLLISION, EXCLUSIVE = "collision", "exclusive"


class Groups(NamedTuple):
    """Process groups by urgency: a collision never queues behind exclusive rows."""

    collision: dist.ProcessGroup
    exclusive: dist.ProcessGroup

    def of(self, piece: str) -> dist.ProcessGroup:
        return self.collision if piece == COLLISION else self.exclusive


class Transfer(NamedTuple):
    """An all-to-all under way. ``wait()`` blocks the host on CPU and the current stream on CUDA."""

    work: Any
    received: Tensor
    sent: Tensor  # alive until the transfer is done
    watched: Watched

    def wait(self) -> Tensor:
        with self.watched.waiting():
            self.work.wait()
        return self.received


def exchange(
    source: Tensor,
    order: Tensor,
    send: list[int],
    receive: list[int],
    group: dist.ProcessGroup,
    timeline: Timeline,
    kind: Kind,
    into: Tensor | None = None,
) -> Transfer:
    """Start an all-to-all of the rows ``source[order]``, both ends in wire order.

    Args:
        source: ``[n, ...]`` rows.
        order: ``[sum(send)]`` positions in ``source``, in wire order.
        send, receive: rows by rank.
        into: ``[sum(receive), ...]``, where to put what arrives; new memory by default.
    """
    rank = group.rank()
    own = send[rank]
    sent = source.index_select(0, order[: len(order) - own])
    received = source.new_empty((sum(receive), *source.shape[1:])) if into is None else into
    others, mine = received.split([len(received) - own, own])
    counts = [[0 if peer == rank else rows for peer, rows in enumerate(part)] for part in (receive, send)]
    work = dist.all_to_all_single(others, sent, counts[0], counts[1], group=group, async_op=True)
    if own:  # while the others travel
        torch.index_select(source, 0, order[len(order) - own :], out=mine)
    return Transfer(work, received, sent, timeline.transfer(kind, work, sent.nbytes))


def own_last(order: Tensor, counts: list[int], rank: int) -> Tensor:
    """``order``, which lists ``counts[r]`` elements of each rank ``r``, in wire order."""
    before, own, after = order.split([sum(counts[:rank]), counts[rank], sum(counts[rank + 1 :])])
    return torch.cat([before, after, own])


def wire_bounds(counts: list[int], rank: int) -> list[int]:
    """Where the elements of each rank begin in wire order, and then where they end: ``[W]`` counts to ``[2 W]`` positions."""
    starts, place = [0] * len(counts), 0
    for peer in [peer for peer in range(len(counts)) if peer != rank] + [rank]:
        starts[peer], place = place, place + counts[peer]
    return starts + [start + count for start, count in zip(starts, counts, strict=True)]


@dataclass
class ExchangeStats:
    """Sums over the batches of this rank that went the prioritized way.

    Attributes:
        batches: their number.
        ids: ids of these batches, repeated ones too.
        rows: rows asked for: as many, or one for each distinct id of a batch with ``dedup``.
        collisions: rows among them that the batch before updates.
        row_bytes: bytes of all rows asked for; as many gradients go the other way.
        id_bytes: bytes of a row for every id.
    """

    batches: int = 0
    ids: int = 0
    rows: int = 0
    collisions: int = 0
    row_bytes: int = 0
    id_bytes: int = 0

    @property
    def collision_rate(self) -> float:
        """Share of the rows that must wait for the batch before."""
        return self.collisions / self.rows if self.rows else 0.0

    @property
    def bytes_saved(self) -> int:
        """Bytes that ``dedup`` has spared, rows and gradients together."""
        return 2 * (self.id_bytes - self.row_bytes)


@dataclass
class Piece:
    """The collisions, or the exclusive rows, of one batch in one sharding group."""

    features: KeyedJaggedTensor  # owner: ids to look up, lookup order
    wire: Tensor  # [n] owner: position in ``features`` of each row in wire order
    send: list[int]  # owner: rows for each requester
    positions: Tensor  # [m] requester: position in request order of each row in wire order
    receive: list[int]  # requester: rows from each owner
    # Worked out ahead, for there is time before the rows or gradients are:
    ids: Tensor | None = None  # [n] owner: id of each row in wire order, where all features have one table
    back: Tensor | None = None  # [n] owner: position in wire order of each id of ``features``
    places: Tensor | None = None  # [m] requester: place in the batch of each row in wire order


@dataclass
class Asked:
    """The ids of one batch in one sharding group, as this rank asked for them and as it was asked."""

    features: KeyedJaggedTensor  # owner: lookup order
    keys: Tensor  # [n] owner: row key of each id, unique over the group's tables
    wire: Tensor  # [n] owner: position in lookup order of each id in wire order
    request: Tensor  # [m] requester: position in request order of each id in wire order
    owned: list[int]  # ids asked of this rank, by requester
    asked: list[int]  # ids this rank asked for, by owner
    unbucketize: Tensor | None  # [m] requester: place in request order of each id of the batch (row-wise sharding)
    bucketize: Tensor | None  # [m] requester: place in the batch of each id in request order

    def tensors(self) -> list[Tensor | None]:
        features = self.features
        return [
            features.values(),
            features.lengths(),
            features.offsets(),
            self.wire,
            self.request,
            self.unbucketize,
            self.bucketize,
        ]


@dataclass
class Split:
    """A division into collisions and the rest: decided by the owner, on its way to the requesters and to the host."""

    mask: Tensor  # [n] owner, lookup order
    told: Transfer  # [m] uint8, requester, wire order
    received_mask: Tensor | None = None
    counts: Readback | None = None  # [W] collisions by requester, [T] by feature, [T] all ids by feature, [W] by owner


@dataclass
class BatchState:
    """One batch on its way through one module."""

    kjt: KeyedJaggedTensor  # the object the module will be called with
    context: Any
    ids: Awaitable | None  # input_dist under way
    asked: list[Asked] = field(default_factory=list)
    split_before: list[Split] | None = None  # by collision with the batch before, decides how rows come
    split_after: list[Split] | None = None  # by collision with the batch after, decides how gradients go
    rows: list[dict[str, Piece]] = field(default_factory=list)
    gradients: list[dict[str, Piece]] = field(default_factory=list)
    arriving: list[Tensor] = field(default_factory=list)  # [m, D] rows of both pieces, one after the other, by group
    incoming: dict[str, list[Transfer]] = field(default_factory=dict)
    outgoing: dict[str, list[Transfer]] = field(default_factory=dict)
    gradient: list[Tensor | None] = field(default_factory=list)  # [m, D] in batch order, by group
    used: bool = False
    learning_rates: list[float] = field(default_factory=list)
    step: int = 0
    divide: bool = False
