"""The collision detector, against plain Python."""

from __future__ import annotations

import doctest

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_freescale.embedding import collisions
from lightning_freescale.embedding.collisions import CollisionDetector

KEYS = st.lists(st.integers(0, 19), max_size=30)


@given(st.lists(st.tuples(KEYS, KEYS), min_size=1, max_size=4))
def test_detector(pairs: list[tuple[list[int], list[int]]]) -> None:
    detector = CollisionDetector(20, torch.device("cpu"))
    for first, second in pairs:  # the same detector for all pairs: it must clear the flags that it has set
        a, b = detector(torch.tensor(first, dtype=torch.int64), torch.tensor(second, dtype=torch.int64))
        assert a.tolist() == [key in set(second) for key in first]
        assert b.tolist() == [key in set(first) for key in second]


def test_examples() -> None:
    result = doctest.testmod(collisions)
    assert result.attempted > 0
    assert result.failed == 0
