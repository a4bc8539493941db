"""GPU checks of the transport, one process per rank.

It needs torch, lightning-utilities and the built C++ core (see build_core.sh).

gpu_cluster.py starts it, and so can anything that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Every scenario prints one
line per rank. The first failure ends the rank. A scenario that takes too long prints all stacks and ends the process.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.harness.gpu_cluster.bare_ranks import GpuRank, time_limit
from tests.transport import gpu_exchanges, gpu_proof, gpu_semantics
from tests.transport.gpu_package import transport

SCENARIOS: dict[str, Callable[[GpuRank, Any], str]] = {
    "dtypes": gpu_exchanges.dtypes,
    "exact": gpu_exchanges.exact,
    "early_flag": gpu_exchanges.early_flag,
    "host_goes_on": gpu_semantics.host_goes_on,
    "dropped": gpu_semantics.dropped,
    "priorities": gpu_semantics.priorities,
    "proof": gpu_proof.proof,
    "profile": gpu_proof.profile,
    "hosts": gpu_exchanges.hosts,
    "timeout": gpu_semantics.timeout,
    "death": gpu_semantics.death,  # must be the last one, because it ends a rank
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="+", choices=SCENARIOS)
    parser.add_argument("--exchanges", type=int, default=10_000, help="number of random exchanges")
    parser.add_argument("--limit", type=float, default=90, help="seconds that one scenario may take")
    args = parser.parse_args()
    with time_limit(60):
        cluster = GpuRank()
    if cluster.rank == 0:
        print(f"torch {torch.__version__}, {cluster.world} ranks, {transport.capabilities()}", flush=True)
    for name in args.scenarios:
        began = time.monotonic()
        try:
            with time_limit(args.limit):
                result = SCENARIOS[name](cluster, args)
        except Exception:
            print(f"rank {cluster.rank} {name}: FAILED\n{traceback.format_exc()}", flush=True)
            os._exit(1)  # at once: gpu_cluster.py then ends the other ranks
        print(f"rank {cluster.rank} {name}: ok, {result} [{time.monotonic() - began:.1f} s]", flush=True)
    os._exit(0)  # after "death" a regular end would wait for the dead rank


if __name__ == "__main__":
    main()
