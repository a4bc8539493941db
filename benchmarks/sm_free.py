"""Does communication slow down the compute that runs beside it? NCCL, and the SM-free transport by copy engines.

    python -m benchmarks.sm_free [--quick] [--json] [--output FILE] [--ranks 4] [--explain]
    python -m benchmarks.cluster 4 -- -m benchmarks.sm_free

A chain of bf16 matrix products, and one of HSTU layers on histories of different lengths, are timed

* alone,
* while NCCL runs all-to-alls the whole time,
* while the freescale backend (SM-free) runs all-to-alls the whole time, through host memory, and over TCP between ranks
  that treat each other as separate hosts,
* while the freescale backend moves as many bytes as NCCL did.

The slow-down is the time divided by the time alone. Bytes are those that leave a rank; as in the prioritized exchange,
a rank sends nothing to itself. ``--explain`` also measures plain pinned copies without flags or peers, on all ranks and
on the other ranks only. This shows how much of a slow-down the link itself causes.

The script starts one GPU as a cluster of nodes and reserves SMs for each rank. Under a launcher, which sets RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT, each process is one of that launcher's ranks. The second command does not
reserve SMs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.harness.gpu_cluster import launcher, link_bandwidth, reserved_sms
from benchmarks.harness.gpu_cluster.bare_ranks import GpuRank, stub_package, time_limit
from benchmarks.harness.gpu_cluster.transports import HOST, NCCL, TCP

Row = dict[str, Any]
SHOWN = ("compute", "mode", "ms", "slowdown", "gb_per_s_per_rank")  # columns of the table on the console


# -- compute -----------------------------------------------------------------------------------------------------------


def gemm_chain(device: torch.device) -> Callable[[], None]:
    """One bf16 product of two 4096 x 4096 matrices per call."""
    a, b, out = (torch.randn(4096, 4096, device=device, dtype=torch.bfloat16) * 0.01 for _ in range(3))

    def product() -> None:
        torch.mm(a, b, out=out)

    return product


def hstu_layers(device: torch.device) -> Callable[[], None]:
    """The forward of one HSTU layer per call: 32 histories of 200 to 4,000 events, width 512."""
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


def timed(rank: GpuRank, compute: Callable[[], None], calls: int, background: Callable[[], Any] | None) -> Row:
    """Milliseconds of ``calls`` calls of ``compute``, and the bytes that ``background`` moved meanwhile; median of three runs.

    ``background()`` starts transfers and returns two functions. The first returns how many bytes have left this rank when the
    compute is done. The second waits for all transfers.
    """
    runs = []
    for _ in range(4):
        rank.meet()
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
    """A background of ``count`` all-to-alls, issued by a thread that keeps three of them in flight."""
    own, world = dist.get_rank(group), dist.get_world_size(group)
    splits = [0 if peer == own else send.numel() // (world - 1) for peer in range(world)]
    side = torch.cuda.Stream(
        send.device
    )  # an exchange waits for the stream of its caller, which must not be the compute stream

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
    """A background of pinned copies to and from the host on two streams: the work of the link without flags, peers or rings."""
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


def compare(rank: GpuRank, name: str, compute: Callable[[], None], groups: dict[str, Any], args: Any) -> list[Row]:
    """Time ``compute`` alone and beside the all-to-alls of each group. A collective."""
    for _ in range(3):
        compute()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        compute()
    torch.cuda.synchronize()
    calls = max(1, round(rank.mean(10 * args.seconds / (time.perf_counter() - began))))

    rows: list[Row] = []

    def measure(mode: str, background: Callable[[], Any] | None, only_rank_0: bool = False) -> Row:
        found = timed(rank, compute, calls, background)
        times = rank.gather(found["ms"])
        row = {
            "compute": name,
            "mode": mode,
            "world": rank.world,
            "ms": times[0] if only_rank_0 else statistics.mean(times),
            "slowest_ms": max(times),
            "gb_per_s_per_rank": rank.mean(found["gb_per_s"]),
            "bytes_per_rank": rank.mean(found["bytes"]),
        }
        row["slowdown"] = row["ms"] / rows[0]["ms"] if rows else 1.0
        rows.append(row)
        show(rank, row)
        return row

    measure("alone", None)
    elements = (args.mebibytes << 20) // 2 // (rank.world - 1) * (rank.world - 1)
    send = torch.randn(elements, device=rank.device, dtype=torch.bfloat16)
    receive = torch.empty_like(send)
    seconds = rows[0]["ms"] / 1e3
    for mode, group in groups.items():
        rate = link_bandwidth.gb_per_second(group, rank.device, args.mebibytes)
        count = max(2, int(1.6 * seconds * rate * 1e9 / send.nbytes) + 1)  # enough to last longer than the compute
        found = measure(mode, exchanges(group, send, receive, count))
        found["bare_gb_per_s_per_rank"] = rate
    if NCCL in groups:
        count = max(1, round(next(r for r in rows if r["mode"] == NCCL)["bytes_per_rank"] / send.nbytes))
        measure("freescale, NCCL's bytes", exchanges(groups[HOST], send, receive, count))
    if args.explain:
        copies = plain_copies(rank.device, args.mebibytes, 1.5 * seconds)
        measure("plain copies, all ranks", copies)
        measure("plain copies, not on rank 0", copies if rank.rank else None, only_rank_0=True)
    return rows


def show(rank: GpuRank, row: Row) -> None:
    """Print a row on rank 0 as soon as it is measured."""
    if rank.rank == 0:
        print(
            f"{row['compute']:<6} {row['mode']:<26} {row['ms']:9.2f} ms  {row['slowdown']:6.3f}x  "
            f"{row['gb_per_s_per_rank']:7.2f} GB/s per rank",
            file=sys.stderr,
            flush=True,
        )


def main() -> int:
    parser = report.make_parser(__doc__, quick="a shorter chain of compute")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the cluster that is started; default 4")
    parser.add_argument("--seconds", type=float, help="duration of the compute chain (default 0.3, with --quick 0.1)")
    parser.add_argument("--mebibytes", type=int, default=64, help="MiB that leave a rank in one exchange (default 64)")
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="additional chunk sizes to measure, in MiB")
    parser.add_argument(
        "--compute", nargs="*", default=["gemm", "hstu"], choices=["gemm", "hstu"], help="default: both"
    )
    parser.add_argument("--no-nccl", action="store_true", help="leave NCCL out")
    parser.add_argument("--explain", action="store_true", help="also measure plain copies")
    parser.add_argument("--limit", type=float, default=240, help="seconds after which the ranks end (default 240)")
    args = parser.parse_args()
    args.seconds = args.seconds or (0.1 if args.quick else 0.3)
    if "RANK" not in os.environ:
        return launcher.launch("benchmarks.sm_free", sys.argv[1:], args.ranks, gpu=True, timeout=args.limit + 60)
    run_rank(args)
    return 0


def run_rank(args: argparse.Namespace) -> None:
    """Measure as one of the ranks; rank 0 reports."""
    stub_package()
    transport = importlib.import_module("lightning_freescale.transport")
    with time_limit(args.limit):
        rank = GpuRank()
        found = transport.capabilities()
        if rank.rank == 0:
            print(f"torch {torch.__version__}, {rank.world} ranks, {found}", file=sys.stderr, flush=True)
        groups = {} if args.no_nccl else {NCCL: dist.new_group(backend="nccl", timeout=timedelta(seconds=60))}
        options = {"": transport.Options(reductions="gloo")}
        options |= {
            f", {size} MiB chunks": transport.Options(reductions="gloo", chunk_bytes=size << 20) for size in args.chunks
        }
        for label, option in options.items():
            groups[HOST + label] = link_bandwidth.sm_free_group(option)
        if rank.world > 1:
            groups[TCP] = link_bandwidth.sm_free_tcp_group(rank.device, options[""])
        rows: list[Row] = []
        for name in args.compute:
            make = {"gemm": gemm_chain, "hstu": hstu_layers}[name]
            try:
                compute = make(rank.device)
            except ImportError as error:
                print(f"rank {rank.rank}: {name} is left out, because an import failed: {error}", flush=True)
                continue
            rows += compare(rank, name, compute, groups, args)
        if rank.rank == 0:
            facts = {
                "device": torch.cuda.get_device_name(rank.device),
                "sms_per_rank": torch.cuda.get_device_properties(rank.device).multi_processor_count,
                "max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
                "report": groups[HOST].report(),
            }
            shown = [{name: row[name] for name in SHOWN} for row in rows]
            machine = f"{facts['device']} as {rank.world} ranks: {reserved_sms.describe()}"
            figures = report.head("sm_free", machine) | {"device": facts, "rows": rows}
            report.publish(args, figures, {"Compute while an exchange runs": shown})
        rank.meet()
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
