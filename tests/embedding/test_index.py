"""The index arithmetic of the prioritized exchange, against plain Python."""

from __future__ import annotations

import doctest
import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_freescale.embedding import index
from lightning_freescale.embedding.index import (
    count_true_between,
    count_true_by_segment,
    feature_and_requester,
    inverse_permutation,
    own_rank_last,
    position_among_equals,
    split_counts,
    split_orders,
    true_first,
    wire_bounds,
)

MASKS = st.lists(st.booleans(), max_size=30)
COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@given(MASKS)
def test_true_first_and_position_among_equals(values: list[bool]) -> None:
    mask = torch.tensor(values, dtype=torch.bool)
    expected = [i for i, value in enumerate(values) if value] + [i for i, value in enumerate(values) if not value]
    assert true_first(mask).tolist() == expected
    assert position_among_equals(mask).tolist() == [values[:i].count(value) for i, value in enumerate(values)]


@given(MASKS, st.lists(st.integers(0, 30), max_size=6))
def test_count_true_by_segment(values: list[bool], cuts: list[int]) -> None:
    mask = torch.tensor(values, dtype=torch.bool)
    offsets = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    got = count_true_by_segment(mask, torch.tensor(offsets))
    assert got.tolist() == [sum(values[a:b]) for a, b in itertools.pairwise(offsets)]


@given(MASKS, st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6))
def test_count_true_between(values: list[bool], pairs: list[tuple[int, int]]) -> None:
    spans = [sorted(min(end, len(values)) for end in pair) for pair in pairs]
    starts, ends = (torch.tensor([span[side] for span in spans], dtype=torch.int64) for side in (0, 1))
    got = count_true_between(torch.tensor(values, dtype=torch.bool), starts, ends)
    assert got.tolist() == [sum(values[a:b]) for a, b in spans]


@given(st.permutations(range(12)))
def test_inverse_permutation(order: list[int]) -> None:
    inverse = inverse_permutation(torch.tensor(order))
    assert inverse.tolist() == [order.index(i) for i in range(12)]


@given(COUNTS, st.data())
def test_own_rank_last_and_wire_bounds(counts: list[int], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(counts) - 1))
    ranks = torch.tensor([peer for peer, count in enumerate(counts) for _ in range(count)], dtype=torch.int64)
    wire = own_rank_last(ranks, counts, rank).tolist()
    assert wire == [peer for peer in ranks.tolist() if peer != rank] + [rank] * counts[rank]
    starts, ends = wire_bounds(counts, rank)
    for peer, (start, end) in enumerate(zip(starts, ends, strict=True)):
        assert wire[start:end] == [peer] * counts[peer]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 3), st.data())
def test_feature_and_requester(samples: list[int], features: int, data: st.DataObject) -> None:
    num_samples = sum(samples)
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=features * num_samples, max_size=features * num_samples))
    requester_of_sample = [rank for rank, count in enumerate(samples) for _ in range(count)]
    expected = [
        (feature, requester_of_sample[sample])
        for feature in range(features)
        for sample in range(num_samples)
        for _ in range(lengths[feature * num_samples + sample])
    ]
    got = feature_and_requester(
        torch.tensor(lengths, dtype=torch.int64), torch.tensor(samples), num_samples, sum(lengths)
    )
    assert list(zip(*(part.tolist() for part in got), strict=True)) == expected


@given(COUNTS, COUNTS, st.data())
def test_split_of_a_batch(owned: list[int], requested: list[int], data: st.DataObject) -> None:
    """Orders and counts of both parts, for an owner of one feature with one sample of each requester."""
    world = min(len(owned), len(requested))
    owned, requested = owned[:world], requested[:world]
    rank = data.draw(st.integers(0, world - 1))
    collides, requested_collides = (
        data.draw(st.lists(st.booleans(), min_size=sum(counts), max_size=sum(counts))) for counts in (owned, requested)
    )
    owner_wire_order, requester_wire_order = (
        own_rank_last(torch.arange(sum(counts)), counts, rank) for counts in (owned, requested)
    )
    offsets = torch.tensor([0, *itertools.accumulate(owned)])
    masks = torch.tensor(collides, dtype=torch.bool), torch.tensor(requested_collides, dtype=torch.bool)
    orders = split_orders(*masks, owner_wire_order, requester_wire_order, offsets)
    owner_bounds, requester_bounds = (
        (torch.tensor(starts), torch.tensor(ends))
        for starts, ends in (wire_bounds(c, rank) for c in (owned, requested))
    )
    counts = split_counts(*masks, owner_wire_order, owner_bounds, requester_bounds, offsets[[0, -1]]).tolist()
    by_requester, by_feature, all_by_feature, by_owner = counts[:world], *counts[world : world + 2], counts[world + 2 :]

    requester_of_row = [peer for peer, count in enumerate(owned) for _ in range(count)]
    assert by_requester == [
        sum(mark for mark, peer in zip(collides, requester_of_row, strict=True) if peer == p) for p in range(world)
    ]
    assert (by_feature, all_by_feature) == (sum(collides), sum(owned))
    assert by_owner == [
        sum(requested_collides[start:end]) for start, end in zip(*wire_bounds(requested, rank), strict=True)
    ]
    assert orders.collisions.tolist() == by_requester

    # Both parts list every row once, the collision rows in front; the wire order picks them from their own part.
    split, wire = sum(collides), owner_wire_order.tolist()
    for part, wanted in ((slice(0, split), True), (slice(split, None), False)):
        rows = orders.lookup[part].tolist()
        assert rows == [row for row, mark in enumerate(collides) if mark is wanted]
        assert [rows[place] for place in orders.wire[part]] == [row for row in wire if collides[row] is wanted]
    pairs = list(zip(requester_wire_order.tolist(), requested_collides, strict=True))
    assert orders.request.tolist() == [row for row, mark in pairs if mark] + [row for row, mark in pairs if not mark]


def test_examples() -> None:
    result = doctest.testmod(index)
    assert result.attempted > 10
    assert result.failed == 0
