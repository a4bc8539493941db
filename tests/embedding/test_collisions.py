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
    count_by,
    masked_lengths,
    partition,
    place_within,
)

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


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=30))
def test_count_by(pairs: list[tuple[int, bool]]) -> None:
    labels = torch.tensor([label for label, _ in pairs], dtype=torch.int64)
    mask = torch.tensor([held for _, held in pairs], dtype=torch.bool)
    assert count_by(labels, mask, 5).tolist() == [sum(h for label, h in pairs if label == k) for k in range(5)]


def test_examples() -> None:
    assert doctest.testmod(collisions).failed == 0
