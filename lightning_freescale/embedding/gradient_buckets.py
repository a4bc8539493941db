"""How DDP sums the gradients of the dense parameters, chosen by a measurement: by which AllReduce, and in buckets of which size.

DDP starts the AllReduce of a bucket when its gradients are ready, beside the rest of the backward. The last bucket is ready at
the end of the backward, so a rank waits for all of it. Small buckets make this wait short. But each AllReduce has a latency, so
many small buckets take longer in total than the backward can hide. DDP's default, 25 MiB, leaves a wait of many milliseconds on
a slow link.

If the rows travel by copy engines, the gradients of the dense parameters can do so too (``transport/rank_mean.py``). That takes
no SMs from the backward, and between ranks of one host it is often faster. The faster of the two is used.

Two runs may measure different times and choose differently. The AllReduce and the place of a gradient in its bucket decide in
which order the ranks are added, so the runs then differ by rounding. ``Trainer(deterministic=True)`` keeps DDP's defaults.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.runtime.log import log_once
from lightning_freescale.transport.rank_mean import RankMean

DDP_BUCKET_BYTES = 25 * 2**20  # DDP's default
MEASURED_BYTES = 64 * 2**10, 8 * 2**20
REPETITIONS = 3


def count_buckets(gradient_bytes: int, latency: float, seconds_per_byte: float) -> int:
    """Into how many buckets to divide the gradients.

    With more buckets the wait for the last one is shorter, but all of them take longer in total. This number minimizes the wait
    plus a quarter of the total.

    Args:
        gradient_bytes: bytes of all gradients.
        latency: seconds of an AllReduce of few bytes.
        seconds_per_byte: seconds of each further byte.

    A slow link and large gradients, a slow link and small gradients, a fast link:

    >>> count_buckets(42_000_000, 3e-4, 7e-10), count_buckets(2_600_000, 3e-4, 7e-10), count_buckets(42_000_000, 3e-5, 1e-11)
    (20, 5, 7)
    """
    several = 2 * math.sqrt(gradient_bytes * seconds_per_byte / latency)
    return max(1, round(several), -(-gradient_bytes // DDP_BUCKET_BYTES))


def measure_all_reduce(
    reduce: Callable[[Tensor], object], group: dist.ProcessGroup, device: torch.device
) -> tuple[float, float]:
    """The latency of an AllReduce in seconds, and the seconds of each byte, equal on all ranks. A collective.

    Args:
        reduce: starts the AllReduce of a tensor, and makes the current stream wait for it.
        group: a group of the same ranks, on which they compare their times.
    """
    seconds = []
    for size in MEASURED_BYTES:
        data = torch.zeros(size // 4, device=device)
        times = []
        for _ in range(1 + REPETITIONS):  # The first one opens connections.
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            reduce(data)
            torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        seconds.append(min(times[1:]))
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    small, large = slowest.tolist()
    per_byte = max(large - small, 0.0) / (MEASURED_BYTES[1] - MEASURED_BYTES[0])
    return max(small - per_byte * MEASURED_BYTES[0], 1e-6), per_byte


def may_choose(group: dist.ProcessGroup) -> bool:
    """Whether a measurement chooses the AllReduce: not for one rank, and not if the user wants equal runs."""
    if group.size() > 1 and torch.are_deterministic_algorithms_enabled():
        log_once(
            "dense gradients: DDP's own AllReduce, and its default bucket_cap_mb unless you set it, because deterministic "
            "algorithms are required"
        )
        return False
    return group.size() > 1


class DenseReduction(NamedTuple):
    """How DDP averages the gradients of the dense parameters.

    Attributes:
        bucket_megabytes: DDP's ``bucket_cap_mb``.
        mean: averages a bucket by copy engines; None for the AllReduce of DDP's own process group.
    """

    bucket_megabytes: float
    mean: RankMean | None


def choose_reduction(
    gradient_bytes: int, group: dist.ProcessGroup, device: torch.device, mean: RankMean | None
) -> DenseReduction:
    """The faster AllReduce for gradients of this size, and the size of its buckets, equal on all ranks. A collective.

    Args:
        gradient_bytes: bytes of all gradients.
        group: DDP's process group.
        mean: the AllReduce by copy engines, if the transport has one.
    """
    own = _measured(gradient_bytes, measure_all_reduce(lambda data: dist.all_reduce(data, group=group), group, device))
    found = f"the AllReduce of {dist.get_backend(group)}, {own}"
    chosen, used = own, None
    if mean is not None:
        sm_free = _measured(gradient_bytes, measure_all_reduce(lambda data: mean.start(data).wait(), group, device))
        if sm_free.seconds <= own.seconds:
            chosen, used, found = sm_free, mean, f"copy engines, {sm_free}, and not {found}"
        else:
            found = f"{found}, and not copy engines, {sm_free}"
    log_once(
        f"dense gradients: {gradient_bytes / 2**20:.1f} MiB are summed in about {chosen.buckets} buckets by {found}"
    )
    return DenseReduction(gradient_bytes / chosen.buckets / 2**20, used)


class _Measured(NamedTuple):
    """What an AllReduce of the gradients of a model is expected to take."""

    latency: float
    seconds_per_byte: float
    buckets: int
    seconds: float

    def __str__(self) -> str:
        per_mebibyte = self.seconds_per_byte * 2**20 * 1e3
        return f"which takes {self.latency * 1e3:.2f} ms and {per_mebibyte:.2f} ms for each MiB"


def _measured(gradient_bytes: int, times: tuple[float, float]) -> _Measured:
    latency, per_byte = times
    buckets = count_buckets(gradient_bytes, latency, per_byte)
    return _Measured(latency, per_byte, buckets, buckets * latency + gradient_bytes * per_byte)
