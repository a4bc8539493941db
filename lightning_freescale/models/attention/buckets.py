"""Logarithmic buckets of the distances between events, which are counted in events or in seconds."""

from __future__ import annotations

import torch
from torch import Tensor

BUCKET_SHIFT = 22  # a float32 has 23 mantissa bits; dropping 22 keeps one, which gives two buckets per doubling
BUCKET_BASE = 0x3F800000 >> BUCKET_SHIFT  # the upper bits of 1.0, the code of distance 0
TIME_LIMIT = 2**30  # half the range of int32, so the difference of two times cannot overflow


def log_bucket(distance: Tensor, buckets: int) -> Tensor:
    """Logarithmic bucket of each distance, two per doubling. Negative distances count as 0.

    The buckets hold the distances 0, 1, 2, 3-4, 5-6, 7-10, 11-14 and so on. Bucket 1 stays empty.

    The upper bits of a float32 (exponent, then mantissa) are a piecewise linear logarithm. IEEE 754 defines how the conversion
    and the addition round, so every implementation on every device finds the same bucket.

    Args:
        distance: int32, any shape.
        buckets: number of buckets; all larger distances share the last one.

    Returns:
        int32, same shape, in ``[0, buckets)``.
    """
    code = (distance.clamp(min=0).to(torch.float32) + 1.0).view(torch.int32) >> BUCKET_SHIFT
    return (code - BUCKET_BASE).clamp_(max=buckets - 1)


def bucket_edges(buckets: int) -> Tensor:
    """The smallest distance of each bucket or of a later one; ``[buckets]`` int32, on the CPU.

    A distance ``d`` is in bucket ``b`` or a later one if ``d >= edges[b]``. Buckets behind the last one have the largest int32.
    """
    low, high = torch.zeros(2, buckets, dtype=torch.int64)
    high += 2**31 - 1
    bucket = torch.arange(buckets)
    while bool((low < high).any()):
        middle = (low + high) // 2
        reached = log_bucket(middle.int(), 2**31 - 1) >= bucket
        low, high = torch.where(reached, low, middle + 1).minimum(high), torch.where(reached, middle, high)
    return low.int()


def num_buckets(max_distance: int) -> int:
    """Number of buckets needed for distances up to ``max_distance``."""
    return int(log_bucket(torch.tensor([max_distance], dtype=torch.int32), 2**31 - 1)) + 1


def relative_times(timestamps: Tensor, offsets: Tensor) -> Tensor:
    """Seconds from the first event of the same history to each event.

    Values are limited to ``2**30`` s (34 years) in both directions, so that two of them can be subtracted in int32.

    Args:
        timestamps: ``[sum(L)]`` int64.
        offsets: ``[B + 1]`` integer, from 0 to ``sum(L)``.

    Returns:
        ``[sum(L)]`` int32.
    """
    if timestamps.numel() == 0:
        return timestamps.to(torch.int32)
    event = torch.arange(timestamps.numel(), device=timestamps.device)
    sample = torch.searchsorted(offsets[1:].contiguous(), event, right=True)
    first = timestamps.index_select(0, offsets.index_select(0, sample).long())
    return (timestamps - first).clamp_(-TIME_LIMIT, TIME_LIMIT - 1).to(torch.int32)


def event_positions(offsets: Tensor, total: int) -> Tensor:
    """Position of each event in its history, from 0; ``[total]`` int64.

    Args:
        offsets: ``[B + 1]`` integer, from 0 to ``total``.
        total: events of all histories.
    """
    event = torch.arange(total, device=offsets.device)
    sample = torch.searchsorted(offsets[1:].contiguous(), event, right=True)
    return event - offsets.index_select(0, sample).long()


def time_gaps(times: Tensor, positions: Tensor) -> Tensor:
    """Seconds from the event before to each event, and 0 for the first event of a history; ``[sum(L)]`` int32.

    Args:
        times: ``[sum(L)]`` int32, the result of :func:`relative_times`.
        positions: ``[sum(L)]``, the result of :func:`event_positions`.
    """
    return (times - times.roll(1)).masked_fill(positions == 0, 0)
