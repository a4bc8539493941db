"""Collision detection and the index arithmetic around it, against plain Python."""

from __future__ import annotations

import doctest
import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_freescale.embedding import collisions
from lightning_freescale.embedding.collisions import (
    CollisionDetector,
    held_between,
    masked_lengths,
    partition,
    place_within,
)
from lightning_freescale.embedding.stages import own_last, wire_bounds

KEYS = st.lists(st.integers(0, 19), max_size=30)
MASKS = st.lists(st.booleans(), max_size=30)


@given(st.lists(st.tuples(KEYS, KEYS), min_size=1, max_size=4))
def test_detector(pairs: list[tuple[list[int], list[int]]]) -> None:
    detector = CollisionDetector(20, torch.device("cpu"))
    for first, second in pairs:  # one detector for all: what it set must be cleared
        a, b = detector(torch.tensor(first, dtype=torch.int64), torch.tensor(second, dtype=torch.int64))
        assert a.tolist() == [key in set(second) for key in first]
        assert b.tolist() == [key in set(first) for key in second]


@given(MASKS)
def test_partition_and_place(values: list[bool]) -> None:
    mask = torch.tensor(values, dtype=torch.bool)
    expected = [i for i, held in enumerate(values) if held] + [i for i, held in enumerate(values) if not held]
    assert partition(mask).tolist() == expected
    assert place_within(mask).tolist() == [values[:i].count(held) for i, held in enumerate(values)]


@given(MASKS, st.lists(st.integers(0, 30), max_size=6))
def test_masked_lengths(values: list[bool], cuts: list[int]) -> None:
    mask = torch.tensor(values, dtype=torch.bool)
    offsets = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    got = masked_lengths(mask, torch.tensor(offsets))
    assert got.tolist() == [sum(values[a:b]) for a, b in itertools.pairwise(offsets)]


@given(MASKS, st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6))
def test_held_between(values: list[bool], pairs: list[tuple[int, int]]) -> None:
    spans = [sorted(min(end, len(values)) for end in pair) for pair in pairs]
    starts, ends = (torch.tensor([span[side] for span in spans], dtype=torch.int64) for side in (0, 1))
    got = held_between(torch.tensor(values, dtype=torch.bool), starts, ends)
    assert got.tolist() == [sum(values[a:b]) for a, b in spans]


def test_examples() -> None:
    assert doctest.testmod(collisions).failed == 0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.data())
def test_wire_bounds(counts: list[int], data: st.DataObject) -> None:
    """Against the wire order itself."""
    rank = data.draw(st.integers(0, len(counts) - 1))
    ranks = torch.tensor([peer for peer, count in enumerate(counts) for _ in range(count)], dtype=torch.int64)
    wire = own_last(ranks, counts, rank).tolist()
    bounds = wire_bounds(counts, rank)
    starts, ends = bounds[: len(counts)], bounds[len(counts) :]
    for peer, (start, end) in enumerate(zip(starts, ends, strict=True)):
        assert wire[start:end] == [peer] * counts[peer]
