"""Two consecutive batches of several ranks in one process: their index work by ``index.py`` and by the fused kernels.

The exchange of ids and marks between the ranks is plain indexing here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.embedding.collisions import CollisionDetector
from lightning_freescale.embedding.fused_index import FusedIndex
from lightning_freescale.embedding.index import (
    feature_and_requester,
    inverse_permutation,
    own_rank_last,
    split_counts,
    split_orders,
    wire_bounds,
)
from lightning_freescale.embedding.index_results import DividedIds
from lightning_freescale.embedding.stages import Requests, with_places

ROWS = 7  # of each feature's table on each rank


@dataclass
class IdsOfBatch:
    """The ids of all ranks, as they lie at owners and requesters."""

    counts: Tensor  # [W owner, T, B] ids
    values: list[Tensor]  # [n] at each owner, lookup order
    samples: list[int]
    permutations: list[Tensor | None]  # [m] at each requester: position in request order of each id of the batch


def draw(world: int, features: int, longest: int, seed: int, permuted: bool = True) -> IdsOfBatch:
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randint(1, 4, (world,), generator=generator).tolist()
    counts = torch.randint(0, longest + 1, (world, features, sum(samples)), generator=generator)
    values = [torch.randint(ROWS, (int(one.sum()),), generator=generator) for one in counts]
    requester = torch.arange(world).repeat_interleave(torch.tensor(samples))
    asked = [int(counts[:, :, requester == rank].sum()) for rank in range(world)]
    orders = [torch.randperm(count, generator=generator) if permuted else None for count in asked]
    return IdsOfBatch(counts, values, samples, orders)


def sides(batch: IdsOfBatch, rank: int) -> tuple[KeyedJaggedTensor, list[int], list[int]]:
    """The features that ``rank`` owns, how many ids it owes to each rank, and how many it requests from each."""
    world, features, _ = batch.counts.shape
    requester = torch.arange(world).repeat_interleave(torch.tensor(batch.samples))
    by_requester = [int(batch.counts[rank][:, requester == peer].sum()) for peer in range(world)]
    by_owner = [int(batch.counts[owner][:, requester == rank].sum()) for owner in range(world)]
    keys = [f"f{feature}" for feature in range(features)]
    lengths = batch.counts[rank].flatten()
    return (
        KeyedJaggedTensor(keys, batch.values[rank], lengths=lengths, stride=sum(batch.samples)),
        by_requester,
        by_owner,
    )


def reference_requests(batch: IdsOfBatch, rank: int) -> Requests:
    features, by_requester, by_owner = sides(batch, rank)
    feature, requester = feature_and_requester(
        features.lengths(), torch.tensor(batch.samples), sum(batch.samples), features.values().numel()
    )
    permutation = batch.permutations[rank]
    return Requests(
        features,
        features.values() + ROWS * feature,
        own_rank_last(torch.argsort(requester, stable=True), by_requester, rank),
        own_rank_last(torch.arange(sum(by_owner)), by_owner, rank),
        by_requester,
        by_owner,
        permutation,
        None if permutation is None else inverse_permutation(permutation),
    )


def fused_indices(kind: type[FusedIndex], world: int, features: int, device: str = "cpu") -> list[FusedIndex]:
    first_key = torch.arange(features, device=device) * ROWS
    return [kind(features * ROWS, first_key, rank, world) for rank in range(world)]


def fused_requests(fused: FusedIndex, batch: IdsOfBatch, rank: int, device: str = "cpu") -> Requests:
    features, by_requester, by_owner = sides(batch, rank)
    features, permutation = features.to(torch.device(device)), batch.permutations[rank]
    permutation = None if permutation is None else permutation.to(device)
    placed = fused.place(features, batch.samples, by_owner, permutation)
    return with_places(features, placed, by_requester, by_owner, permutation)


def reference_marks(first: list[Requests], second: list[Requests], features: int) -> list[list[tuple[Tensor, Tensor]]]:
    """For both batches and each rank: marks of the owner in lookup order, marks of the requester in wire order."""
    found: list[list[Tensor]] = [[], []]
    for a, b in zip(first, second, strict=True):
        detect = CollisionDetector(features * ROWS, torch.device("cpu"))
        for into, marks in zip(found, detect(a.row_keys, b.row_keys), strict=True):
            into.append(marks)
    return [
        [(marks[rank], _received(requests, marks, rank)) for rank in range(len(requests))]
        for requests, marks in zip((first, second), found, strict=True)
    ]


def _received(requests: list[Requests], marks: list[Tensor], rank: int) -> Tensor:
    parts = []
    for peer in [p for p in range(len(requests)) if p != rank] + [rank]:
        starts, ends = wire_bounds(requests[peer].by_requester, peer)
        parts.append(marks[peer][requests[peer].owner_wire_order][starts[rank] : ends[rank]])
    return torch.cat(parts)


def reference_divide(requests: Requests, marks: tuple[Tensor, Tensor], rank: int) -> DividedIds:
    features, (collides, requested) = requests.features, marks
    offsets = features.offsets()
    orders = split_orders(collides, requested, requests.owner_wire_order, requests.requester_wire_order, offsets)
    bounds = [
        tuple(map(torch.tensor, wire_bounds(counts, rank))) for counts in (requests.by_requester, requests.by_owner)
    ]
    counts: Any = split_counts(
        collides, requested, requests.owner_wire_order, *bounds, offsets[:: features.stride()] if features.keys() else offsets
    )  # fmt: skip
    sizes = [len(requests.by_owner), len(features.keys()), len(features.keys()), len(requests.by_owner)]
    by_requester, by_feature, all_by_feature, by_owner = (part.tolist() for part in counts.split(sizes))
    owned, values = sum(by_requester), features.values()[orders.lookup]
    parts = orders.wire[:owned], orders.wire[owned:]
    values_parts = values[:owned], values[owned:]
    batch = orders.request if requests.batch_position is None else requests.batch_position[orders.request]

    def starts(lengths: Tensor) -> Tensor:
        return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))

    requested = sum(by_owner)
    return DividedIds(
        values_parts,
        parts,
        (inverse_permutation(parts[0]), inverse_permutation(parts[1])),
        (values_parts[0][parts[0]], values_parts[1][parts[1]]),
        (batch[:requested], batch[requested:]),
        inverse_permutation(batch),
        (starts(orders.collisions), starts(features.lengths() - orders.collisions)),
        by_requester,
        by_feature,
        all_by_feature,
        by_owner,
    )


def fused_divide(
    fused: list[FusedIndex], first: list[Requests], second: list[Requests], swap: bool = False
) -> list[list[DividedIds]]:
    """Both batches of each rank, divided by the fused kernels. ``swap`` exchanges two marks on the way."""
    world = len(fused)
    bounds = [index.bounds(a, b) for index, a, b in zip(fused, first, second, strict=True)]
    made = [index.mark(a, b, row) for index, a, b, row in zip(fused, first, second, bounds, strict=True)]
    pairs = []
    for rank in range(world):
        marks, received_from = made[rank][0], len(first[rank].row_keys) + len(second[rank].row_keys)
        place = received_from
        for peer in [p for p in range(world) if p != rank]:
            counts = [a + b for a, b in zip(first[peer].by_requester, second[peer].by_requester, strict=True)]
            start = sum(counts[r] for r in range(rank) if r != peer)
            part = made[peer][1][start : start + counts[rank]]
            marks[place : place + len(part)] = part.flip(0) if swap else part
            place += len(part)
        pairs.append(fused[rank].count(first[rank], second[rank], marks, bounds[rank]))
    divided = [index.divide(a, b, pair) for index, a, b, pair in zip(fused, first, second, pairs, strict=True)]
    return [[batches[number] for batches in divided] for number in range(2)]


def differences(expected: DividedIds, got: DividedIds) -> list[str]:
    """Names of the fields that differ."""
    found = []
    for name, value in vars(expected).items():
        other = getattr(got, name)
        pairs = zip(value, other, strict=True) if isinstance(value, tuple) else [(value, other)]
        equal = all(a.tolist() == b.tolist() if isinstance(a, Tensor) else a == b for a, b in pairs)
        found += [] if equal else [name]
    return found


def check(
    kind: type[FusedIndex],
    world: int,
    features: int,
    longest: int,
    seed: int,
    permuted: bool,
    device: str = "cpu",
    steps: int = 3,
) -> None:
    """Compare all results for consecutive pairs of ``steps`` batches."""
    batches = [draw(world, features, longest, 100 * seed + step, permuted) for step in range(steps)]
    fused = fused_indices(kind, world, features, device)
    expected = [[reference_requests(batch, rank) for rank in range(world)] for batch in batches]
    got = [[fused_requests(fused[rank], batch, rank, device) for rank in range(world)] for batch in batches]
    for ours, theirs in zip(chain(*got), chain(*expected), strict=True):
        for name in ("row_keys", "owner_wire_order", "requester_wire_order", "batch_position"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert (a is None) == (b is None)
            assert a is None or a.tolist() == b.tolist(), name
    for step in range(steps - 1):
        marks = reference_marks(expected[step], expected[step + 1], features)
        divided = fused_divide(fused, got[step], got[step + 1])
        for number in range(2):
            for rank in range(world):
                reference = reference_divide(expected[step + number][rank], marks[number][rank], rank)
                assert not differences(reference, divided[number][rank]), (rank, number, seed)


def check_that_swapped_marks_are_noticed(kind: type[FusedIndex], device: str = "cpu") -> None:
    """The comparison can fail."""
    world, features = 3, 2
    batches = [draw(world, features, 2, seed) for seed in (1, 2)]
    expected = [[reference_requests(batch, rank) for rank in range(world)] for batch in batches]
    fused = fused_indices(kind, world, features, device)
    got = [[fused_requests(fused[rank], batch, rank, device) for rank in range(world)] for batch in batches]
    marks = reference_marks(expected[0], expected[1], features)
    divided = fused_divide(fused, got[0], got[1], swap=True)
    assert any(
        differences(reference_divide(expected[number][rank], marks[number][rank], rank), divided[number][rank])
        for number in range(2)
        for rank in range(world)
    )
