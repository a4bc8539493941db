"""Compares the two exchanges with the optimizers of the tables that keep moments of the gradients, which need a GPU.

``test_cluster.py`` starts each rank. Rank 0 prints one JSON line.
"""

from __future__ import annotations

from lightning_freescale.embedding.table_optimizer import MOMENT_OPTIMIZERS
from tests.embedding.training import DECAYED, build
from tests.gpu.exchange_comparison import Case, do_not_wait_for_compute, run

CASES: list[Case] = [
    (kind, f"{decayed}{optimizer}", {})
    for kind, decayed in (("mixed", ""), ("row_wise", DECAYED))
    for optimizer in MOMENT_OPTIMIZERS
]

if __name__ == "__main__":
    run(build, CASES, {"unordered": (("row_wise", "lamb", {}), do_not_wait_for_compute)}, longest=40)
