"""Sizes of the buckets of the dense gradients."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.embedding import gradient_buckets
from lightning_freescale.embedding.gradient_buckets import (
    DDP_BUCKET_BYTES,
    choose_bucket_megabytes,
    count_buckets,
    may_choose,
)
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


def choices(rank: int, world: int) -> tuple[float, float]:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    assert dist.group.WORLD is not None
    assert may_choose(dist.group.WORLD)
    torch.use_deterministic_algorithms(True)
    assert not may_choose(dist.group.WORLD)
    torch.use_deterministic_algorithms(False)
    alone = dist.new_group([0], backend="gloo")
    if rank == 0:
        assert not may_choose(alone)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    size = 40_000_000
    chosen = choose_bucket_megabytes(size, dist.group.WORLD, device)
    return chosen, size / 2**20


def test_all_ranks_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)  # gloo has waited on the host
    found: list[Any] = run_ranks(choices, 2, (2,))
    assert len(set(found)) == 1
    chosen, whole = found[0]
    assert 0 < chosen <= min(whole, DDP_BUCKET_BYTES / 2**20)
