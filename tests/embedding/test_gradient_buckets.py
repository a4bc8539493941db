"""Sizes of the buckets of the dense gradients."""

from __future__ import annotations

import doctest
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.embedding import gradient_buckets
from lightning_freescale.embedding.gradient_buckets import (
    DDP_BUCKET_BYTES,
    choose_reduction,
    count_buckets,
    may_choose,
)
from lightning_freescale.transport import Options
from lightning_freescale.transport.rank_mean import RankMean
from tests.ranks import run_ranks


def test_examples() -> None:
    assert doctest.testmod(gradient_buckets).failed == 0


def test_buckets_are_never_larger_than_those_of_ddp() -> None:
    assert count_buckets(10 * DDP_BUCKET_BYTES, 1.0, 0.0) == 10
    assert count_buckets(1, 1.0, 0.0) == 1
    assert count_buckets(0, 1e-6, 1e-9) == 1


def test_a_longer_latency_makes_fewer_buckets() -> None:
    counts = [count_buckets(40_000_000, latency, 1e-9) for latency in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 10 * counts[-1]


class SlowMean(RankMean):
    """An AllReduce by copy engines that takes at least this many seconds."""

    seconds = 0.0

    def start(self, tensor: Any) -> Any:
        time.sleep(self.seconds)
        return super().start(tensor)


def choices(rank: int, world: int) -> tuple[Any, ...]:
    dist.init_process_group("gloo")
    group, device = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    assert may_choose(group)
    torch.use_deterministic_algorithms(True)
    assert not may_choose(group)
    torch.use_deterministic_algorithms(False)
    alone = dist.new_group([0], backend="gloo")
    if rank == 0:
        assert not may_choose(alone)
    size = 40_000_000
    without = choose_reduction(size, group, device, None)
    assert without.mean is None
    mean = SlowMean(dist.new_group(backend="freescale", pg_options=Options(cpu="queue")), device)
    measured = choose_reduction(size, group, device, mean)  # either may be faster here
    mean.seconds = 0.1
    slow = choose_reduction(size, group, device, mean)
    assert slow.mean is None
    mean.seconds = 0.0
    all_reduce = dist.all_reduce

    def slow_all_reduce(*args: Any, **options: Any) -> Any:
        time.sleep(0.1)
        return all_reduce(*args, **options)

    dist.all_reduce = slow_all_reduce
    fast = choose_reduction(size, group, device, mean)
    assert fast.mean is mean
    return without.bucket_megabytes, measured.bucket_megabytes, measured.mean is None, size / 2**20


def test_all_ranks_choose_the_same_and_the_faster_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)  # both have waited on the host
    found: list[Any] = run_ranks(choices, 2, (2,))
    assert len(set(found)) == 1
    for chosen in found[0][:2]:
        assert 0 < chosen <= min(found[0][-1], DDP_BUCKET_BYTES / 2**20)
