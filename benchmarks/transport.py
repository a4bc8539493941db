"""What the SM-free transport costs the host as the number of ranks grows: set-up, descriptors, wake-ups and small exchanges.

    python -m benchmarks.transport [--quick] [--json] [--output FILE] [--ranks 4 16 32]
    python -m benchmarks.transport --engines all [--device cpu|cuda] [--ranks 2]

The second command compares every engine that can start on this machine: bandwidth, and the time of a small exchange. Engines
that cannot start are listed with the reason. If there are fewer GPUs than ranks, the ranks share them through MPS.

All ranks are processes of this machine, with threads instead of copy engines, and exchange 64 bytes with every peer. They share
memory, or they treat each other as separate hosts and use TCP over the loopback interface. gloo runs the same exchanges. With
more ranks than cores the times are mainly those of the scheduler; the counts do not depend on it.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing as mp
import os
import shutil
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
import torch
import torch.distributed as dist

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning_freescale.transport  # noqa: F401  (registers the backend)
from benchmarks.harness import report
from benchmarks.harness.free_ports import free_port
from benchmarks.harness.gpu_cluster.mps import MPS_CONTROL, mps
from lightning_freescale.transport.engine_timing import EngineTime, engines, time_engines

ROUTES = ("shared memory", "TCP", "gloo")
LIMIT = timedelta(seconds=300)
Row = dict[str, Any]


def wake_ups() -> int:
    """How often the threads of this process have slept and woken so far."""
    return sum(
        int(line.split()[1])
        for thread in Path("/proc/self/task").iterdir()
        for line in (thread / "status").read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )


def measure(rank: int, world: int, port: int, route: str, exchanges: int, seconds: float, answers: Any) -> None:
    """Measure as one of the ranks."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if route == "TCP":
        os.environ["FREESCALE_HOST_ID"] = f"host{rank}"
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=LIMIT)
    options = {"cpu": "gloo" if route == "gloo" else "queue", "chunk_bytes": 65536, "buffer_bytes": 16 << 20}
    group = dist.new_group(backend="freescale", pg_options=options, timeout=LIMIT)
    data = torch.full((16 * world,), float(rank))
    received = torch.empty_like(data)
    dist.barrier()
    before, start = len(os.listdir("/proc/self/fd")), time.perf_counter()
    dist.all_to_all_single(received, data, group=group)
    found = {"set-up s": time.perf_counter() - start, "descriptors": len(os.listdir("/proc/self/fd")) - before}
    times = []
    for _ in range(exchanges):
        start = time.perf_counter()
        dist.all_to_all_single(received, data, group=group)
        times.append(time.perf_counter() - start)
    assert received.view(world, -1)[:, 0].tolist() == list(range(world)), "wrong bytes"
    found["ms an exchange"] = 1e3 * statistics.median(times)
    dist.barrier()
    if rank != world - 1:  # the last rank is late, and all others wait for it
        work = dist.all_to_all_single(received, data, group=group, async_op=True)
        time.sleep(seconds / 2)
        count = wake_ups()
        time.sleep(seconds)
        found["wake-ups a second"] = (wake_ups() - count) / seconds
        work.wait()
    else:
        time.sleep(2 * seconds)
        dist.all_to_all_single(received, data, group=group)
    dist.barrier()
    answers.put(found)
    dist.barrier()
    dist.destroy_process_group(group)


def run(world: int, route: str, exchanges: int, seconds: float) -> Row:
    """One row of the table: the slowest set-up, and the mean over the ranks of everything else."""
    context: Any = mp.get_context("fork")
    answers, port = context.Queue(), free_port()
    ranks = [
        context.Process(target=measure, args=(rank, world, port, route, exchanges, seconds, answers), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    found = [answers.get(timeout=LIMIT.total_seconds()) for _ in ranks]
    for process in ranks:
        process.join(30)
    row: Row = {"ranks": world, "route": route, "set-up s": max(answer["set-up s"] for answer in found)}
    for name in ("descriptors", "ms an exchange", "wake-ups a second"):
        row[name] = statistics.mean(answer[name] for answer in found if name in answer)
    return row


def compare_engines(device: str, ranks: int, wanted: list[str], rounds: int, mebibytes: int) -> list[Row]:
    """One row for each engine: the middle of several rounds, in which all engines take turns, and their range."""
    found: dict[str, list[EngineTime]] = {engine.name: [] for engine in engines(device)}
    for _ in range(rounds):
        for answer in time_engines(device, ranks, mebibytes):
            found[answer.engine].append(answer)
    return [
        _engine_row(device, ranks, name, times) for name, times in found.items() if wanted == ["all"] or name in wanted
    ]


def _engine_row(device: str, ranks: int, name: str, times: list[EngineTime]) -> Row:
    row: Row = {"ranks": ranks, "device": device, "engine": name}
    problem = next((time.problem for time in times if time.problem), "")
    rates = [time.gb_per_second for time in times if time.gb_per_second is not None]
    delays = [time.microseconds for time in times if time.microseconds is not None]
    if problem or not rates:
        return row | {"GB/s": "", "GB/s range": "", "us a small exchange": "", "us range": "", "cannot run": problem}
    return row | {
        "GB/s": statistics.median(rates),
        "GB/s range": f"{min(rates):.2f} - {max(rates):.2f}",
        "us a small exchange": statistics.median(delays),
        "us range": f"{min(delays):.0f} - {max(delays):.0f}",
        "cannot run": "",
    }


def main() -> int:
    parser = report.make_parser(__doc__, quick="4 ranks and few exchanges")
    parser.add_argument("--ranks", type=int, nargs="+", help="default 4, 16 and 32; with --engines 2, or one per GPU")
    parser.add_argument("--engines", nargs="+", metavar="NAME", help="'all', or names of engines: compare them")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="with --engines: default cuda if there is a GPU")
    args = parser.parse_args()
    if args.engines:
        return _publish_engines(args)
    args.ranks = args.ranks or [4, 16, 32]
    worlds, exchanges, seconds = ([4], 5, 0.2) if args.quick else (args.ranks, 20, 2.0)
    rows = [run(world, route, exchanges, seconds) for world in worlds for route in ROUTES]
    results = report.head("transport") | {"load average": os.getloadavg()[0], "rows": rows}
    report.publish(args, results, {"Cost of the transport on the host": rows})
    return 0


def _publish_engines(args: argparse.Namespace) -> int:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    ranks = (args.ranks or [max(2, torch.cuda.device_count() if device == "cuda" else 2)])[0]
    known = ["all", *(engine.name for engine in engines(device))]
    if unknown := [name for name in args.engines if name not in known]:
        raise SystemExit(
            f"--engines: there is no engine {unknown[0]!r} for {device}; use {', '.join(map(repr, known))}"
        )
    rounds, mebibytes = (1, 1) if args.quick else (3, 64)
    machine = None
    with contextlib.ExitStack() as stack:
        if device == "cuda" and torch.cuda.device_count() < ranks and shutil.which(MPS_CONTROL):
            os.environ.update(stack.enter_context(mps(100 // ranks)))
        rows = compare_engines(device, ranks, args.engines, rounds, mebibytes)
    if device == "cuda":
        machine = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        machine += f" as {ranks} ranks" if torch.cuda.device_count() < ranks else ""
    results = report.head("transport", machine) | {"load average": os.getloadavg()[0], "rows": rows}
    report.publish(args, results, {f"{mebibytes} MiB leave each rank in one exchange": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
