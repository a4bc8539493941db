"""The best items of a divided catalogue: equal to a full sort, on one rank and on several."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist

from lightning_freescale.models import top_k as top
from tests.models.interpreter import run_interpreted
from tests.ranks import run_ranks


def by_sorting(queries: torch.Tensor, items: torch.Tensor, k: int, left_out: list[list[int]]) -> list[list[int]]:
    """Rows of the best items: by score, then by row."""
    found = []
    for query, rows in zip(queries, left_out, strict=True):
        scores = (items @ query).tolist()
        order = sorted((-score, row) for row, score in enumerate(scores) if row not in rows)
        found.append([row for _, row in order][:k])
    return [rows + [-1] * (k - len(rows)) for rows in found]


def integers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Small whole numbers: products are exact in every order of summation, and many scores are equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def make_jagged(rows: list[list[int]]) -> top.JaggedRows:
    lengths, values = [len(part) for part in rows], [row for part in rows for row in part]
    return top.JaggedRows(*(torch.tensor(numbers, dtype=torch.int64) for numbers in (lengths, values)))


@hypothesis.given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 40), st.integers(1, 12), st.integers(1, 7))
@hypothesis.settings(max_examples=60, deadline=None)
def test_one_rank_equals_a_full_sort(seed: int, queries: int, items: int, k: int, chunk: int) -> None:
    k = min(k, items)
    query, item = integers((queries, 3), seed), integers((items, 3), seed + 1)
    rows = [torch.randperm(items)[: seed % (items + 1)].tolist() for _ in range(queries)]
    before, top.SCORES_AT_A_TIME = top.SCORES_AT_A_TIME, chunk * queries
    try:
        found = top.top_k(query, item, items, k, make_jagged(rows))
    finally:
        top.SCORES_AT_A_TIME = before
    assert found.rows.tolist() == by_sorting(query, item, k, rows)
    scores = query @ item.T
    for at, ranked in enumerate(found.rows.tolist()):
        assert all(found.scores[at, n] == (scores[at, row] if row >= 0 else -torch.inf) for n, row in enumerate(ranked))


def test_keys_keep_every_score_and_nan_comes_last() -> None:
    scores = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 3.5, -3.5, torch.inf, -torch.inf, torch.nan])
    keys = top.sort_keys(scores, torch.arange(9))
    assert top.from_keys(keys.sort(descending=True).values).rows.tolist() == [6, 4, 2, 0, 1, 3, 5, -1, -1]
    back = top.from_keys(keys)
    assert torch.equal(back.scores[:7], scores[:7])
    assert back.scores[7:].tolist() == [-torch.inf] * 2


def odd_scores(queries: int, items: int) -> torch.Tensor:
    """Many equal scores, and some that are NaN, -0 or infinite."""
    scores = integers((queries, items), items)
    odd = torch.tensor([torch.nan, -0.0, torch.inf, -torch.inf, 1e-40, -1e-40])
    places = torch.randint(items, (queries, len(odd)), generator=torch.Generator().manual_seed(1))
    return scores.scatter_(1, places, odd.expand(queries, -1).clone())


SHAPES = ((3, 1, 1), (2, 7, 10), (3, 40, 5), (1, 700, 3), (2, 300, 1))  # queries, items, k
SCRIPT = """
import torch
from lightning_freescale.models import top_k, top_k_triton
from tests.models.test_top_k import SHAPES, odd_scores

top_k_triton.TILE = 64  # several tiles, and several rounds
for queries, items, k in SHAPES:
    scores = odd_scores(queries, items)
    want = top_k.best_keys(scores, 5, k)
    got = top_k_triton.best_keys(scores, 5, k)
    assert torch.equal(got, want), (items, k)
    for ours, theirs in zip(top_k_triton.decode(got), top_k.from_keys(want), strict=True):
        assert torch.equal(ours, theirs), (items, k)
    assert not torch.equal(top_k_triton.best_keys(scores, 6, k), want)  # negative control: other rows
top_k_triton.TILE = 1024
assert torch.equal(top_k_triton.best_keys(scores, 5, k), want)
assert top_k_triton.best_keys(scores[:0], 5, k).shape == (0, k)
"""


def test_interpreted_kernels_equal_the_operations() -> None:
    run_interpreted(SCRIPT)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (32, 100_000, 10), (1, 100_000, 64), (2, 5000, 65)])
def test_compiled_kernels_equal_the_operations(shape: tuple[int, int, int]) -> None:
    """A ``k`` of 65 is left to PyTorch."""
    queries, items, k = shape
    scores = odd_scores(queries, items)
    want, got = top.best_keys(scores, 5, k), top.best_keys(scores.cuda(), 5, k)
    assert torch.equal(got.cpu(), want)
    assert all(torch.equal(x.cpu(), y) for x, y in zip(top.from_keys(got), top.from_keys(want), strict=True))
    assert not torch.equal(top.best_keys(scores.cuda(), 6, k).cpu(), want)  # negative control: other rows


NUM_ITEMS, K = 23, 5


def on_ranks(rank: int, world: int, ignore_left_out: bool) -> list[list[list[int]]]:
    dist.init_process_group("gloo")
    items = integers((NUM_ITEMS, 3), 7)
    own = top.part_of(rank, world, NUM_ITEMS)
    found = []
    for seed in range(4):
        queries, rows = integers((rank + seed % 3, 3), seed + rank), [[seed, 7 + rank]] * (rank + seed % 3)
        left_out = None if ignore_left_out else make_jagged(rows)
        ranked = top.top_k(queries, items[own.start : own.stop], NUM_ITEMS, K, left_out).rows.tolist()
        found.append([ranked, by_sorting(queries, items, K, rows)])
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_several_ranks_equal_a_full_sort(world: int) -> None:
    """Ranks have different numbers of queries, and sometimes none."""
    for found in run_ranks(on_ranks, world, (world, False)):
        assert all(ours == expected for ours, expected in found)


def test_the_comparison_sees_items_that_are_not_left_out() -> None:
    assert any(ours != expected for found in run_ranks(on_ranks, 2, (2, True)) for ours, expected in found)
