"""Distances between events, in positions and in seconds, and their logarithmic buckets."""

from __future__ import annotations

import torch
from torch import Tensor

BUCKET_SHIFT = 22  # of the 23 mantissa bits of a float32, the ones dropped: one is kept, so 2 buckets per doubling
BUCKET_BASE = 0x3F800000 >> BUCKET_SHIFT  # the bits of 1.0
_TIME_LIMIT = 2**30  # half the range of int32: the difference of two times cannot overflow


def log_bucket(distance: Tensor, buckets: int) -> Tensor:
    """Logarithmic bucket of each distance, two per doubling: 0, 1, 2, 3-4, 5-6, 7-10, 11-14, ...; negative counts as 0.

    The upper bits of a float32 (exponent, then mantissa) are a piecewise linear logarithm. Conversion and addition are
    exact or rounded as IEEE 754 says, so every implementation on every device finds the same bucket.

    Args:
        distance: int32, any shape.
        buckets: size of the table; larger distances share its last bucket.

    Returns:
        int32, same shape, in ``[0, buckets)``.
    """
    code = (distance.clamp(min=0).to(torch.float32) + 1.0).view(torch.int32) >> BUCKET_SHIFT
    return (code - BUCKET_BASE).clamp_(max=buckets - 1)


def num_buckets(max_distance: int) -> int:
    """Size of a table in which no distance up to ``max_distance`` shares the last bucket with longer ones."""
    return int(log_bucket(torch.tensor([max_distance], dtype=torch.int32), 2**31 - 1)) + 1


def relative_times(timestamps: Tensor, offsets: Tensor) -> Tensor:
    """Seconds since the first event of the same history.

    Saturates at ``2**30`` s (34 years) either way, which leaves room to subtract in int32.

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
    return (timestamps - first).clamp_(-_TIME_LIMIT, _TIME_LIMIT - 1).to(torch.int32)
