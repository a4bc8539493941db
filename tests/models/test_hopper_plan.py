"""The plan of the Hopper kernels by Triton kernels against PyTorch operations: in Triton's interpreter, and compiled."""

from __future__ import annotations

import pytest
import torch

from lightning_freescale.models.attention import hopper
from lightning_freescale.models.attention.buckets import bucket_edges, relative_times
from tests.models.interpreter import run_interpreted

CASES = ([0, 5, 128, 129, 0, 300, 1], [64, 128, 64], [3], [0, 0], [40] * 17 + [200, 0, 128, 192])
SCHEDULES = ((192, 64, False), (128, 64, True), (64, 64, False))


def compare(lengths: list[int], device: str = "cpu", shift: int = 0) -> bool:
    """Whether both plans are equal, where the kernels read them. ``shift`` changes the offsets of one plan."""
    from lightning_freescale.models.attention.hopper_plan import HopperPlan  # Triton may be missing

    offsets = torch.tensor([0, *lengths]).cumsum(0)
    total = sum(lengths)
    timestamps = torch.randint(10**10, (total,), generator=torch.Generator().manual_seed(0)).sort().values
    want = hopper.plan(offsets, total, relative_times(timestamps, offsets), bucket_edges(hopper.BIAS_SLOTS))
    moved = (offsets - shift).clamp(min=0).to(device)
    got = HopperPlan(moved, total, timestamps.to(device), want.edges)
    records = sum(-(-length // hopper.RECORD_EVENTS) for length in lengths)
    pairs = [(want.scale(), got.scale()), (want.records()[:records], got.records()[:records])]
    for key in SCHEDULES:
        expected, found = want.schedule(*key), got.schedule(*key)
        used = int((expected[:, 1] > 0).sum())
        assert len(expected) == len(found)
        assert not found[used:, 1].any()
        pairs.append((expected[:used], found[:used]))
    return all(torch.equal(x, y.cpu()) for x, y in pairs)


SCRIPT = """
from lightning_freescale.models import tiles_triton
from tests.models.test_hopper_plan import CASES, compare

tiles_triton.BLOCK = 16  # the histories of the last case are more than one block
for lengths in CASES:
    assert compare(lengths), lengths
assert not compare([64, 128, 64], shift=1)  # negative control
"""
CONSTANTS_SCRIPT = """
from lightning_freescale.models import tiles_triton
from lightning_freescale.models.attention import hopper_plan
from tests.models.test_hopper_plan import SCHEDULES, compare

class Recorded:
    def __init__(self, kernel, first): self.kernel, self.first, self.seen = kernel, first, set()
    def __getitem__(self, grid):
        def start(*values, **options):
            self.seen.add(values[self.first :])
            self.kernel[grid](*values, **options)
        return start

schedule, events = Recorded(hopper_plan._schedule, 3), Recorded(hopper_plan._events, 5)
hopper_plan._schedule, hopper_plan._events = schedule, events
for count in (1, 16, 17, 40):
    assert compare([3] * count)
assert (len(schedule.seen), len(events.seen)) == (len(SCHEDULES), 1)
tiles_triton.BLOCK = 16  # negative control: another constant
assert compare([3])
assert (len(schedule.seen), len(events.seen)) == (2 * len(SCHEDULES), 2)
"""


def test_interpreted_kernels_equal_the_operations() -> None:
    run_interpreted(SCRIPT)


def test_another_number_of_histories_compiles_no_kernel() -> None:
    """Triton compiles a kernel for each value of its constants."""
    run_interpreted(CONSTANTS_SCRIPT)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [*CASES, [21_000, *range(1500)]], ids=lambda lengths: f"{len(lengths)} histories")
def test_compiled_kernels_equal_the_operations(lengths: list[int]) -> None:
    assert compare(lengths, "cuda")
    assert sum(lengths) == 0 or not compare(lengths, "cuda", shift=1)  # negative control
