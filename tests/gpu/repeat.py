"""``python -m tests.gpu.repeat --seconds 80``: trains HSTU repeatedly on clusters that share a GPU, to find trainings that hang.

Each cluster has SMs of its own, and trains over the given exchanges in turn, in the same processes. A rank that makes no progress
prints what it waits for. The command prints how many trainings each cluster has completed, and fails if one has hung.

``--share 25`` limits the number of SMs instead, so that ranks share SMs. Then trainings can hang, and so can ``--plain``, which
trains nothing and uses PyTorch alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.harness.gpu_cluster import launcher
from benchmarks.harness.gpu_cluster.mps import server_log
from benchmarks.harness.gpu_cluster.rank_process import ClusterFailed
from lightning_freescale.transport.groups import NCCL_CTAS
from tests.gpu import hstu, plain_nccl
from tests.gpu.clusters import one_daemon

STEPS = 40  # of a training
EXCHANGES = ("synchronous", "nccl", "host", "nccl, 1 CTA")
LATER_STALL_SECONDS = 15.0  # after the first training, when all kernels are compiled
PLAIN_STALL_SECONDS = 30.0  # with --plain
EXTRA_SECONDS = 240.0  # for imports and the first training
MOST_PRINTED = 3000  # characters about a cluster


def trainings(exchanges: Sequence[str], graphs: bool, seconds: float, folder: str) -> Iterator[int]:
    """Train until the time is over on rank 0. Yields the number of completed trainings."""
    watch = hstu.start_watch()
    end = time.monotonic() + seconds
    for number, exchange in enumerate(cycle(exchanges), start=1):
        transport, _, limited = exchange.partition(", ")
        os.environ.pop(NCCL_CTAS, None)
        if limited:
            os.environ[NCCL_CTAS] = "1"
        prioritize = exchange != "synchronous"
        hstu.fit(prioritize, STEPS, "adam", folder, transport if prioritize else "nccl", watch, graphs)
        watch.limit(LATER_STALL_SECONDS)
        yield number
        over = torch.tensor([float(time.monotonic() > end)], device="cuda")
        dist.broadcast(over, 0)
        if over.item():
            return


def run_rank(arguments: argparse.Namespace) -> None:
    if arguments.plain:
        watch = hstu.start_watch()
        watch.limit(PLAIN_STALL_SECONDS)
        print(f"DONE {plain_nccl.train(arguments.seconds, watch)} steps", flush=True)
        return
    for number in trainings(arguments.exchanges, not arguments.no_graphs, arguments.seconds, os.environ["FOLDER"]):
        print(f"DONE {number} trainings", flush=True)


def run_cluster(number: int, arguments: argparse.Namespace, env: dict[str, str]) -> str:
    """Run one cluster. Returns what is to be printed; it contains FAILED if a rank has failed."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            outputs = launcher.run(
                arguments.ranks,
                ["-m", "tests.gpu.repeat", *arguments.given],
                arguments.seconds + EXTRA_SECONDS,
                share=arguments.share,
                sms=(number, arguments.clusters),
                env=env | {"FOLDER": folder},
            )
        except ClusterFailed as failure:
            return f"cluster {number} FAILED: {failure}"
    return f"cluster {number}: {[line for line in outputs[0].splitlines() if line.startswith('DONE')][-1]}"


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=80.0, help="how long each cluster trains (default 80)")
    parser.add_argument("--clusters", type=int, default=2, help="clusters at the same time (default 2)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of a cluster (default 4)")
    parser.add_argument("--exchanges", nargs="+", choices=EXCHANGES, default=EXCHANGES, help="in turn; default: all")
    parser.add_argument("--no-graphs", action="store_true", help="run the layers without CUDA graphs")
    parser.add_argument("--share", type=int, help="limit each rank to this percentage of the SMs, and reserve none")
    parser.add_argument("--plain", action="store_true", help="only use NCCL and matrix products of PyTorch")
    parser.add_argument("--output", type=Path, help="a folder for the whole output of each cluster")
    arguments = parser.parse_args(given)
    arguments.given = list(given)
    if "RANK" in os.environ:
        run_rank(arguments)
        return 0
    with one_daemon() as env, ThreadPoolExecutor(arguments.clusters) as pool:
        texts = list(pool.map(lambda number: run_cluster(number, arguments, env), range(arguments.clusters)))
        log = server_log(env) if env else ""
    for number, text in enumerate(texts):
        if arguments.output is not None:
            (arguments.output / f"cluster-{number}.txt").write_text(text)
        print(text[:MOST_PRINTED])
    failed = any("FAILED" in text for text in texts)
    if failed:
        print(f"the log of the MPS servers:\n{log}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
