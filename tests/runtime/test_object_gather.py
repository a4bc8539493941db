"""``gather_objects`` gives what ``torch.distributed.all_gather_object`` gives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_freescale.runtime.object_gather import SLOT_BYTES, gather_objects
from tests.ranks import run_ranks


def values_of(rank: int) -> list[Any]:
    """Small objects, objects at the limit of a slot, and a large object on one rank alone."""
    texts = ["x" * (SLOT_BYTES + more) for more in range(-40, 8)]
    large = list(range(100_000)) if rank == 1 else None
    return [None, rank, {"rank": rank}, ("text", str(rank) * rank), *texts, texts[rank * 20], large]


def gather_both(rank: int) -> int:
    dist.init_process_group("gloo")
    for value in values_of(rank):
        expected: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(expected, value)
        assert gather_objects(value) == expected
    tensors = gather_objects({"state": torch.full((1000,), rank)})
    assert [int(found["state"].sum()) for found in tensors] == [1000 * other for other in range(dist.get_world_size())]
    return len(values_of(rank))


def test_every_rank_gets_the_objects_of_all_ranks() -> None:
    assert run_ranks(gather_both, world=3) == [len(values_of(0))] * 3
