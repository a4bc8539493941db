"""One GPU as a cluster of one-GPU nodes, or plain processes where there is no GPU.

    python -m benchmarks.cluster 4 -- benchmarks/exposed.py --device cuda

MPS gives each rank its share of the GPU's cores; not every share computes rightly, see ``products.py``. Whether ranks meet on a
core is MPS's affair, unless each has ``--own-cores`` (``own_cores.py``). Memory, caches and copy engines are common.

A distinct ``NCCL_HOSTID`` makes NCCL take every rank for a machine of its own (it refuses two ranks on one GPU of one machine):
traffic goes over TCP on the loopback device. ``--same-host`` leaves it out, for transports that share the host's memory.

Every rank gets what Lightning and torchrun's env:// rendezvous read: RANK, NODE_RANK, WORLD_SIZE, LOCAL_RANK=0,
LOCAL_WORLD_SIZE=1, MASTER_ADDR, MASTER_PORT. The first failure, or the timeout, ends all ranks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from benchmarks.harness.gpu_cluster.reserved_sms import PART, library

ROOT = Path(__file__).resolve().parents[3]  # ranks find what is imported from there
# Transports: NCCL, and the SM-free one between ranks of a host, and between ranks that take each other for hosts.
NCCL, HOST, TCP = "nccl", "freescale", "freescale over TCP"
MPS_CONTROL = "nvidia-cuda-mps-control"
GRACE = 5.0  # seconds between the request to end and the kill


class ClusterFailed(RuntimeError):
    """A rank failed, or all took too long.

    Attributes:
        status: to exit with: that of the first to fail, 1 if a signal ended it, 124 for a timeout.
    """

    def __init__(self, message: str, status: int):
        self.status = status if status > 0 else 1
        super().__init__(message)


def run(
    ranks: int,
    argv: Sequence[str],
    timeout: float = 600.0,
    *,
    same_host: bool = False,
    gpu: bool | None = None,
    share: int | None = None,
    own_cores: bool = False,
    clusters: int = 1,
    env: Mapping[str, str] | None = None,
    echo: bool = False,
) -> list[str]:
    """Run ``python *argv`` on every rank and return what each printed (stdout and stderr together), by rank.

    Args:
        timeout: seconds until all ranks are killed.
        same_host: leave ``NCCL_HOSTID`` alone.
        gpu: share the GPU through MPS; by default if there is one.
        share: percent of its cores for each rank; by default all are dealt out.
        own_cores: instead of a share, cores that no other rank has, for every stream but the default one.
        clusters: that many at the same time, each of ``ranks``, on the same cores; ``CLUSTER`` tells them apart.
        env: more variables for the ranks.
        echo: also print rank 0's stdout, and the stderr of all, as they come.

    Raises:
        ClusterFailed: with the output of the rank that failed first.
    """
    shared = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
    }
    with ExitStack() as stack:
        if has_gpu() if gpu is None else gpu:
            shared |= stack.enter_context(_mps(100 if own_cores else share or 100 // ranks))
            if own_cores:
                shared |= {"LD_PRELOAD": str(stack.enter_context(library())), PART: str(ranks)}
        shared |= env or {}
        started: list[_Rank] = []
        stack.callback(_end, started)
        for number in range(clusters):
            own = {"MASTER_PORT": str(free_port()), "CLUSTER": str(number)}
            for rank in range(ranks):
                started.append(_Rank(rank, argv, shared | own, same_host, echo))
        _await(started, timeout)
        return [rank.output() for rank in started]


def launch(
    module: str, argv: Sequence[str], ranks: int, *, gpu: bool, timeout: float = 600.0, own_cores: bool = False
) -> int:
    """Run ``python -m module *argv`` on every rank, show what rank 0 prints, and return the exit status."""
    try:
        # Lightning takes every rank for a machine of its own, and would give each all cores.
        env = {} if gpu else {"OMP_NUM_THREADS": "1"}
        run(ranks, ["-m", module, *argv], timeout, gpu=gpu, own_cores=own_cores, env=env, echo=True)
    except ClusterFailed as failure:
        print(str(failure).splitlines()[0], file=sys.stderr)
        return failure.status
    return 0


@contextmanager
def own_host(rank: int) -> Iterator[None]:
    """Let the SM-free transport of groups that are connected meanwhile take ``rank`` for a host, as ``NCCL_HOSTID`` does."""
    os.environ["FREESCALE_HOST_ID"] = f"node{rank}"
    try:
        yield
    finally:
        del os.environ["FREESCALE_HOST_ID"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where to run; :func:`settle` fills in what is not said."""
    parser.add_argument("--ranks", type=int, help="default: 2 on cpu, 4 on cuda; as launched under a launcher")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")


