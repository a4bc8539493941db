"""The benchmark of the index work compares both implementations before it measures them."""

from __future__ import annotations

import pytest
import torch

from benchmarks import exchange_index
from benchmarks.exchange_index import RankInCluster, measure, with_fused, with_operators
from lightning_freescale.embedding.cpp_index import CppIndex

CPU = torch.device("cpu")


@pytest.mark.parametrize("ranks", [2, 7])
def test_both_give_the_same(ranks: int) -> None:
    rank = RankInCluster(ranks, 300, 200, CPU)
    index = CppIndex(rank.rows, rank.first_key, 0, ranks)
    expected = with_operators(rank)
    assert all(torch.equal(a, b) for a, b in zip(with_fused(rank, index), expected, strict=True))
    rank.received = 1 - rank.received  # the comparison can fail
    assert not all(torch.equal(a, b) for a, b in zip(with_fused(rank, index), expected, strict=True))


def test_it_measures() -> None:
    seen: list[int] = []
    assert measure(lambda: seen.append(1), CPU, repeats=3)["CPU ms"] >= 0
    assert len(seen) == 4
    assert exchange_index.parse(["--ranks", "3"]).ranks == [3]
