"""Does communication slow the compute it hides behind? NCCL's kernels against copy engines.

    python -m benchmarks.sm_free [--quick] [--json] [--output FILE] [--ranks 4] [--explain]
    python -m benchmarks.cluster 4 -- -m benchmarks.sm_free

A chain of bf16 matrix products, and of HSTU layers on histories of uneven lengths, is timed

* alone,
* with NCCL AllToAll under way for the whole time,
* with the freescale backend's AllToAll under way for the whole time, between ranks that share a host, and between ranks that take
  each other for hosts and speak TCP,
* with the freescale backend moving as many bytes as NCCL did.

Slowdown is the time over the time alone. Bytes are those that leave a rank; as in the prioritized exchange, a rank has no
part for itself. ``--explain`` adds what part of a slowdown is due to the link alone: plain pinned copies without flags or peers,
and copies of the other ranks.

The script starts one GPU as a cluster of nodes with cores of their own. Under a launcher, which sets RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT, it takes its place there: the second command leaves it to MPS which cores a rank has.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import os
import statistics
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if __name__ == "__main__" and not __package__:  # started as a file: let it find its neighbours
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.harness.gpu_cluster import launcher as nodes
from benchmarks.harness.gpu_cluster import link_bandwidth as rates
from benchmarks.harness.gpu_cluster import reserved_sms as own_cores

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
SHOWN = ("compute", "mode", "ms", "slowdown", "gb_per_s_per_rank")


def bare_package() -> None:
    """Make ``lightning_freescale.transport`` importable where the package's other dependencies are missing."""
    sys.path.insert(0, str(ROOT))
    for name in ("lightning_freescale", "lightning_freescale.models"):
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(ROOT / name.replace(".", "/"))]
            sys.modules[name] = package


# -- compute -----------------------------------------------------------------------------------------------------------


def gemm_chain(device: torch.device) -> Callable[[], None]:
    """One bf16 product of two 4096 x 4096 matrices per call."""
    a, b, out = (torch.randn(4096, 4096, device=device, dtype=torch.bfloat16) * 0.01 for _ in range(3))

    def product() -> None:
        torch.mm(a, b, out=out)

    return product


