"""What a stream that waits costs the kernels beside it: the start of a kernel against the number of waiting streams.

    python -m benchmarks.waiting_streams [--quick] [--json] [--output FILE] [--ranks N]

Every rank runs a chain of small kernels on one stream, while others of its streams wait for a word in host memory. The ranks
do so together.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

if __name__ == "__main__" and not __package__:  # started as a file: let it find its neighbours
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.harness.gpu_cluster import launcher as cluster
from benchmarks.harness.gpu_cluster import reserved_sms as own_cores

KERNELS = 1500
AHEAD = 60_000_000  # cycles for which the device sleeps, so that the host has queued all kernels when the first starts


def measure(options: argparse.Namespace) -> None:
    """Be one of the ranks; rank 0 reports."""
    # More than the streams: one that shares a hardware queue with the kernels would hold them up itself.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    dist.init_process_group("gloo")
    driver = ctypes.CDLL("libcuda.so.1")
    numbers = torch.zeros(1 << 17, device="cuda")
    word = torch.zeros(64, dtype=torch.int32).pin_memory()
    streams = [torch.cuda.Stream() for _ in range(12)]
    chain(numbers)  # loads the kernel
    torch.cuda.synchronize()
    rows = []
    for waiting in (0, 4) if options.quick else (0, 1, 2, 4, 8, 12):
        dist.barrier()
        word.zero_()
        for stream in streams[:waiting]:
            place = ctypes.c_uint64(word.data_ptr())
            status = driver.cuStreamWaitValue32_v2(ctypes.c_void_p(stream.cuda_stream), place, ctypes.c_uint32(1), 0)
            if status:
                raise RuntimeError(f"cuStreamWaitValue32: error {status}")
        start, end = chain(numbers)
        end.synchronize()
        rows.append({"waiting streams": waiting, "us a kernel": 1e3 * start.elapsed_time(end) / KERNELS})
        word.fill_(1)
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        machine = f"{torch.cuda.get_device_name()} as {dist.get_world_size()} ranks, {own_cores.describe()}"
        results = report.head("waiting_streams", machine) | {"rows": rows}
        report.publish(options, results, {"A chain of small kernels beside waiting streams": rows})
    dist.destroy_process_group()


def chain(numbers: torch.Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Start the kernels; events before the first and after the last."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD)
    start.record()
    for _ in range(KERNELS):
        numbers.add_(1)
    end.record()
    return start, end


def main() -> int:
    parser = report.make_parser(__doc__, quick="fewer numbers of streams")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        return cluster.launch("benchmarks.waiting_streams", sys.argv[1:], options.ranks, gpu=True)
    measure(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
