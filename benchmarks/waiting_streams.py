"""Cost of waiting streams: the time from one kernel to the next while other streams wait for a value in host memory.

    python -m benchmarks.waiting_streams [--quick] [--json] [--output FILE] [--ranks N]

Every rank runs a chain of small kernels on one stream while a number of its other streams wait for a value in host memory. All
ranks do so at the same time.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.harness.gpu_cluster import launcher, reserved_sms

KERNELS = 1500
HEAD_START = (
    60_000_000  # cycles that the device sleeps, so that the host has queued all kernels before the first one starts
)


def measure(options: argparse.Namespace) -> None:
    """Measure as one of the ranks; rank 0 reports."""
    # More hardware queues than streams: a waiting stream that shares a queue with the kernels would block them.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    dist.init_process_group("gloo")
    reserved_sms.use(torch.device("cuda"))
    driver = ctypes.CDLL("libcuda.so.1")
    numbers = torch.zeros(1 << 17, device="cuda")
    value = torch.zeros(64, dtype=torch.int32).pin_memory()
    streams = [torch.cuda.Stream() for _ in range(12)]
    run_chain(numbers)  # loads the kernel
    torch.cuda.synchronize()
    rows = []
    for waiting in (0, 4) if options.quick else (0, 1, 2, 4, 8, 12):
        dist.barrier()
        value.zero_()
        for stream in streams[:waiting]:
            address = ctypes.c_uint64(value.data_ptr())
            status = driver.cuStreamWaitValue32_v2(ctypes.c_void_p(stream.cuda_stream), address, ctypes.c_uint32(1), 0)
            if status:
                raise RuntimeError(f"cuStreamWaitValue32 failed with CUDA error {status}")
        start, end = run_chain(numbers)
        end.synchronize()
        rows.append({"waiting streams": waiting, "us a kernel": 1e3 * start.elapsed_time(end) / KERNELS})
        value.fill_(1)
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        machine = f"{torch.cuda.get_device_name()} as {dist.get_world_size()} ranks, {reserved_sms.describe()}"
        results = report.head("waiting_streams", machine) | {"rows": rows}
        report.publish(options, results, {"A chain of small kernels while other streams wait": rows})
    dist.destroy_process_group()


def run_chain(numbers: torch.Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Launch the kernels; returns the events before the first and after the last one."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START)
    start.record()
    for _ in range(KERNELS):
        numbers.add_(1)
    end.record()
    return start, end


def main() -> int:
    parser = report.make_parser(__doc__, quick="only 0 and 4 waiting streams")
    parser.add_argument("--ranks", type=int, default=4, help="default 4")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        return launcher.launch("benchmarks.waiting_streams", sys.argv[1:], options.ranks, gpu=True)
    measure(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
