"""Compares the prioritized exchange of bags with the synchronous one on a GPU.

``test_cluster.py`` starts each rank. Rank 0 prints one JSON line.
"""

from __future__ import annotations

from typing import Any

from torchrec import PoolingType

from tests.embedding.training import BAG_SHARDINGS, build_bags
from tests.gpu.exchange_comparison import ACCUMULATED, Case, do_not_wait_for_compute, run

MEAN: dict[str, Any] = {"pooling": PoolingType.MEAN}
WEIGHTED: dict[str, Any] = {"weighted": True}
CASES: list[Case] = [
    *((kind, "rowwise_adagrad", {}) for kind in BAG_SHARDINGS),
    *((kind, "rowwise_adagrad", MEAN) for kind in ("table_wise", "column_wise", "row_wise")),
    *(("both", optimizer, options) for optimizer in ("sgd", "adam") for options in ({}, MEAN, WEIGHTED)),
    ("table_wise", "rowwise_adagrad", WEIGHTED),
    ("row_wise", "adam", WEIGHTED),
    ("both", "rowwise_adagrad", ACCUMULATED),
    ("row_wise", "sgd", WEIGHTED | ACCUMULATED),
]

if __name__ == "__main__":
    run(build_bags, CASES, {"unordered": (("table_wise", "sgd", {}), do_not_wait_for_compute)}, longest=4)
