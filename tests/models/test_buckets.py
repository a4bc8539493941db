"""Buckets of distances, and times relative to the start of a history."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.models.attention.buckets import bucket_edges, log_bucket, num_buckets, relative_times


def test_edges() -> None:
    """An edge is the smallest distance of its bucket or of a later one."""
    edges = bucket_edges(63)
    bucket = torch.arange(1, 63)
    assert bool((log_bucket(edges[1:], 99) >= bucket).all())
    assert bool((log_bucket(edges[1:] - 1, 99) < bucket).all())
    assert edges[:6].tolist() == [0, 1, 1, 2, 3, 5]
    assert bucket_edges(64)[63] == 2**31 - 1


def naive_bucket(distance: int) -> int:
    """Twice the number of doublings, plus one in the upper half of an octave, with integers only."""
    x = max(distance, 0) + 1
    octave = x.bit_length() - 1
    return 2 * octave + (octave > 0 and (x >> (octave - 1)) & 1)


def test_first_buckets() -> None:
    bucket = log_bucket(torch.arange(-2, 15, dtype=torch.int32), 100)
    assert bucket.tolist() == [0, 0, 0, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7]


@given(st.integers(-(2**20), 2**24 - 2))
@settings(max_examples=300, deadline=None)
def test_equals_integer_arithmetic(distance: int) -> None:
    assert int(log_bucket(torch.tensor([distance], dtype=torch.int32), 1000)) == naive_bucket(distance)


def test_monotone_over_all_int32_and_capped() -> None:
    distance = torch.cat(
        [torch.arange(2**16), torch.logspace(16, 31, 50_000, 2, dtype=torch.float64).clamp(max=2**31 - 1)]
    ).int()
    bucket = log_bucket(distance, 1000)
    assert (bucket.diff() >= 0).all()
    assert int(bucket.max()) + 1 == num_buckets(2**31 - 1) == 63
    assert int(log_bucket(distance, 7).max()) == 6


def test_num_buckets_has_a_bucket_for_the_longest_distance() -> None:
    for longest in (0, 1, 7, 200, 21_000):
        size = num_buckets(longest)
        reached = log_bucket(torch.arange(longest + 1, dtype=torch.int32), 1000)
        assert int(reached.max()) == size - 1


def test_relative_times_start_at_zero_and_saturate() -> None:
    times = torch.tensor([100, 160, 90, 5, 5 + 2**40])
    relative = relative_times(times, torch.tensor([0, 0, 3, 3, 5]))
    assert relative.tolist() == [0, 60, -10, 0, 2**30 - 1]
    assert relative.dtype == torch.int32


def test_relative_times_of_nothing() -> None:
    assert relative_times(torch.empty(0, dtype=torch.int64), torch.tensor([0])).numel() == 0
