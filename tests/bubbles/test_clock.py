"""The offsets between the clocks of ranks: exact for one machine, close for clocks that differ."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from lightning_freescale.bubbles.clock import clock_offset
from tests.ranks import run_ranks


def measure(rank: int, skews: list[float]) -> float:
    dist.init_process_group("gloo")
    return clock_offset(None, clock=lambda: time.monotonic() + skews[rank])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_one_machine_has_one_clock(world: int) -> None:
    assert run_ranks(measure, world, args=([0.0] * world,)) == [0.0] * world


def test_clocks_that_differ() -> None:
    skews = [3.0, -250.0, 1e6]
    offsets = run_ranks(measure, 3, args=(skews,))
    assert offsets[0] == 0.0
    for offset, skew in zip(offsets, skews, strict=True):
        assert offset + skew == pytest.approx(skews[0], abs=0.02)
