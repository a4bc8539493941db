"""Compares the prioritized exchange of rows with the synchronous one on a GPU.

``test_cluster.py`` starts each rank. Rank 0 prints one JSON line.
"""

from __future__ import annotations

from lightning_freescale.embedding.wire import parse_wire, torchrec_codecs
from tests.embedding.training import SHARDINGS, build
from tests.gpu.exchange_comparison import ACCUMULATED, Case, Sabotage, do_not_wait_for_compute, run

BFLOAT16 = torchrec_codecs(parse_wire("bfloat16"))
CASES: list[Case] = [
    *((kind, "rowwise_adagrad", {}) for kind in SHARDINGS),
    *(("row_wise", optimizer, {}) for optimizer in ("sgd", "adagrad", "adam")),
    ("mixed", "adam", {}),
    *((kind, "rowwise_adagrad", {"use_index_dedup": True}) for kind in ("row_wise", "mixed")),
    *((kind, "rowwise_adagrad", {"qcomm_codecs_registry": BFLOAT16}) for kind in ("row_wise", "mixed")),
    ("row_wise", "rowwise_adagrad", ACCUMULATED),
    ("mixed", "adam", ACCUMULATED),
]
CONTROLS: dict[str, tuple[Case, Sabotage]] = {
    "unordered": (("row_wise", "sgd", {}), do_not_wait_for_compute),
    "unordered_micro_batches": (("row_wise", "sgd", ACCUMULATED), do_not_wait_for_compute),
}

if __name__ == "__main__":
    run(build, CASES, CONTROLS, longest=40)
