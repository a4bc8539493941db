"""Bags: the prioritized exchange gives the losses, weights and optimizer state of the synchronous one, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchrec import PoolingType
from torchrec.modules.embedding_configs import DataType

from lightning_freescale.embedding import prioritized_bags
from lightning_freescale.embedding.schedule import ExchangeSchedule
from lightning_freescale.embedding.stages import ComputingBatch, Requests, RowSet
from tests.embedding.comparison import case, compare
from tests.embedding.training import (
    BAG_SHARDINGS,
    OPTIMIZERS,
    Batches,
    build_bags,
    make_schedule,
    random_batches,
    train,
)
from tests.ranks import run_ranks

SUM, MEAN, WEIGHTED, HALF = (
    {"options": options}
    for options in ({}, {"pooling": PoolingType.MEAN}, {"weighted": True}, {"data_type": DataType.FP16})
)
BAGS = {"make": build_bags, "rates": lambda step: 0.1 / (1 + step)}


def bags(world: int, steps: int = 6, **kwargs: Any) -> dict[str, Any]:
    return BAGS | case(world, steps, **kwargs)


@pytest.mark.parametrize("world", [1, 4])
def test_every_sharding_and_pooling(world: int) -> None:
    variants = [("rowwise_adagrad", SUM), ("adam", MEAN), ("decayed_lamb", WEIGHTED)]
    cases = [
        bags(world, kind=kind, optimizer=optimizer, seed=seed, **pooling)
        for seed, kind in enumerate(BAG_SHARDINGS)
        for optimizer, pooling in (variants if world == 2 else [variants[seed % 3]])
    ]
    cases.append(bags(world, kind="both", optimizer="adagrad", flush_at=(0, 3, 4)))
    for result in run_ranks(compare, world, args=(world, cases), timeout=120):
        assert result == [True] * len(cases)


def test_uneven_batches_an_empty_rank_and_steps_without_ids() -> None:
    shapes = [
        lambda rank, step: 1 + 3 * rank,
        lambda rank, step: 0 if rank == 1 or step in (0, 3, 7) else 4,
    ]
    cases = [
        bags(3, kind=kind, optimizer="rowwise_adagrad", samples=shape, seed=10 + i, **MEAN)
        for i, shape in enumerate(shapes)
        for kind in ("one_rank", "both")
    ]
    for result in run_ranks(compare, 3, args=(3, cases), timeout=120):
        assert result == [True] * len(cases)


def draw_batches(data: st.DataObject, world: int, kind: str) -> list[Batches]:
    """Some steps for each rank. Gloo exchanges row-wise bags only if all ranks have the same number of samples in a step."""
    ids = st.lists(st.integers(0, 23), max_size=4)
    batches: list[Batches] = [[] for _ in range(world)]
    for _ in range(data.draw(st.integers(1, 6))):
        same = data.draw(st.integers(1, 3))
        fewest, most = (same, same) if kind in ("row_wise", "mixed") else (0, 3)
        for of_rank in batches:
            of_rank.append(data.draw(st.lists(st.tuples(ids, ids, ids).map(list), min_size=fewest, max_size=most)))
    return batches


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_data(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 4))
    drawn = []
    for kind in data.draw(st.permutations(BAG_SHARDINGS))[
        :4
    ]:  # starting processes is slow: run several cases in each set
        drawn.append(
            BAGS
            | {
                "kind": kind,
                "optimizer": data.draw(st.sampled_from(OPTIMIZERS)),
                **data.draw(st.sampled_from([SUM, MEAN, WEIGHTED, HALF])),
                "batches": draw_batches(data, world, kind),
            }
        )
    for result in run_ranks(compare, world, args=(world, drawn), timeout=120):
        assert result == [True] * len(drawn)


# ---- negative controls: the comparison detects each error ------------------------------------------------------------
def prefetch_every_bag(schedule: ExchangeSchedule) -> None:
    def detect(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(first, dtype=torch.bool), torch.zeros_like(second, dtype=torch.bool)

    finder = schedule.modules[0].exchange.finder
    finder.detectors = [detect for _ in finder.detectors]  # type: ignore[misc]


def update_all_rows_of_urgent_bags(schedule: ExchangeSchedule) -> None:
    """Rows that also occur in late bags are then updated twice."""
    gradients = schedule.modules[0].exchange.gradients
    return_set = gradients.return_set

    def whole_bags(group: int, requests: Requests, rows: RowSet) -> RowSet:
        found = return_set(group, requests, rows)
        exchange = schedule.modules[0].exchange
        return replace(found, features=exchange._fetch_set(group, requests, rows).features)

    gradients.return_set = whole_bags  # type: ignore[method-assign]


def forget_urgent_gradients(schedule: ExchangeSchedule) -> None:
    """Rows that wait for late gradients then miss those that have arrived with the urgent ones."""
    gradients = schedule.modules[0].exchange.gradients
    update = gradients.update

    def forgetful(group: int, rows: Any, received: torch.Tensor, batch: ComputingBatch) -> None:
        batch.received.clear()
        update(group, rows, received, batch)

    gradients.update = forgetful  # type: ignore[method-assign]


def add_partial_sums_in_the_order_of_ranks(schedule: ExchangeSchedule) -> None:
    """Differs from gloo's order with three or more ranks."""
    exchange = schedule.modules[0].exchange
    output = exchange._output

    def summed(context: Any, outputs: list[Any]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prioritized_bags, "own_segments", lambda width, samples, rank: [(0, width * samples[rank])])
            return output(context, outputs)

    exchange._output = summed  # type: ignore[method-assign]


def send_all_bags_late(schedule: ExchangeSchedule) -> None:
    """Negative control of the controls: nothing is wrong with it, it is only slow."""
    finder = schedule.modules[0].exchange.finder
    finder.detectors = [
        lambda first, second: (torch.ones_like(first, dtype=torch.bool), torch.ones_like(second, dtype=torch.bool))
        for _ in finder.detectors
    ]  # type: ignore[misc]


def test_the_comparison_detects_errors() -> None:
    wrong = [prefetch_every_bag, update_all_rows_of_urgent_bags, forget_urgent_gradients]
    cases = [
        bags(2, kind="table_wise", optimizer="rowwise_adagrad", sabotage=change)
        for change in (*wrong, None, send_all_bags_late)
    ]
    results = run_ranks(compare, 2, args=(2, cases))
    equal = [all(of_case) for of_case in zip(*results, strict=True)]
    assert equal == [False, False, False, True, True]


def test_the_order_of_partial_sums_matters() -> None:
    changes = (add_partial_sums_in_the_order_of_ranks, None)
    cases = [bags(4, kind="row_wise", optimizer="sgd", sabotage=change) for change in changes]
    assert [all(of_case) for of_case in zip(*run_ranks(compare, 4, args=(4, cases)), strict=True)] == [False, True]


def kinds_of_bags(rank: int) -> tuple[int, int]:
    """The pieces that this rank has requested, and those of colliding bags."""
    dist.init_process_group("gloo")
    module = build_bags("table_wise", "sgd", 2)
    schedule = make_schedule(module)
    train(module, random_batches(rank, 8, 0, lambda r, s: 4), schedule)
    stats = schedule.modules[0].exchange.stats
    return stats.rows, stats.collisions


def test_some_bags_travel_early() -> None:
    for rows, collisions in run_ranks(kinds_of_bags):
        assert 0 < collisions < rows
