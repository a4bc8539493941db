"""The thread beside the backward: the order of its work, its errors, and the same bits as without it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from lightning_freescale.embedding.background import NAME, Background
from lightning_freescale.embedding.schedule import ExchangeSchedule
from tests.embedding.comparison import case, compare
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def test_work_runs_in_order_in_a_thread_and_join_waits_for_it() -> None:
    background, done = Background(CPU, threaded=True), []

    def work(number: int) -> Callable[[], None]:
        def append() -> None:
            time.sleep(0.02)
            background.join()  # in the thread itself there is nothing to wait for
            done.append((number, threading.current_thread().name))

        return append

    for number in range(3):
        background.run(work(number))
    assert len(done) < 3
    background.join()
    assert done == [(number, NAME) for number in range(3)]
    background.close()
    assert NAME not in [thread.name for thread in threading.enumerate()]


def test_work_without_a_thread_runs_at_once() -> None:
    names: list[str] = []
    Background(CPU).run(lambda: names.append(threading.current_thread().name))
    assert names == [threading.current_thread().name]


def test_an_error_is_raised_once_where_the_caller_waits() -> None:
    def fail() -> None:
        raise ValueError("the transfer of step 7")

    background, done = Background(CPU, threaded=True), []
    background.run(fail)
    with pytest.raises(ValueError, match="step 7"):
        background.join()
    background.run(lambda: done.append(True))  # it goes on
    background.join()
    background.run(fail)
    background.run(lambda: done.append(True))
    with pytest.raises(ValueError, match="step 7"):
        background.join()
    background.join()
    assert done == [True]  # the work after the failed one is left out
    background.close()


def test_the_thread_changes_no_bit() -> None:
    cases = [
        case(2, steps=8, kind=kind, optimizer=optimizer, seed=seed, flush_at=flush_at, threaded=True, **options)
        for seed, (kind, optimizer, flush_at, options) in enumerate(
            [
                ("row_wise", "rowwise_adagrad", (), {"rates": lambda step: 0.1 / (1 + step)}),
                ("mixed", "adam", (0, 3, 4), {}),
                ("row_wise", "adagrad", (), {"wrong_prefetch": True}),
                ("mixed", "sgd", (), {"samples": lambda rank, step: 0 if (rank + step) % 3 == 0 else 3}),
            ]
        )
    ]
    for result in run_ranks(compare, 2, args=(2, cases)):
        assert result == [True] * len(cases)


def slow(schedule: ExchangeSchedule) -> None:
    """The work takes so long that the backward has to wait for it."""
    start = schedule.background.run

    def run_late(work: Callable[[], None]) -> None:
        start(lambda: (time.sleep(0.03), work())[0])

    schedule.background.run = run_late  # type: ignore[method-assign]


def without_wait(schedule: ExchangeSchedule) -> None:
    slow(schedule)
    schedule.modules[0].exchange.gradients.background = Background(CPU)


def test_the_backward_waits_for_the_thread() -> None:
    kept = case(2, kind="row_wise", optimizer="sgd", sabotage=slow, threaded=True)
    assert run_ranks(compare, 2, args=(2, [kept])) == [[True], [True]]
    with pytest.raises(Exception, match="backward"):  # the control: gradients come before they are expected
        run_ranks(compare, 2, args=(2, [kept | {"sabotage": without_wait}]))
