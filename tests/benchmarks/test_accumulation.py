"""``benchmarks.accumulation`` on its emulated machine. Time is virtual, so the figures are exact and can be tested."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import accumulation
from benchmarks.harness.variant_names import COMPUTE_ONLY, PRIORITIZED, SYNC
from tests.ranks import run_ranks


def figures_of(rank: int) -> dict[str, Any]:
    return accumulation.measure(accumulation.parse(["--quick", "--ranks", "2", "--device", "cpu"]))


@pytest.mark.slow
def test_micro_batches_on_the_emulated_machine() -> None:
    first, second = run_ranks(figures_of)
    assert first == second  # the result is the same on every rank
    assert first["losses_apart"] == {"1": 0.0, "4": 0.0}
    one, four = first["exposed"]
    name = f"{PRIORITIZED} exposed ms"
    assert [row["micro-batches"] for row in (one, four)] == [1, 4]
    # TorchRec exchanges in every micro-batch. The prioritized exchange of collisions is exposed once for each window.
    assert four[f"{SYNC} exposed ms"] == pytest.approx(one[f"{SYNC} exposed ms"], rel=0.01)
    assert 0 < one[name] < 0.15 * one[f"{SYNC} exposed ms"]
    assert 0 < four[name] < 0.15 * four[f"{SYNC} exposed ms"]
    assert four["compute ms"] < one["compute ms"]  # the dense layers are updated once for each window


def test_summary() -> None:
    times = {(COMPUTE_ONLY, 2): [10.0, 20.0], (SYNC, 2): [30.0, 42.0], (PRIORITIZED, 2): [11.0, 22.0]}
    (row,) = accumulation.summarize(times, (2,))
    assert row[f"{SYNC} exposed ms"] == 21.0
    assert row[f"{PRIORITIZED} exposed ms"] == 1.5
    assert row["removed %"] == pytest.approx(100 * (1 - 1.5 / 21))
