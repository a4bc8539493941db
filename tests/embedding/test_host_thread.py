"""A schedule with a host thread trains as one without it, bit for bit, however slow the thread is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.embedding import exchange_mode
from lightning_freescale.embedding.prioritized import PrioritizedEmbedding
from lightning_freescale.embedding.schedule import ExchangeSchedule
from lightning_freescale.runtime.errors import FreeScaleError
from tests import toy
from tests.embedding.comparison import case, compare
from tests.embedding.training import SHARDINGS, build_bags
from tests.ranks import run_ranks

THREAD = "freescale-schedule"


def slow_thread(schedule: ExchangeSchedule) -> None:
    """The thread takes longer than the backward, so that the results depend on the waits for it."""
    for module in schedule.modules:
        gradients = module.exchange.gradients
        gradients.apply_late = _slow_in_thread(gradients.apply_late)


def _slow_in_thread(method: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*arguments: Any) -> Any:
        if threading.current_thread().name == THREAD:
            time.sleep(0.02)
        return method(*arguments)

    return slow


def do_not_wait(schedule: ExchangeSchedule) -> None:
    """The gradients are then handed over before it is known which of them leave first."""
    slow_thread(schedule)
    schedule.modules[0].exchange.gradients.await_host = lambda: None


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_sharding(world: int) -> None:
    cases = [
        case(world, kind=kind, optimizer=optimizer, seed=seed, host_thread=True, sabotage=sabotage)
        for seed, kind in enumerate(SHARDINGS)
        for optimizer, sabotage in (("adagrad", None), ("sgd", slow_thread))
    ]
    for result in run_ranks(compare, world, args=(world, cases)):
        assert result == [True] * len(cases)


def test_bags_flushes_and_a_batch_that_replaces_a_prefetched_one() -> None:
    cases = [
        case(2, kind="mixed", optimizer="rowwise_adagrad", wrong_prefetch=True, host_thread=True),
        case(2, steps=8, kind="row_wise", optimizer="sgd", flush_at=(0, 1, 5, 7), host_thread=True),
        case(2, kind="row_wise", optimizer="sgd", make=build_bags, host_thread=True, sabotage=slow_thread),
    ]
    for result in run_ranks(compare, 2, args=(2, cases)):
        assert result == [True] * len(cases)


def test_the_waits_are_needed() -> None:
    """Without the wait in the backward, the schedule takes the backward for one that was not announced."""
    cases = [case(2, kind="row_wise", optimizer="sgd", host_thread=True, sabotage=do_not_wait)]
    with pytest.raises(Exception, match="backward"):
        run_ranks(compare, 2, args=(2, cases))


# ---- the strategy ------------------------------------------------------------------------------------------------------
def fit(rank: int, options: dict[str, Any], fails: bool) -> tuple[list[float], set[str], str]:
    """The losses, the threads that planned rows, and the error of a training over the transport ``host``."""
    exchange_mode.uses_host_thread = lambda backend, device: backend == "freescale"
    plan_rows, threads = PrioritizedEmbedding.plan_rows, []

    def noted(self: PrioritizedEmbedding, batch: Any) -> Any:
        threads.append(threading.current_thread().name)
        if fails and rank == 1 and len(threads) == 3:
            raise FreeScaleError(f"rank {rank}: no plan")
        return plan_rows(self, batch)

    PrioritizedEmbedding.plan_rows = noted  # type: ignore[method-assign]
    model = toy.Model()
    strategy = FreeScaleStrategy(balance="off", transport="host", timeout=20.0, **options)
    trainer = toy.trainer(strategy, 2, max_epochs=1)
    error = ""
    try:
        trainer.fit(model, toy.loader())
    except Exception as raised:
        error = "\n".join([str(raised), *getattr(raised, "__notes__", [])])
    return model.losses, set(threads), error


def test_the_strategy_trains_alike_with_the_thread() -> None:
    synchronous, prioritized = (run_ranks(fit, args=({"prioritize": mode}, False)) for mode in (False, True))
    assert [losses for losses, _, _ in synchronous] == [losses for losses, _, _ in prioritized]
    assert all(threads == {"MainThread", THREAD} for _, threads, _ in prioritized)  # the first step has no thread


def test_an_error_in_the_thread_ends_the_training_on_all_ranks() -> None:
    for _, _, error in run_ranks(fit, args=({"prioritize": True}, True)):
        assert "rank 1" in error


def test_zero_collision_tables_and_other_transports_do_without_the_thread() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert exchange_mode.uses_host_thread("freescale", cuda)
    assert not exchange_mode.uses_host_thread("freescale", cpu)
    assert not exchange_mode.uses_host_thread("nccl", cuda)
