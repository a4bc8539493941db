"""Positions and time gaps against plain Python, and their embeddings."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from lightning_freescale.models.attention.buckets import event_positions, log_bucket, relative_times, time_gaps
from lightning_freescale.models.event_encoding import TIME_BUCKETS, EventEncoding
from tests.models.interpreter import run_interpreted

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


# ---- the kernels -----------------------------------------------------------------------------------------------------
# Lengths of the histories, width, positions and whether gaps are embedded. Some histories are longer than the positions.
CASES: list[tuple[list[int], int, int, bool]] = [
    (LENGTHS, 8, 3, True),
    ([40, 0, 1, 17, 0], 24, 50, True),
    ([1] * 70, 16, 4, True),
    ([5, 90, 33], 80, 33, True),
    ([5, 20], 12, 0, True),
    ([5, 20], 12, 20, False),
    ([], 8, 4, True),
    ([0, 0], 8, 4, True),
]


def make_case(case: tuple[list[int], int, int, bool], device: str) -> tuple[EventEncoding, Tensor, Tensor, Tensor]:
    """An encoding, ``x`` whose rows lie apart, offsets and timestamps: some of them equal, in disorder, or far apart."""
    lengths, width, positions, times = case
    torch.manual_seed(sum(lengths))
    chance = random.Random(0)
    stamps = [chance.choice([0, 1, 50, -7, 86_400, 10**9]) * at + 1_000 for length in lengths for at in range(length)]
    x = torch.randn(sum(lengths), 2 * width)[:, width:]
    encoding = EventEncoding(width, positions, times).to(device)
    return (
        encoding,
        x.to(device),
        torch.tensor([0, *lengths]).cumsum(0).to(device),
        torch.tensor(stamps).long().to(device),
    )


def make_before(offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Events before those of the histories, none before some of them, and the time of the last one: a column, as in states."""
    history = torch.arange(len(offsets) - 1, device=offsets.device)
    times = torch.stack([history, 990 - 10**6 * (history % 2)], 1)
    return history % 3 * 5, times[:, -1]


def results(encoding: EventEncoding, x: Tensor, out: Tensor) -> list[Tensor]:
    """The output and all gradients, on the CPU."""
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device)
    gradients = torch.autograd.grad(out, [x, *encoding.parameters()], weight)
    return [part.detach().cpu() for part in (out, *gradients)]


SCRIPT = """
import torch
from lightning_freescale.models import event_encoding_triton as kernels
from tests.models.test_event_encoding import CASES, make_before, make_case, results

kernels.POSITION_ROWS, kernels.GAP_ROWS, kernels.SUM_COLUMNS, kernels.ENCODED_ELEMENTS = 8, 16, 16, 64
for case in CASES:
    for programs in (1, 4, 4096):
        kernels.POSITION_PROGRAMS = kernels.GAP_PROGRAMS = programs
        encoding, x, offsets, stamps = make_case(case, "cpu")
        x.requires_grad_()
        position, gap = (None if table is None else table.weight for table in (encoding.position, encoding.time_gap))
        got = results(encoding, x, kernels.encode(x, offsets, stamps, position, gap, 3.0))
        expected = results(encoding, x, encoding(x, offsets, stamps, scale=3.0))
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        if case[0] and max(case[0]) > 1:  # the control: other times and offsets give other results
            other = results(encoding, x, encoding(x, offsets, stamps * 3 + torch.arange(len(stamps)), scale=2.0))
            assert not torch.allclose(got[0], other[0], rtol=1e-5, atol=1e-5)
        before = make_before(offsets)
        with torch.no_grad():
            got = kernels.encode(x, offsets, stamps, position, gap, 3.0, before)
            torch.testing.assert_close(got, encoding(x, offsets, stamps, before, 3.0), rtol=1e-5, atol=1e-5)
"""


def test_interpreted_kernels_equal_pytorch() -> None:
    run_interpreted(SCRIPT)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, ([700, 3, 0, 2_000, 64] * 9, 256, 1_500, True), ([9] * 3_000, 512, 16, True)])
def test_kernels_equal_pytorch(case: tuple[list[int], int, int, bool]) -> None:
    """Sums in float32 in another order: 1e-4 of the largest value of each result."""
    encoding, x, offsets, stamps = make_case(case, "cuda")
    x.requires_grad_()
    got = results(encoding, x, encoding(x, offsets, stamps, scale=3.0))
    again = results(encoding, x, encoding(x, offsets, stamps, scale=3.0))
    assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))
    with torch.no_grad():
        got.append(encoding(x, offsets, stamps, make_before(offsets), 3.0).cpu())
    encoding, x, offsets, stamps = make_case(case, "cpu")
    expected = results(encoding, x.requires_grad_(), encoding(x, offsets, stamps, scale=3.0))
    expected.append(encoding(x, offsets, stamps, make_before(offsets), 3.0).detach())
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0, atol=1e-4 * float(other.abs().max() if other.numel() else 0) + 1e-6
        )
