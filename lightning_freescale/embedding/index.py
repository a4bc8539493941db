"""Index arithmetic of the prioritized exchange: pure functions on tensors, without communication.

The rows of one batch in one sharding group appear in four orders. ``n`` counts the ids that this rank owns, ``m`` the ids that
this rank requests; every id counts as often as it occurs.

    batch order     ``[m]`` at the requester: as the features of the batch list them
    request order   ``[m]`` at the requester: by owner, then in batch order
    lookup order    ``[n]`` at the owner: by feature, then by requester, then by sample
    wire order      ``[n]`` at the owner by requester, ``[m]`` at the requester by owner: ascending ranks, but this rank last

This rank comes last in wire order because the rows that a rank requests from itself do not travel: they are copied to the end
of the receive buffer while the other rows travel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


# ---- masks ---------------------------------------------------------------------------------------------------------
def true_first(mask: Tensor) -> Tensor:
    """Stable order that lists the positions where ``mask`` is true first: ``[n]`` bool to ``[n]`` int64.

    >>> true_first(torch.tensor([False, True, False, True]))
    tensor([1, 3, 0, 2])
    """
    if not mask.numel():
        return torch.empty(0, dtype=torch.int64, device=mask.device)
    true_so_far = mask.cumsum(0)  # up to and including each position
    here = torch.arange(mask.numel(), device=mask.device)
    order = torch.empty_like(here)
    order[torch.where(mask, true_so_far - 1, true_so_far[-1] + here - true_so_far)] = here
    return order


def position_among_equals(mask: Tensor) -> Tensor:
    """Position of each element among the elements with the same value: ``[n]`` bool to ``[n]`` int64.

    >>> position_among_equals(torch.tensor([False, True, False, True]))
    tensor([0, 0, 1, 1])
    """
    true_so_far = mask.cumsum(0)
    here = torch.arange(mask.numel(), device=mask.device)
    return torch.where(mask, true_so_far - 1, here - true_so_far)


def count_true_between(mask: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Number of true elements in each range ``starts[i]`` to ``ends[i] - 1``: ``[n]`` bool, two ``[s]`` int64 to ``[s]``.

    >>> mask = torch.tensor([True, True, False, True])
    >>> count_true_between(mask, torch.tensor([0, 2]), torch.tensor([3, 4]))
    tensor([2, 1])
    """
    true_before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
    return true_before[ends] - true_before[starts]


def count_true_by_segment(mask: Tensor, offsets: Tensor) -> Tensor:
    """Number of true elements in each segment: ``[n]`` bool and ``[s + 1]`` int64 offsets to ``[s]``.

    >>> count_true_by_segment(torch.tensor([True, True, False, True]), torch.tensor([0, 1, 1, 4]))
    tensor([1, 0, 2])
    """
    return count_true_between(mask, offsets[:-1], offsets[1:])


# ---- orders --------------------------------------------------------------------------------------------------------
def inverse_permutation(order: Tensor) -> Tensor:
    """The permutation that undoes ``order``: ``[n]`` int64 to ``[n]`` int64.

    >>> inverse_permutation(torch.tensor([2, 0, 1]))
    tensor([1, 2, 0])
    """
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device, dtype=order.dtype)
    return inverse


def own_rank_last(order: Tensor, counts: list[int], rank: int) -> Tensor:
    """Put an order that lists ``counts[r]`` elements of every rank ``r`` into wire order: ``[sum(counts)]`` to the same shape.

    >>> own_rank_last(torch.tensor([10, 11, 20, 30]), [2, 1, 1], rank=1)
    tensor([10, 11, 30, 20])
    """
    before, own, after = order.split([sum(counts[:rank]), counts[rank], sum(counts[rank + 1 :])])
    return torch.cat([before, after, own])


def wire_bounds(counts: list[int], rank: int) -> tuple[list[int], list[int]]:
    """Where the elements of each rank start and end in wire order: ``[W]`` counts to ``[W]`` starts and ``[W]`` ends.

    >>> wire_bounds([2, 1, 1], rank=1)
    ([0, 3, 2], [2, 4, 3])
    """
    starts, place = [0] * len(counts), 0
    for peer in [peer for peer in range(len(counts)) if peer != rank] + [rank]:
        starts[peer], place = place, place + counts[peer]
    return starts, [start + count for start, count in zip(starts, counts, strict=True)]


