"""Positions and time gaps against plain Python, and their embeddings."""

from __future__ import annotations

import torch

from lightning_freescale.models.attention.buckets import event_positions, log_bucket, relative_times, time_gaps
from lightning_freescale.models.event_encoding import TIME_BUCKETS, EventEncoding

LENGTHS = [3, 0, 1, 4]
TIMES = [[100, 160, 160], [], [7], [5, 4, 10**9, 2 * 10**9 + 7]]
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
TIMESTAMPS = torch.tensor([time for own in TIMES for time in own])


def expected_gaps() -> list[int]:
    """Seconds since the event before. Times later than 2**30 s after the first event are cut off at this value."""
    gaps = []
    for own in TIMES:
        cut = [min(time - own[0], 2**30 - 1) for time in own]
        gaps += [0 if at == 0 else cut[at] - cut[at - 1] for at in range(len(cut))]
    return gaps


def test_positions_and_gaps_equal_plain_python() -> None:
    positions = event_positions(OFFSETS, len(TIMESTAMPS))
    assert positions.tolist() == [at for length in LENGTHS for at in range(length)]
    assert time_gaps(relative_times(TIMESTAMPS, OFFSETS), positions).tolist() == expected_gaps()
    assert event_positions(torch.tensor([0]), 0).numel() == 0


def test_each_event_gets_the_embeddings_of_its_position_and_gap() -> None:
    torch.manual_seed(0)
    encoding = EventEncoding(8, positions=3, times=True)
    x = torch.randn(len(TIMESTAMPS), 8)
    got = encoding(x, OFFSETS, TIMESTAMPS)
    buckets = log_bucket(torch.tensor(expected_gaps(), dtype=torch.int32), TIME_BUCKETS).tolist()
    positions = [min(at, 2) for length in LENGTHS for at in range(length)]  # later events share the last embedding
    assert encoding.position is not None
    assert encoding.time_gap is not None
    for at, (position, bucket) in enumerate(zip(positions, buckets, strict=True)):
        assert torch.equal(got[at], x[at] + encoding.position.weight[position] + encoding.time_gap.weight[bucket])


def test_parts_that_are_off_do_not_exist() -> None:
    x = torch.randn(len(TIMESTAMPS), 8)
    assert not list(EventEncoding(8, positions=0, times=False).parameters())
    assert torch.equal(EventEncoding(8, positions=0, times=False)(x, OFFSETS, TIMESTAMPS), x)
    assert [name for name, _ in EventEncoding(8, positions=0, times=True).named_parameters()] == ["time_gap.weight"]
