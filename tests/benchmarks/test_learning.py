"""``benchmarks.learning``: every variant trains, and the defaults learn faster than the earlier defaults."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import learning
from tests.ranks import run_ranks


def train_all(rank: int) -> dict[str, list[dict[str, Any]]]:
    arguments = learning.parse(["--quick"])
    return {variant: learning.train(arguments, variant, seed=0) for variant in learning.LEARNING_VARIANTS}


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, Any]]]:
    (found,) = run_ranks(train_all, world=1)
    return found


def test_every_variant_has_a_row_for_each_epoch(rows: dict[str, list[dict[str, Any]]]) -> None:
    for found in rows.values():
        assert [row["epoch"] for row in found] == [1, 2]
        assert all(0 <= row[metric] <= 1 for row in found for metric in learning.LOGGED)


def test_the_defaults_learn_faster_than_the_earlier_ones(rows: dict[str, list[dict[str, Any]]]) -> None:
    earlier = rows["earlier"][-1]["NDCG@10"]
    assert min(rows[variant][-1]["NDCG@10"] for variant in ("relative", "input", "dropout")) > 5 * earlier
