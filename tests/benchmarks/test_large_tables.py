"""The benchmark of tables in host memory: its ids, the rows that fill its cache, and its table."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks import large_tables
from benchmarks.harness.power_law import PowerLawWorkload
from benchmarks.harness.tables import large_tables_block
from benchmarks.large_tables import BEHIND_CACHE, ON_DEVICE, PRIORITIZED_MODE, SYNCHRONOUS
from lightning_freescale.embedding.table_optimizer import kernels_of
from tests.embedding.training import build
from tests.ranks import run_ranks

ROWS = 10_007
WORKLOAD = PowerLawWorkload(400, 4.0, 0.5, 400, ROWS, 8, skew=0.8)


def test_ids_follow_the_power_law() -> None:
    ids = WORKLOAD.ids(0, 0, 2, 0.0)
    all_ids = WORKLOAD.id_of(torch.arange(ROWS))
    assert all_ids.sort().values.tolist() == list(range(ROWS))  # each row has one popularity
    popularity = torch.empty_like(all_ids)
    popularity[all_ids] = torch.arange(ROWS)
    for share in (0.01, 0.05, 0.3):
        drawn = float((popularity[ids] < share * ROWS).float().mean())
        assert drawn == pytest.approx(share**0.2, abs=0.02)
    assert not torch.equal(ids, WORKLOAD.ids(0, 1, 2, 0.0))


def rows_in_the_cache(rank: int) -> list[int]:
    """The rows of one table that the benchmark looks up, to fill the cache of this rank."""
    dist.init_process_group("gloo")
    kernel = kernels_of(build("row_wise", "sgd", 2))[0]
    asked: list[int] = []

    def look_up(ids: torch.Tensor, offsets: torch.Tensor) -> None:
        assert offsets.tolist() == [0, len(ids)]
        asked.extend((ids + rank * 20).tolist())

    kernel.forward = look_up  # type: ignore[method-assign]
    large_tables.fill_cache(kernel, PowerLawWorkload(1, 1.0, 1.0, 1, 40, 8), 2, 30)
    return asked


def test_the_cache_is_filled_with_the_most_popular_rows() -> None:
    by_rank = run_ranks(rows_in_the_cache)
    expected = PowerLawWorkload(1, 1.0, 1.0, 1, 40, 8).id_of(torch.arange(29, -1, -1)).tolist()
    assert sorted(by_rank[0] + by_rank[1]) == sorted(expected)
    for rank, asked in enumerate(by_rank):
        assert asked == [row for row in expected if row // 20 == rank]  # the most popular ones last


def test_bubbles_are_taken_within_a_round() -> None:
    rounds = [
        {
            "dense": dense,
            f"{BEHIND_CACHE}, {PRIORITIZED_MODE}": {"step ms": step, "hits": 0.5, "rows from host memory": 7.0},
            f"{ON_DEVICE}, {SYNCHRONOUS}": {"step ms": 12.0},
        }
        for dense, step in ((10.0, 11.0), (8.0, 12.0))
    ]
    on_gpu, behind_cache = large_tables.summarize(rounds)
    assert (on_gpu["tables"], on_gpu["bubble ms"], on_gpu["hits"]) == (ON_DEVICE, 3.0, None)
    assert (behind_cache["bubble ms by round"], behind_cache["hits"]) == ([1.0, 4.0], 0.5)


def test_the_table_of_the_page() -> None:
    rows = large_tables.summarize(
        [
            {
                "dense": 10.0,
                f"{ON_DEVICE}, {SYNCHRONOUS}": {"step ms": 12.0},
                f"{BEHIND_CACHE}, {PRIORITIZED_MODE}": {"step ms": 14.0, "hits": 0.5, "rows from host memory": 7000.0},
            }
        ]
    )
    found = {
        "benchmark": "large_tables",
        "command": "python -m benchmarks.large_tables",
        "date": "2026-01-01T00:00:00",
        "machine": "2 cores (aarch64)",
        "parameters": {"ranks": 2, "gigabytes": 60.0, "cache": 0.05, "rounds": 1},
        "workload": {"rows": ROWS, "dim": 8, "ids_per_rank": 5},
        "collisions": 0.25,
        "dense_ms": [10.0],
        "step_times": rows,
    }
    text = large_tables_block.block({"made_up": found})
    assert "| on the device | synchronous | 12.0 (12.0 to 12.0) | 2.0 (2.0 to 2.0) |  |  |" in text
    assert "| 14.0 (14.0 to 14.0) | 4.0 (4.0 to 4.0) | 50.0% | 7,000 |" in text
    assert large_tables_block.block({}) == "No result is stored yet."


def test_options() -> None:
    assert large_tables.parse(["--device", "cuda"]).gigabytes == 60
    for wrong in (["--skew", "1"], ["--cache", "0"]):
        with pytest.raises(SystemExit):
            large_tables.parse(wrong)