def hstu_layers(device: torch.device) -> Callable[[], None]:
    """Forward of one HSTU layer per call, 32 histories of 200 to 4,000 events, width 512."""
    attention = importlib.import_module("lightning_freescale.models.attention")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(200, 4000, (32,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(device)
    total, heads, width = int(lengths.sum()), 4, 512
    times = torch.arange(total, device=device)
    x = torch.randn(total, width, device=device, dtype=torch.bfloat16)
    inner = torch.randn(width, 4 * width, device=device, dtype=torch.bfloat16) * 0.02
    outer = torch.randn(width, width, device=device, dtype=torch.bfloat16) * 0.02
    bias = torch.zeros(64, device=device, dtype=torch.float32)
    plan = attention.plan_attention(offsets, times)

    def layer() -> None:
        with torch.no_grad():
            u, v, q, k = (part.view(total, heads, -1) for part in torch.nn.functional.silu(x @ inner).chunk(4, dim=1))
            mixed = attention.hstu_attention(q, k, v, offsets, times, bias, bias, plan=plan)
            x.add_((mixed * u).reshape(total, width) @ outer, alpha=1e-3)

    return layer


# -- timing ------------------------------------------------------------------------------------------------------------


class Cluster:
    """This rank, its device, and the groups under test."""

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        own_cores.use(self.device)
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world, timeout=timedelta(seconds=60))

    def meet(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()

    def gather(self, value: float) -> list[float]:
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def mean(self, value: float) -> float:
        return statistics.mean(self.gather(value))


def timed(cluster: Cluster, compute: Callable[[], None], calls: int, background: Callable[[], Any] | None) -> Row:
    """Milliseconds of ``calls`` calls of ``compute`` and what ``background`` was worth, median of three runs.

    ``background()`` starts transfers and returns a function that tells, when compute is done, how many bytes have left
    this rank, and one that waits for the rest.
    """
    runs = []
    for _ in range(4):
        cluster.meet()
        moved, finish = background() if background else (lambda: 0, lambda: None)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            compute()
        end.record()
        end.synchronize()
        count = moved()
        finish()
        runs.append((start.elapsed_time(end), count))
    runs = sorted(runs[1:])
    took, count = runs[len(runs) // 2]
    return {"ms": took, "bytes": count, "gb_per_s": count / took / 1e6}


def exchanges(group: Any, send: torch.Tensor, receive: torch.Tensor, count: int) -> Callable[[], Any]:
    """A background of ``count`` AllToAlls, one after another, issued by a thread that keeps three under way."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    splits = [0 if peer == rank else send.numel() // (world - 1) for peer in range(world)]
    side = torch.cuda.Stream(send.device)  # an exchange waits for its caller's stream: not for the one that computes

    def start() -> Any:
        works: list[Any] = []
        errors: list[BaseException] = []

        def issue() -> None:
            try:
                with torch.cuda.stream(side):
                    for number in range(count):
                        while number >= 3 and not works[number - 3].is_completed():
                            time.sleep(1e-4)
                        works.append(dist.all_to_all_single(receive, send, splits, splits, group=group, async_op=True))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=issue)
        thread.start()

        def finish() -> None:
            thread.join()
            if errors:
                raise errors[0]
            for work in works:
                work.wait()
            torch.cuda.synchronize()

        return (lambda: send.nbytes * sum(work.is_completed() for work in list(works))), finish

    return start


def plain_copies(device: torch.device, mebibytes: int, seconds: float) -> Callable[[], Any]:
    """A background of pinned copies out and in on two streams: the link's work without flags, peers or rings."""
    host = torch.empty(2, mebibytes << 20, dtype=torch.uint8, pin_memory=True)
    memory = torch.empty(2, mebibytes << 20, dtype=torch.uint8, device=device)
    streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]
    count = max(1, int(seconds * 25e9 / (mebibytes << 20)))

    def start() -> Any:
        events = []
        for _ in range(count):
            with torch.cuda.stream(streams[0]):
                host[0].copy_(memory[0], non_blocking=True)
                events.append(torch.cuda.Event())
                events[-1].record()
            with torch.cuda.stream(streams[1]):
                memory[1].copy_(host[1], non_blocking=True)
        return (lambda: (mebibytes << 20) * sum(event.query() for event in events)), torch.cuda.synchronize

    return start


# -- the comparison ----------------------------------------------------------------------------------------------------


def compare(cluster: Cluster, name: str, compute: Callable[[], None], groups: dict[str, Any], args: Any) -> list[Row]:
    for _ in range(3):
        compute()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        compute()
    torch.cuda.synchronize()
    calls = max(1, round(cluster.mean(10 * args.seconds / (time.perf_counter() - began))))

    rows: list[Row] = []

    def row(mode: str, background: Callable[[], Any] | None, only_rank_0: bool = False) -> Row:
        found = timed(cluster, compute, calls, background)
        times = cluster.gather(found["ms"])
        row = {
            "compute": name,
            "mode": mode,
            "world": cluster.world,
            "ms": times[0] if only_rank_0 else statistics.mean(times),
            "slowest_ms": max(times),
            "gb_per_s_per_rank": cluster.mean(found["gb_per_s"]),
            "bytes_per_rank": cluster.mean(found["bytes"]),
        }
        row["slowdown"] = row["ms"] / rows[0]["ms"] if rows else 1.0
        rows.append(row)
        show(cluster, row)
        return row

    row("alone", None)
    elements = (args.mebibytes << 20) // 2 // (cluster.world - 1) * (cluster.world - 1)
    send = torch.randn(elements, device=cluster.device, dtype=torch.bfloat16)
    receive = torch.empty_like(send)
    seconds = rows[0]["ms"] / 1e3
    for mode, group in groups.items():
        rate = rates.gb_per_second(group, cluster.device, args.mebibytes)
        count = max(2, int(1.6 * seconds * rate * 1e9 / send.nbytes) + 1)  # enough to outlast the compute
        found = row(mode, exchanges(group, send, receive, count))
        found["bare_gb_per_s_per_rank"] = rate
    if nodes.NCCL in groups:
        count = max(1, round(next(r for r in rows if r["mode"] == nodes.NCCL)["bytes_per_rank"] / send.nbytes))
        row("freescale, NCCL's bytes", exchanges(groups[nodes.HOST], send, receive, count))
    if args.explain:
        copies = plain_copies(cluster.device, args.mebibytes, 1.5 * seconds)
        row("plain copies, all ranks", copies)
        row("plain copies, not on rank 0", copies if cluster.rank else None, only_rank_0=True)
    return rows


def show(cluster: Cluster, row: Row) -> None:
    if cluster.rank == 0:
        print(
            f"{row['compute']:<6} {row['mode']:<26} {row['ms']:9.2f} ms  {row['slowdown']:6.3f}x  "
            f"{row['gb_per_s_per_rank']:7.2f} GB/s per rank",
            file=sys.stderr,
            flush=True,
        )


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """End the process with all stacks when the block takes longer."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def main() -> int:
    parser = report.make_parser(__doc__, quick="a shorter chain")
    parser.add_argument("--ranks", type=int, default=4, help="of the cluster that is started; default 4")
    parser.add_argument("--seconds", type=float, help="length of the compute chain (default: 0.3, quick: 0.1)")
    parser.add_argument("--mebibytes", type=int, default=64, help="what leaves a rank in one exchange")
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="chunk sizes to try as well, in MiB")
    parser.add_argument("--compute", nargs="*", default=["gemm", "hstu"], choices=["gemm", "hstu"])
    parser.add_argument("--no-nccl", action="store_true")
    parser.add_argument("--explain", action="store_true")
    parser.add_argument("--limit", type=float, default=240, help="seconds after which it gives up")
    args = parser.parse_args()
    args.seconds = args.seconds or (0.1 if args.quick else 0.3)
    if "RANK" not in os.environ:
        return nodes.launch(
            "benchmarks.sm_free", sys.argv[1:], args.ranks, gpu=True, timeout=args.limit + 60, own_cores=True
        )
    take_part(args)
    return 0


def take_part(args: argparse.Namespace) -> None:
    """Be one of the ranks; rank 0 reports."""
    bare_package()
    transport = importlib.import_module("lightning_freescale.transport")
    with limited(args.limit):
        cluster = Cluster()
        found = transport.capabilities()
        if cluster.rank == 0:
            print(f"torch {torch.__version__}, {cluster.world} ranks, {found}", file=sys.stderr, flush=True)
        groups = {} if args.no_nccl else {nodes.NCCL: dist.new_group(backend="nccl", timeout=timedelta(seconds=60))}
        options = {"": transport.Options(reductions="gloo")}
        options |= {
            f", {size} MiB chunks": transport.Options(reductions="gloo", chunk_bytes=size << 20) for size in args.chunks
        }
        for label, option in options.items():
            groups[nodes.HOST + label] = rates.sm_free_group(option)
        if cluster.world > 1:
            groups[nodes.TCP] = rates.hosts_of_their_own(cluster.device, options[""])
        rows: list[Row] = []
        for name in args.compute:
            make = {"gemm": gemm_chain, "hstu": hstu_layers}[name]
            try:
                compute = make(cluster.device)
            except ImportError as error:
                print(f"rank {cluster.rank}: {name} left out: {error}", flush=True)
                continue
            rows += compare(cluster, name, compute, groups, args)
        if cluster.rank == 0:
            facts = {
                "device": torch.cuda.get_device_name(cluster.device),
                "sms_per_rank": torch.cuda.get_device_properties(cluster.device).multi_processor_count,
                "max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
                "report": groups[nodes.HOST].report(),
            }
            shown = [{name: row[name] for name in SHOWN} for row in rows]
            machine = f"{facts['device']} as {cluster.world} ranks: {own_cores.describe()}"
            figures = report.head("sm_free", machine) | {"device": facts, "rows": rows}
            report.publish(args, figures, {"Compute beside an exchange": shown})
        cluster.meet()
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
