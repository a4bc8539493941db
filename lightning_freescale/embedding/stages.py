"""The stages of a batch in the prioritized exchange, one type for each. The operations take one stage and return the next.

    RequestedBatch   this rank has sent the ids of the batch to the ranks that own their rows
    RoutedBatch      every rank knows which rows it requests and which rows it owes to others; the rows that collide with
                     the previous and with the next batch are added later
    FetchingBatch    rows travel from owners to requesters: first the exclusive rows, later the collision rows
    ComputingBatch   the rows have become the output of the module, and the model computes with them
    ReturningBatch   gradients travel from requesters to owners: first those of collision rows, later those of exclusive rows

A module has one *sharding group* for each sharding type of its tables. The lists below hold one entry for each group. Tensor
shapes use ``n`` for the ids that this rank owns (as owner) and ``m`` for the ids that it requests (as requester), of one batch
in one sharding group. The orders of rows (lookup, request, wire, batch) are defined in ``index.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.embedding.all_to_all import PendingAllToAll, RowKind
from lightning_freescale.embedding.batch_contents import Contents
from lightning_freescale.embedding.grouped_update import GroupedGradients
from lightning_freescale.embedding.held_gradients import HeldLookup
from lightning_freescale.embedding.index_results import Features, FusedMarks, PlacedIds, Segments, SharedIds
from lightning_freescale.embedding.table_optimizer import UpdateSettings
from lightning_freescale.embedding.zero_collision.ahead import BatchAhead
from lightning_freescale.runtime.streams import Readback


# ---- what a stage holds for each sharding group --------------------------------------------------------------------
@dataclass  # not frozen: that would double the time to make one
class Requests:
    """Who requests what: the ids that this rank requests from each owner, and the ids that each requester asks of this rank."""

    features: KeyedJaggedTensor  # owner: the ids that it must look up, in lookup order
    row_keys: Tensor  # [n] owner: number of each id's row, unique over the tables of the group
    owner_wire_order: Tensor  # [n] owner: position in lookup order of each id in wire order
    requester_wire_order: Tensor  # [m] requester: position in request order of each id in wire order
    by_requester: list[int]  # [W] owner: number of ids that each rank requests from this rank
    by_owner: list[int]  # [W] requester: number of ids that this rank requests from each rank
    # Both are None if request order and batch order are the same.
    request_position: Tensor | None  # [m] requester: position in request order of each id of the batch
    batch_position: Tensor | None  # [m] requester: position in the batch of each id in request order
    segments: Segments | None = None  # where the ids of each feature and requester start, if the index work is fused
    after_window: SharedIds | None = None  # owner, while gradients are accumulated: see ``CollisionFinder.find_window``
    by_feature: Readback | None = None  # [T] int64, owner: number of ids of each feature, until the host knows it

    def count_features(self) -> None:
        """Start to copy the number of ids of each feature to the host. Gradients that are held are divided by feature."""
        features = self.features
        if features.length_per_key_or_none() is None:
            lengths = features.lengths().view(len(features.keys()), features.stride())
            self.by_feature = Readback(lengths.sum(1))

    def note_features(self) -> None:
        """Keep these numbers with the features, if they have been counted. Otherwise the host would ask the device for them."""
        if self.by_feature is not None:
            features, counts = self.features, self.by_feature.wait().tolist()
            self.features, self.by_feature = with_counts(features, counts), None

    def tensors(self) -> list[Tensor | None]:
        """The tensors that the table stream uses, too."""
        features = self.features
        found = [
            features.values(),
            features.weights_or_none(),
            features.lengths(),
            features.offsets(),
            self.request_position,
        ]
        if self.segments is not None:  # on CUDA, fused index work puts the other arrays into the same allocation
            return [*found, self.segments.lookup]
        return [*found, self.owner_wire_order, self.requester_wire_order, self.batch_position]


def with_counts(features: KeyedJaggedTensor, length_per_key: list[int]) -> KeyedJaggedTensor:
    """``features`` with the number of ids of each of them. They share the memory."""
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        weights=features.weights_or_none(),
        lengths=features.lengths(),
        offsets=features.offsets(),
        stride=features.stride(),
        length_per_key=length_per_key,
    )


def with_places(
    features: KeyedJaggedTensor,
    placed: PlacedIds,
    by_requester: list[int],
    by_owner: list[int],
    request_position: Tensor | None,
) -> Requests:
    """The requests of a batch whose places the fused index work has computed."""
    keys, owner_wire_order, requester_wire_order, batch_position, segments = placed
    return Requests(
        features,
        keys,
        owner_wire_order,
        requester_wire_order,
        by_requester,
        by_owner,
        request_position,
        batch_position,
        segments,
    )


class CountedMarks(NamedTuple):
    """What the requester and the host know about collisions once the owner's marks have arrived."""

    requested_collides: Tensor  # [m] bool, requester, wire order
    counts: Readback  # [2 W + 2 T] int64, see index.split_counts


