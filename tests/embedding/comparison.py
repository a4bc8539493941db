"""Compares the prioritized exchange with the synchronous one, bit for bit, on one rank of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.embedding.training import Batches, Sharded, build, make_schedule, random_batches, tables, train


def compare(rank: int, world: int, cases: list[dict[str, Any]]) -> list[bool]:
    """For each case: whether both modes agree in every bit on this rank. Asserts that the prioritized mode was used."""
    dist.init_process_group("gloo")
    return [compare_case(rank, world, **case) for case in cases]


def compare_case(
    rank: int,
    world: int,
    kind: str,
    optimizer: str,
    batches: list[Batches],
    make: Callable[..., Sharded] = build,
    rates: Any = lambda step: 0.1,
    sabotage: Any = None,
    flush_at: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
    wrong_prefetch: bool = False,
    window: int = 1,
) -> bool:
    """One case of :func:`compare`.

    Args:
        batches: those of every rank.
        make: builds the sharded collection, with ``options``.
        sabotage: changes the schedule before the training.
        flush_at: steps after which the schedule is flushed.
        window: batches whose gradients are accumulated.
    """
    options, mine = options or {}, batches[rank]
    shared: dict[str, Any] = {"weighted": options.get("weighted", False), "window": window, "rates": rates}
    plain, module = (make(kind, optimizer, world, **options) for _ in range(2))
    expected = train(plain, mine, None, **shared)
    schedule = make_schedule(module)
    if sabotage is not None:
        sabotage(schedule)

    def flush(step: int) -> None:
        if step in flush_at:
            schedule.flush()

    got = train(module, mine, schedule, between=flush, wrong_prefetch=wrong_prefetch, **shared)
    scheduled = schedule.modules[0]
    assert scheduled.synchronous_reason is None, scheduled.synchronous_reason
    assert len(mine) < 2 or scheduled.kjt_index == 0
    a, b = tables(plain), tables(module)
    return got == expected and a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def case(
    world: int, steps: int = 6, seed: int = 0, samples: Any = lambda rank, step: 4, **kwargs: Any
) -> dict[str, Any]:
    """A case of :func:`compare` with random batches."""
    return {"batches": [random_batches(rank, steps, seed, samples) for rank in range(world)], **kwargs}