def settle(arguments: argparse.Namespace) -> None:
    arguments.device = arguments.device or ("cuda" if has_gpu() else "cpu")
    arguments.ranks = int(os.environ.get("WORLD_SIZE", arguments.ranks or (4 if arguments.device == "cuda" else 2)))


def threads(arguments: argparse.Namespace) -> str:
    """Of a rank, for ``OMP_NUM_THREADS``. Lightning takes every rank for a machine of its own, and would give each all cores."""
    return str(max(1, (os.cpu_count() or 1) // arguments.ranks)) if arguments.device == "cuda" else "1"


def has_gpu() -> bool:
    """Whether the driver sees a GPU. Asks its tool, so that this process never opens the device itself."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


class _Rank:
    """A process in a session of its own, so that it ends with everything it started."""

    def __init__(self, rank: int, argv: Sequence[str], shared: Mapping[str, str], same_host: bool, echo: bool):
        own = {"RANK": str(rank), "NODE_RANK": str(rank)}
        if PART in shared:
            own[PART] = f"{rank}/{shared[PART]}"
        if not same_host:
            own["NCCL_HOSTID"] = f"node{rank}"
        self.rank = rank
        self.process = subprocess.Popen(
            [sys.executable, *argv],
            env={**shared, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._lines: list[str] = []
        out, err = self.process.stdout, self.process.stderr
        assert out is not None
        assert err is not None
        sinks = (out, sys.stdout if echo and rank == 0 else None), (err, sys.stderr if echo else None)
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in sinks]
        for reader in self._readers:
            reader.start()

    def _read(self, source: IO[str], sink: IO[str] | None) -> None:
        for line in source:
            self._lines.append(line)
            if sink is not None:
                print(line, end="", file=sink, flush=True)

    def output(self) -> str:
        for reader in self._readers:
            reader.join(timeout=GRACE)  # a grandchild may hold the pipe open: do not wait for it
        return "".join(self._lines)

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def _await(ranks: list[_Rank], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while None in [rank.process.poll() for rank in ranks]:
        _raise_failure(ranks)
        if time.monotonic() > deadline:
            running = [rank for rank in ranks if rank.process.returncode is None]
            _end(ranks)
            last = "\n".join(f"rank {rank.rank}: ...{rank.output()[-2000:]}" for rank in running)
            raise ClusterFailed(
                f"timeout after {timeout:g} s; still running: {[rank.rank for rank in running]}\n{last}", 124
            )
        time.sleep(0.02)
    _raise_failure(ranks)


def _raise_failure(ranks: list[_Rank]) -> None:
    for rank in ranks:
        status = rank.process.returncode
        if status:
            _end(ranks)
            raise ClusterFailed(f"rank {rank.rank} ended with status {status}:\n{rank.output()}", status)


def _end(ranks: list[_Rank]) -> None:
    """End what still runs, and whatever the ranks have started."""
    for rank in ranks:
        rank.signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        rank.signal(signal.SIGKILL)
        rank.process.wait()


@contextmanager
def _mps(share: int) -> Iterator[dict[str, str]]:
    """An MPS daemon of our own; yields the variables its clients need."""
    tool = shutil.which(MPS_CONTROL)
    if tool is None:
        raise RuntimeError(f"{MPS_CONTROL} is not installed: without MPS several ranks cannot share a GPU evenly")
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        env = dict(os.environ) | variables
        subprocess.run([tool, "-d"], env=env, check=True, stdout=subprocess.DEVNULL)
        try:
            yield variables | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)}
        finally:
            subprocess.run([tool], env=env, input="quit\n", text=True, check=False, timeout=60, capture_output=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main(description: str | None) -> int:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("--same-host", action="store_true", help="let NCCL see that the ranks share a machine")
    parser.add_argument("--share", type=int, help="percent of the GPU's cores a rank; default: all are dealt out")
    parser.add_argument("--own-cores", action="store_true", help="instead, cores that no other rank has")
    parser.add_argument("command", nargs="+", metavar="-- script.py [argument ...]", help="what every rank runs")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended, too
    try:
        run(
            arguments.ranks,
            arguments.command,
            arguments.timeout,
            same_host=arguments.same_host,
            share=arguments.share,
            own_cores=arguments.own_cores,
            echo=True,
        )
    except ClusterFailed as failure:
        print(str(failure).splitlines()[0], file=sys.stderr)
        return failure.status
    return 0
