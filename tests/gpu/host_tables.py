"""Compares the two exchanges of tables in host memory, with and without a cache on the GPU.

``test_cluster.py`` starts each rank. Rank 0 prints one JSON line.
"""

from __future__ import annotations

import sys
from typing import Any

from lightning_freescale.embedding.schedule import ExchangeSchedule
from tests.embedding.training import build, build_bags
from tests.gpu.exchange_comparison import ACCUMULATED, Case, Sabotage, do_not_wait_for_compute, run

CACHED: dict[str, Any] = {"kernel": "fused_uvm_caching"}
UNCACHED: dict[str, Any] = {"kernel": "fused_uvm"}
ROWS: list[Case] = [
    *(("row_wise", optimizer, CACHED) for optimizer in ("rowwise_adagrad", "sgd", "adam")),
    ("mixed", "rowwise_adagrad", CACHED),
    ("table_wise", "rowwise_adagrad", CACHED),
    ("row_wise", "rowwise_adagrad", UNCACHED),
    ("row_wise", "rowwise_adagrad", CACHED | ACCUMULATED),
]
BAGS: list[Case] = [("both", optimizer, CACHED) for optimizer in ("rowwise_adagrad", "adam")]


def read_past_the_cache(schedule: ExchangeSchedule) -> None:
    """Rows that the cache holds then have the values that they had when they came into it."""
    tables = schedule.modules[0].exchange.tables
    tables.cached = [False] * len(tables.cached)


if __name__ == "__main__":
    controls: dict[str, tuple[Case, Sabotage]] = {"unordered": (("row_wise", "sgd", CACHED), do_not_wait_for_compute)}
    if sys.argv[2:] == ["bags"]:
        run(build_bags, BAGS, {"unordered": (("both", "sgd", CACHED), do_not_wait_for_compute)}, longest=4)
    else:
        run(build, ROWS, controls | {"past_the_cache": (("row_wise", "sgd", CACHED), read_past_the_cache)}, longest=40)
