"""The size of the buckets in which DDP sums the gradients of the dense parameters, from a measurement of the AllReduce.

DDP starts the AllReduce of a bucket when its gradients are ready, beside the rest of the backward. The last bucket is ready at
the end of the backward, so a rank waits for all of it. Small buckets make this wait short. But each AllReduce has a latency, so
many small buckets take longer in total than the backward can hide. DDP's default, 25 MiB, leaves a wait of many milliseconds on
a slow link.

Two runs may measure different times and choose different sizes. The place of a gradient in its bucket decides in which order the
ranks are added, so the runs then differ by rounding. ``Trainer(deterministic=True)`` keeps DDP's default.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from lightning_freescale.runtime.log import log_once

DDP_BUCKET_BYTES = 25 * 2**20  # DDP's default
# Several buckets may add this share of the time that a single AllReduce of all gradients takes.
LATENCY_SHARE = 0.25
# Up to this many, buckets may add as much as that: the sum is still short compared with a backward.
FEW_BUCKETS = 3
# Two sizes, and how often each is measured. The fastest time counts. The latency follows from the smaller size. With few
# measurements a busy host makes it too long, and equal trainings choose different numbers of buckets.
MEASURED_BYTES = 64 * 2**10, 8 * 2**20
REPETITIONS = 12, 4
IN_A_ROW = 4  # AllReduces of one measurement. The host starts each of them while another one runs, as in a backward.


def count_buckets(gradient_bytes: int, latency: float, seconds_per_byte: float) -> int:
    """Into how many buckets to divide the gradients.

    Args:
        gradient_bytes: bytes of all gradients.
        latency: seconds of an AllReduce of few bytes.
        seconds_per_byte: seconds of each further byte.

    A slow link and large gradients, a slow link and small gradients, a fast link:

    >>> count_buckets(42_000_000, 3e-4, 7e-10), count_buckets(2_600_000, 3e-4, 7e-10), count_buckets(42_000_000, 3e-5, 1e-11)
    (24, 3, 3)
    """
    transfer = gradient_bytes * seconds_per_byte
    several = max(LATENCY_SHARE * transfer / latency, min(FEW_BUCKETS, transfer / latency))
    return max(1, round(several), -(-gradient_bytes // DDP_BUCKET_BYTES))


def measure_all_reduce(group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """The latency of an AllReduce in seconds, and the seconds of each byte, equal on all ranks. A collective."""
    seconds = []
    for size, repetitions in zip(MEASURED_BYTES, REPETITIONS, strict=True):
        data = torch.zeros(size // 4, device=device)
        times = []
        for _ in range(1 + repetitions):  # The first one opens connections.
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            for _ in range(IN_A_ROW):
                dist.all_reduce(data, group=group)
            torch.cuda.synchronize(device)
            times.append((time.perf_counter() - start) / IN_A_ROW)
        seconds.append(min(times[1:]))
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    small, large = slowest.tolist()
    per_byte = max(large - small, 0.0) / (MEASURED_BYTES[1] - MEASURED_BYTES[0])
    return max(small - per_byte * MEASURED_BYTES[0], 1e-6), per_byte


def may_choose(group: dist.ProcessGroup) -> bool:
    """Whether the size of the buckets is chosen by a measurement: not for one rank, and not if the user wants equal runs."""
    if group.size() > 1 and torch.are_deterministic_algorithms_enabled():
        log_once(
            "bucket_cap_mb: DDP's default, because deterministic algorithms are required. Set it to choose another size"
        )
        return False
    return group.size() > 1


def choose_bucket_megabytes(gradient_bytes: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """DDP's ``bucket_cap_mb`` for gradients of this size, equal on all ranks. A collective."""
    latency, per_byte = measure_all_reduce(group, device)
    count = count_buckets(gradient_bytes, latency, per_byte)
    log_once(
        f"bucket_cap_mb: the {gradient_bytes / 2**20:.1f} MiB of dense gradients are summed in about {count} buckets. An "
        f"AllReduce takes {latency * 1e3:.2f} ms and {per_byte * 2**20 * 1e3:.2f} ms for each MiB here"
    )
    return gradient_bytes / count / 2**20