@dataclass(frozen=True)
class CollisionMarks:
    """Which rows of a batch collide with one neighbouring batch. The owner finds this out and tells the requesters."""

    collides: Tensor  # [n] bool, owner, lookup order
    transfer: PendingAllToAll  # [m] uint8, requester, wire order
    counted: CountedMarks | None  # already counted on CUDA, so that the counts reach the host early; None on CPU


@dataclass  # not frozen: that would double the time to make one
class RowSet:
    """The collision rows, or the exclusive rows, of a batch: which rows they are, and between which ranks they travel.

    ``wire_ids`` and the next three are None until they are needed, unless fused index work has found them before. It needs no
    ``requester_wire_order``.
    """

    features: Features  # owner: ids of these rows, in lookup order
    owner_wire_order: Tensor  # [n] owner: position in ``features`` of each row in wire order
    by_requester: list[int]  # [W] owner: rows for each requester
    requester_wire_order: Tensor | None  # [m] requester: position in request order of each row in wire order
    by_owner: list[int]  # [W] requester: rows from each owner
    wire_ids: Tensor | None = None  # [n] owner: id of each row in wire order
    wire_position: Tensor | None = None  # [n] owner: position in wire order of each row in lookup order
    batch_position: Tensor | None = None  # [m] requester: position in the batch of each row in wire order
    batch_order: Tensor | None = (
        None  # [all m] requester: for each id of the batch, its position among the rows of both kinds
    )
    grouped: GroupedGradients | None = None  # owner: which gradients belong to each row, if they were sorted before


# ---- the stages ----------------------------------------------------------------------------------------------------
@dataclass
class RequestedBatch:
    """The exchange of the ids has started: first of their numbers, then of the ids themselves."""

    kjt: KeyedJaggedTensor  # the object that the module will be called with
    context: Any  # TorchRec's context of the batch
    ids: Awaitable  # TorchRec's input_dist
    contents: Contents  # those of ``kjt`` when it was requested
    arriving: Awaitable | None = None  # the ids themselves, when they are on their way


@dataclass
class RoutedBatch:
    """The ids have arrived at their owners.

    ``find_collisions`` adds the marks. They stay None if there is no previous or no next batch.
    """

    kjt: KeyedJaggedTensor
    context: Any
    requests: list[Requests]
    contents: Contents
    with_previous: Sequence[CollisionMarks | FusedMarks] | None = None  # decides when rows are fetched
    with_next: Sequence[CollisionMarks | FusedMarks] | None = None  # decides when gradients return
    ahead: BatchAhead | None = None  # the inserted ids, if the tables have zero-collision ids


@dataclass
class FetchingBatch:
    """Rows travel to this rank. ``transfers`` has an entry for each kind of row that has been sent."""

    routed: RoutedBatch
    row_sets: list[dict[RowKind, RowSet]]
    buffers: list[Tensor] = field(default_factory=list)  # [m, D] the rows of all sets, one set after the other
    transfers: dict[RowKind, list[PendingAllToAll]] = field(default_factory=dict)

    @property
    def kjt(self) -> KeyedJaggedTensor:
        return self.routed.kjt


@dataclass
class ComputingBatch:
    """The module's output is in use. Autograd puts the gradients of the rows into ``gradients``."""

    routed: RoutedBatch
    settings: UpdateSettings  # of the batch's own step, also for gradients that are applied in the next step
    # [m, D] in batch order. None before the backward, and also after it if the loss does not depend on the group.
    gradients: list[Tensor | None]
    # Bags, as owner, by sharding group: the gradients that have arrived. Rows wait until all of theirs are there.
    received: dict[int, Tensor] = field(default_factory=dict)
    # By sharding group, while gradients are accumulated: where those that arrive at this owner wait.
    held_by: list[HeldLookup | None] | None = None

    @property
    def kjt(self) -> KeyedJaggedTensor:
        return self.routed.kjt


@dataclass
class ReturningBatch:
    """Gradients return to the owners. ``transfers`` has an entry for each kind of row that is sent and not applied yet."""

    computing: ComputingBatch
    row_sets: list[dict[RowKind, RowSet]]
    transfers: dict[RowKind, list[PendingAllToAll]] = field(default_factory=dict)

    @property
    def kjt(self) -> KeyedJaggedTensor:
        return self.computing.kjt

    @property
    def divided(self) -> bool:
        """Whether the gradients return in two parts."""
        return all(len(sets) > 1 for sets in self.row_sets)

    @property
    def has_gradients(self) -> bool:
        """Whether backward has reached any row of the batch."""
        return any(gradient is not None for gradient in self.computing.gradients)
