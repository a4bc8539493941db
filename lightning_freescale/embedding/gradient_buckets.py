"""The size of the buckets in which DDP sums the gradients of the dense parameters, from a measurement of the AllReduce.

DDP starts the AllReduce of a bucket when its gradients are ready, beside the rest of the backward. The last bucket is ready at
the end of the backward, so a rank waits for all of it. DDP's default, 25 MiB, leaves a wait of many milliseconds on a slow link.
Small buckets make this wait short. But each AllReduce has a latency, so many small buckets take longer in total than the backward
can hide.

The gradients of a layer become ready at about the same time. If a bucket also has the first gradient of the next layer, it waits
for all of that layer. The last layer of the backward then takes part in several AllReduces at the end. So each bucket consists of
whole layers, and :func:`choose_bucket_bytes` chooses of how many.

Two runs may measure different times and choose different sizes. The place of a gradient in its bucket decides in which order the
ranks are added, so the runs then differ by rounding. ``Trainer(deterministic=True)`` keeps DDP's default.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from lightning_freescale.runtime.log import log_once

DDP_BUCKET_BYTES = 25 * 2**20  # DDP's default
# The time of a backward is not known. These are possible ones, as multiples of the time of one AllReduce of all gradients.
BACKWARDS = 3.0, 6.0, 12.0
# An AllReduce beside the backward slows the compute, because NCCL's kernels use SMs: by this share of its own time.
SLOWDOWN = 0.08
# Two sizes, and how often each is measured. The fastest time counts. The latency follows from the smaller size. With few
# measurements a busy host makes it too long, and equal trainings choose different numbers of buckets.
MEASURED_BYTES = 64 * 2**10, 8 * 2**20
REPETITIONS = 12, 4
IN_A_ROW = 4  # AllReduces of one measurement. The host starts each of them while another one runs, as in a backward.


def layer_of(name: str) -> str:
    """The layer of a parameter: the element of the innermost list of modules that it belongs to, otherwise its module.

    >>> layer_of("hstu.layers.3.norm.weight"), layer_of("head.weight")
    ('hstu.layers.3', 'head')
    """
    modules = name.split(".")[:-1]
    numbers = [place for place, part in enumerate(modules) if part.isdigit()]
    return ".".join(modules[: numbers[-1] + 1] if numbers else modules)


def layers_in_backward(parameters: Iterable[tuple[str, int]]) -> list[int]:
    """Bytes of each layer, in the order in which a backward computes their gradients: the last layer comes first.

    Args:
        parameters: name and bytes of each parameter, in the order of the model.

    >>> layers_in_backward([("layers.0.weight", 8), ("layers.0.bias", 4), ("layers.1.weight", 8), ("head.weight", 2)])
    [2, 8, 12]
    """
    layers: dict[str, int] = {}
    for name, size in parameters:
        layers[layer_of(name)] = layers.get(layer_of(name), 0) + size
    return list(layers.values())[::-1]


def divide_layers(layers: Sequence[int], bucket_bytes: float, model_order: bool = False) -> list[int]:
    """Number of layers in each bucket. As in DDP, a bucket is complete when it has ``bucket_bytes``.

    Args:
        layers: bytes of each layer, in the order of the backward.
        bucket_bytes: bytes with which a bucket is complete.
        model_order: whether DDP fills the buckets in the order of the model, as it does at first. It keeps these buckets with
            ``find_unused_parameters``. Otherwise it fills new ones after the first backward, in the order of the gradients.

    >>> divide_layers([2, 8, 12, 4], 10), divide_layers([2, 8, 12, 4], 10, model_order=True)
    ([2, 1, 1], [2, 2])
    """
    if model_order:
        return divide_layers(layers[::-1], bucket_bytes)[::-1]
    counts, filled = [0], 0
    for size in layers:
        if filled >= bucket_bytes:
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += size
    return counts


def expected_seconds(layers: Sequence[int], counts: Sequence[int], latency: float, seconds_per_byte: float) -> float:
    """What the AllReduces of these buckets add to a step: the wait at the end of the backward, and slower compute.

    It is the mean over the possible times of a backward. Within a backward, gradients become ready in proportion to their bytes.

    Args:
        layers: bytes of each layer, in the order of the backward.
        counts: number of layers in each bucket.
    """
    whole, total = sum(layers), 0.0
    buckets = [sum(layers[end - count : end]) for count, end in zip(counts, accumulate(counts), strict=True)]
    seconds = [latency + size * seconds_per_byte for size in buckets]
    for multiple in BACKWARDS:
        backward = multiple * (latency + whole * seconds_per_byte)
        ended = 0.0
        for ready, taken in zip(accumulate(buckets), seconds, strict=True):
            ended = max(ended, ready / whole * backward) + taken
        total += ended - backward
    return total / len(BACKWARDS) + SLOWDOWN * sum(seconds)


def choose_bucket_bytes(
    layers: Sequence[int], latency: float, seconds_per_byte: float, model_order: bool = False
) -> int:
    """Bytes with which a bucket is complete, at most those of DDP's default.

    Args:
        layers: bytes of each layer, in the order of the backward.
        latency: seconds of an AllReduce of few bytes.
        seconds_per_byte: seconds of each further byte.
        model_order: see :func:`divide_layers`.

    Four layers on a slow link: the first bucket has three of them, so that the wait at the end is for one layer only.

    >>> divide_layers([330_000] * 4, choose_bucket_bytes([330_000] * 4, 3e-4, 7e-10))
    [3, 1]
    """
    # The bytes of the first layers and of the last ones: the first or the last bucket has as many layers as that.
    several = {*accumulate(layers), *accumulate(reversed(layers))}
    sizes = {min(size, DDP_BUCKET_BYTES) for size in several if size}

    def cost(size: int) -> tuple[float, int]:
        counts = divide_layers(layers, size, model_order)
        return expected_seconds(layers, counts, latency, seconds_per_byte), -size

    return min(sizes, key=cost, default=DDP_BUCKET_BYTES)


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


def choose_bucket_megabytes(
    parameters: Sequence[tuple[str, int]], group: dist.ProcessGroup, device: torch.device, model_order: bool = False
) -> float:
    """DDP's ``bucket_cap_mb``, equal on all ranks. A collective.

    Args:
        parameters: name and bytes of each dense parameter that needs a gradient, in the order of the model.
        group: the ranks that sum the gradients.
        device: that of the gradients.
        model_order: see :func:`divide_layers`.
    """
    latency, per_byte = measure_all_reduce(group, device)
    layers = layers_in_backward(parameters)
    chosen = choose_bucket_bytes(layers, latency, per_byte, model_order)
    counts = divide_layers(layers, chosen, model_order)
    log_once(
        f"bucket_cap_mb: the {sum(layers) / 2**20:.1f} MiB of dense gradients are summed in about {len(counts)} buckets, and the "
        f"last one has {sum(layers[-counts[-1] :]) / 2**20:.1f} MiB. An AllReduce takes {latency * 1e3:.2f} ms and "
        f"{per_byte * 2**20 * 1e3:.2f} ms for each MiB here"
    )
    return chosen / 2**20
