"""The part of ``contract.py`` that trains: the prioritized exchange equals TorchRec's bit for bit."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.embedding.moment_kernel import MomentKernel
from lightning_freescale.embedding.schedule import ExchangeSchedule
from lightning_freescale.embedding.table_optimizer import kernels_of
from lightning_freescale.embedding.zero_collision.collection import ZeroCollision
from tests.embedding.training import SHARDINGS, build, make_schedule, random_batches, tables, train
from tests.embedding.zero_collision.training import compare_modes


def check_training(rank: int, world: int) -> dict[str, bool]:
    """For every sharding, whether the prioritized exchange equals TorchRec's bit for bit. One more run must differ."""
    dist.init_process_group("gloo")
    return {kind: same_bits(rank, world, kind) for kind in SHARDINGS} | {
        "every row prefetched": same_bits(rank, world, "row_wise", prefetch_all=True),
        "our own kernel": same_bits(rank, world, "row_wise", optimizer="adam"),
        "zero-collision ids": same_bits_with_zero_collision_ids(rank, world),
    }


def same_bits(rank: int, world: int, kind: str, prefetch_all: bool = False, optimizer: str = "rowwise_adagrad") -> bool:
    batches = random_batches(rank, 8, 11, lambda rank, step: 4 + rank)
    plain, module = build(kind, optimizer, world), build(kind, optimizer, world)
    assert all(isinstance(kernel, MomentKernel) for kernel in kernels_of(module))
    expected = train(plain, batches, None)
    schedule = make_schedule(module)
    if prefetch_all:
        ignore_collisions(schedule)
    got = train(module, batches, schedule)
    assert schedule.modules[0].synchronous_reason is None
    assert schedule.modules[0].kjt_index == 0
    first, second = tables(plain), tables(module)
    return expected == got and all(torch.equal(first[name], second[name]) for name in first)


def same_bits_with_zero_collision_ids(rank: int, world: int) -> bool:
    """Buckets are spread evenly here: early releases of TorchRec cannot spread them otherwise."""
    options = {
        "item": ZeroCollision(buckets=6, max_probe=3, evict="ttl", ttl=1, insert=["clicks"], reserved=2),
        "shop": ZeroCollision(buckets=4, max_probe=3, evict="lru"),
    }
    return compare_modes(rank, world, "rowwise_adagrad", look_at="the end", options=options) == (True, True)


def ignore_collisions(schedule: ExchangeSchedule) -> None:
    def detect(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(first, dtype=torch.bool), torch.zeros_like(second, dtype=torch.bool)

    finder = schedule.modules[0].exchange.finder
    finder.fused, finder.detectors = [], [detect for _ in finder.fused]  # type: ignore[misc]