# ---- the requests that an owner has received -----------------------------------------------------------------------
def feature_and_requester(lengths: Tensor, samples: Tensor, num_samples: int, num_ids: int) -> tuple[Tensor, Tensor]:
    """Feature index and requesting rank of every id, in lookup order. The sizes come from the host: the device is not awaited.

    Args:
        lengths: ``[T * B]`` int64, ids of each feature and sample: by feature, then by requester, then by sample.
        samples: ``[W]`` int64, samples of each requester.
        num_samples: ``B``, the sum of ``samples``.
        num_ids: ``n``, the sum of ``lengths``.

    Returns:
        ``[n]`` and ``[n]`` int64.

    >>> lengths = torch.tensor([1, 2, 0, 1])  # two features of two samples, one from each of two ranks
    >>> feature_and_requester(lengths, torch.tensor([1, 1]), num_samples=2, num_ids=4)
    (tensor([0, 0, 0, 1]), tensor([0, 1, 1, 1]))
    """
    device, num_features = lengths.device, lengths.numel() // num_samples if num_samples else 0
    requester_of_sample = torch.repeat_interleave(
        torch.arange(samples.numel(), device=device), samples, output_size=num_samples
    )
    feature_of_sample = torch.arange(num_features, device=device).repeat_interleave(
        num_samples, output_size=num_features * num_samples
    )
    requester = torch.repeat_interleave(requester_of_sample.repeat(num_features), lengths, output_size=num_ids)
    return torch.repeat_interleave(feature_of_sample, lengths, output_size=num_ids), requester


# ---- collision rows and exclusive rows -----------------------------------------------------------------------------
class SplitOrders(NamedTuple):
    """Orders of the rows of a batch, the collision rows first and the exclusive rows after them.

    Attributes:
        lookup: ``[n]`` at the owner: positions in lookup order. Both parts keep the lookup order.
        wire: ``[n]`` at the owner: for each row in wire order, its position within its part of ``lookup``.
        request: ``[m]`` at the requester: for each row in wire order, its position in request order.
        collisions: ``[T * B]`` collision rows of each feature and sample.
    """

    lookup: Tensor
    wire: Tensor
    request: Tensor
    collisions: Tensor


def split_orders(
    collides: Tensor,
    requested_collides: Tensor,
    owner_wire_order: Tensor,
    requester_wire_order: Tensor,
    offsets: Tensor,
) -> SplitOrders:
    """Divide the rows of a batch into collision rows and exclusive rows, at the owner and at the requester.

    Args:
        collides: ``[n]`` bool at the owner, in lookup order.
        requested_collides: ``[m]`` bool at the requester, in wire order.
        owner_wire_order: ``[n]`` at the owner: position in lookup order of each row in wire order.
        requester_wire_order: ``[m]`` at the requester: position in request order of each row in wire order.
        offsets: ``[T * B + 1]`` int64 at the owner: where the ids of each feature and sample start in lookup order.

    >>> here = torch.arange(3)
    >>> orders = split_orders(torch.tensor([False, True, True]), torch.tensor([True, False]), here, here[:2], here[[0, 2]])
    >>> orders.lookup, orders.wire, orders.request
    (tensor([1, 2, 0]), tensor([0, 1, 0]), tensor([0, 1]))
    """
    lookup = true_first(collides)
    wire = position_among_equals(collides)[owner_wire_order[true_first(collides[owner_wire_order])]]
    request = requester_wire_order[true_first(requested_collides)]
    return SplitOrders(lookup, wire, request, count_true_by_segment(collides, offsets))


def split_counts(
    collides: Tensor,
    requested_collides: Tensor,
    owner_wire_order: Tensor,
    owner_bounds: tuple[Tensor, Tensor],
    requester_bounds: tuple[Tensor, Tensor],
    feature_offsets: Tensor,
) -> Tensor:
    """The sizes that the host needs to exchange both parts, in one tensor so that one copy brings them to the host.

    Args:
        collides, requested_collides, owner_wire_order: as for :func:`split_orders`.
        owner_bounds: two ``[W]`` tensors, where the rows of each requester start and end in wire order at the owner.
        requester_bounds: two ``[W]`` tensors, the same of each owner at the requester.
        feature_offsets: ``[T + 1]`` int64, where the ids of each feature start in lookup order.

    Returns:
        ``[2 W + 2 T]`` int64: collision rows by requester ``[W]``, collision rows by feature ``[T]``, all rows by feature
        ``[T]``, and collision rows by owner ``[W]``.

    >>> one = torch.tensor([0]), torch.tensor([2])  # one rank, whose two rows begin at 0 and end before 2
    >>> collides, order = torch.tensor([False, True]), torch.arange(2)
    >>> split_counts(collides, collides, order, one, one, torch.tensor([0, 1, 2]))
    tensor([1, 0, 1, 1, 1, 1])
    """
    return torch.cat(
        [
            count_true_between(collides[owner_wire_order], *owner_bounds),
            count_true_by_segment(collides, feature_offsets),
            feature_offsets.diff(),
            count_true_between(requested_collides, *requester_bounds),
        ]
    )
