"""Starts the same command on every rank of a cluster, on one GPU or on the CPU.

Every rank gets the variables that Lightning and torch's ``env://`` rendezvous read: RANK, NODE_RANK, WORLD_SIZE,
LOCAL_RANK=0, LOCAL_WORLD_SIZE=1, MASTER_ADDR and MASTER_PORT. ``same_host`` leaves out ``NCCL_HOSTID``, for transports
that share host memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness.free_ports import free_port
from benchmarks.harness.gpu_cluster.mps import mps
from benchmarks.harness.gpu_cluster.rank_process import ClusterFailed, RankProcess, end_all, wait_for_all
from benchmarks.harness.gpu_cluster.reserved_sms import PART, build_library

ROOT = Path(__file__).resolve().parents[3]  # of the repository; the ranks import from it


def run(
    ranks: int,
    argv: Sequence[str],
    timeout: float = 600.0,
    *,
    same_host: bool = False,
    gpu: bool | None = None,
    share: int | None = None,
    sms: tuple[int, int] = (0, 1),
    clusters: int = 1,
    env: Mapping[str, str] | None = None,
    echo: bool = False,
) -> list[str]:
    """Run ``python *argv`` on every rank and return the output of each rank (stdout and stderr together).

    Args:
        timeout: seconds after which all ranks are ended.
        same_host: do not set ``NCCL_HOSTID``; NCCL then sees that the ranks share a machine.
        gpu: share the GPU through MPS, with SMs that are reserved for each rank. Default: yes if there is a GPU.
        share: limit the number of SMs of each rank to this percentage, and reserve none. For measurements only: kernels of
            NCCL then wait on SMs that other ranks need, and the ranks may wait for one another without end.
        sms: which part of the SMs the cluster gets, and how many parts there are. Clusters with different parts of as many can
            run at the same time. The default is all SMs.
        clusters: start this many clusters of ``ranks`` ranks at the same time, on the same SMs. Only one of them may use the
            GPU at a time. The variable ``CLUSTER`` of a rank holds the number of its cluster.
        env: additional environment variables.
        echo: print rank 0's stdout and every rank's stderr while the ranks run.

    Raises:
        ClusterFailed: with the output of the rank that failed first.
    """
    shared = _shared_environment(ranks)
    gpu = has_gpu() if gpu is None else gpu
    with ExitStack() as stack:
        if gpu:
            shared |= stack.enter_context(mps(share or 100))
            if share is None:
                shared |= {"LD_PRELOAD": str(stack.enter_context(build_library()))}
        shared |= env or {}
        started: list[RankProcess] = []
        stack.callback(end_all, started)
        for number in range(clusters):
            cluster = {"MASTER_PORT": str(free_port()), "CLUSTER": str(number)}
            for rank in range(ranks):
                own = {"RANK": str(rank), "NODE_RANK": str(rank)}
                if gpu and share is None:
                    own[PART] = f"{sms[0] * ranks + rank}/{sms[1] * ranks}"
                if not same_host:
                    own["NCCL_HOSTID"] = f"node{rank}"
                started.append(RankProcess(rank, argv, shared | cluster | own, echo))
        wait_for_all(started, timeout)
        return [rank.output() for rank in started]


def _shared_environment(ranks: int) -> dict[str, str]:
    # PyTorch would otherwise use all CPU cores on each rank, and Lightning, which takes every rank for a machine, as well.
    return (
        {"OMP_NUM_THREADS": "1"}
        | dict(os.environ)
        | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
        }
    )


def launch(module: str, argv: Sequence[str], ranks: int, *, gpu: bool, timeout: float = 600.0) -> int:
    """Run ``python -m module *argv`` on every rank, print what rank 0 prints, and return the exit status."""
    try:
        run(ranks, ["-m", module, *argv], timeout, gpu=gpu, echo=True)
    except ClusterFailed as failure:
        print(str(failure).splitlines()[0], file=sys.stderr)
        return failure.status
    return 0


def on_every_rank(module: str, arguments: argparse.Namespace, run_rank: Callable[[argparse.Namespace], int]) -> int:
    """Run ``run_rank`` if this process is a rank. Otherwise start ``python -m module`` on every rank, with the same options."""
    if "RANK" in os.environ:
        return run_rank(arguments)
    gpu = arguments.device == "cuda"
    return launch(module, sys.argv[1:], arguments.ranks, gpu=gpu, timeout=300)


# ---- options that benchmarks share -------------------------------------------------------------------------------------------
def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--ranks`` and ``--device``; :func:`resolve_options` fills in their defaults."""
    parser.add_argument(
        "--ranks",
        type=int,
        help="number of ranks; default: 2 on cpu, 4 on cuda. WORLD_SIZE, if set by a launcher, wins",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")


def resolve_options(arguments: argparse.Namespace) -> None:
    """Replace missing values of ``--ranks`` and ``--device`` by their defaults."""
    arguments.device = arguments.device or ("cuda" if has_gpu() else "cpu")
    arguments.ranks = int(os.environ.get("WORLD_SIZE", arguments.ranks or (4 if arguments.device == "cuda" else 2)))


def has_gpu() -> bool:
    """Whether the driver sees a GPU. Uses ``nvidia-smi``, so that this process does not open the device."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


# ---- the command -------------------------------------------------------------------------------------------------------------
def main(description: str | None) -> int:
    """The command ``python -m benchmarks.cluster``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, help="number of ranks")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds after which all ranks are ended (default 600)"
    )
    parser.add_argument("--same-host", action="store_true", help="let NCCL see that the ranks share a machine")
    parser.add_argument(
        "--share", type=int, help="limit each rank to this percentage of the GPU's SMs instead of reserving SMs for it"
    )
    parser.add_argument("command", nargs="+", metavar="-- script.py [argument ...]", help="what every rank runs")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the ranks are ended, too
    try:
        run(
            arguments.ranks,
            arguments.command,
            arguments.timeout,
            same_host=arguments.same_host,
            share=arguments.share,
            echo=True,
        )
    except ClusterFailed as failure:
        print(str(failure).splitlines()[0], file=sys.stderr)
        return failure.status
    return 0
