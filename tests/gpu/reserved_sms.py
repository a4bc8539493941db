"""One of two ranks on one GPU: does a kernel of rank 1 run while rank 0 occupies all SMs that are reserved for rank 0?

``test_cluster.py`` starts both ranks. With the argument ``same`` both have the same SMs. Rank 0 prints one JSON line.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.gpu_cluster import reserved_sms

HOLD = r"""
extern "C" __global__ void hold(int* seen, long long cycles) {
  unsigned sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  long long start = clock64();
  while (clock64() - start < cycles) {}
  if (threadIdx.x == 0) seen[sm] = 1;
}
"""
THREADS = 1024  # in a block: two blocks fill an SM
LONG = 6_000_000_000  # cycles, about three seconds


def main() -> None:
    if sys.argv[1:] == ["same"]:
        os.environ[reserved_sms.PART] = "0/2"
    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), torch.device("cuda")
    reserved_sms.use(device)
    sms = ctypes.CDLL(None).reserved_sms()
    hold = torch.cuda._compile_kernel(HOLD, "hold")
    seen = torch.zeros(2, 1024, dtype=torch.int32, device=device)

    def start(blocks: int, cycles: int, row: int) -> torch.cuda.Event:
        stream, done = torch.cuda.current_stream(), torch.cuda.Event()
        hold((blocks, 1, 1), (THREADS, 1, 1), (seen[row], cycles), stream=stream)
        done.record(stream)
        return done

    # One rank after the other: its streams reach only its own SMs, and the default stream reaches all SMs.
    for turn in range(2):
        if rank == turn:
            start(8 * sms, 1_000_000, 0)
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.default_stream()):
                start(2 * torch.cuda.get_device_properties(device).multi_processor_count, 1_000_000, 1)
            torch.cuda.synchronize()
        dist.barrier()
    reached = seen.sum(dim=1).tolist()
    dist.barrier()
    found: dict[str, Any] = {"rank": rank, "sms": sms, "own": reached[0], "default": reached[1]}
    if rank == 0:
        held = start(2 * sms, LONG, 0)
    dist.barrier()
    time.sleep(0.3)
    if rank == 1:
        done, deadline = start(1, 1000, 0), time.monotonic() + 1.0
        while not done.query() and time.monotonic() < deadline:
            time.sleep(0.01)
        found["ran"] = done.query()
    dist.barrier()
    if rank == 0:
        found["held"] = not held.query()
    torch.cuda.synchronize()
    ranks: list[Any] = [None] * 2
    dist.all_gather_object(ranks, found)
    if rank == 0:
        print("RESULT", json.dumps(ranks), flush=True)
    dist.destroy_process_group()


main()
