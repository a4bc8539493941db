"""The thread of the exchange: order, errors, and a training that is equal bit for bit."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.embedding.exchange_thread import RowExchangeThread
from lightning_freescale.embedding.schedule import ExchangeSchedule
from lightning_freescale.runtime.errors import FreeScaleError
from tests.embedding.test_prioritized import _compare, case
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def started(timeout: float = 10.0) -> RowExchangeThread:
    thread = RowExchangeThread(CPU, timeout)
    thread.inline = False
    return thread


def test_calls_run_in_order_in_another_thread() -> None:
    thread, seen = started(), []
    for number in range(20):
        thread.submit(lambda number=number: seen.append((number, threading.current_thread().name)))
    thread.wait()
    assert seen == [(number, "freescale exchange") for number in range(20)]
    thread.inline = True
    thread.submit(lambda: seen.append(threading.current_thread()))
    assert seen[-1] is threading.current_thread()
    thread.stop()


def test_an_error_is_raised_by_the_next_wait_and_later_calls_do_not_run() -> None:
    thread, seen = started(), []

    def fail() -> None:
        raise ValueError("row 7")

    thread.submit(fail)
    thread.submit(seen.append, 1)
    with pytest.raises(ValueError, match="row 7"):
        thread.wait()
    with pytest.raises(ValueError, match="row 7"):
        thread.submit(seen.append, 2)
    assert seen == []
    thread.stop()


def test_a_wait_has_a_timeout() -> None:
    thread, release = started(timeout=0.05), threading.Event()
    thread.submit(release.wait)
    with pytest.raises(FreeScaleError, match="did not go on for 0 s"):
        thread.wait()
    release.set()
    thread.stop()


def compare(rank: int, world: int) -> list[bool]:
    dist.init_process_group("gloo")
    names: set[str] = set()

    def watch(schedule: ExchangeSchedule) -> None:
        gradients = schedule.modules[0].exchange.gradients
        apply = gradients.apply

        def slow(*args: object) -> None:
            names.add(threading.current_thread().name)
            time.sleep(0.002 * (1 + rank))  # the ranks are not alike
            apply(*args)  # type: ignore[arg-type]

        gradients.apply = slow  # type: ignore[method-assign]

    cases = [
        case(world, kind=kind, optimizer=optimizer, seed=seed, own_thread=True, sabotage=watch, flush_at=(2, 5))
        for seed, (kind, optimizer) in enumerate([("row_wise", "rowwise_adagrad"), ("mixed", "adagrad")])
    ]
    cases.append(case(world, kind="row_wise", optimizer="sgd", own_thread=True, wrong_prefetch=True))
    equal = [_compare(rank, world, **one) for one in cases]
    return [*equal, "freescale exchange" in names]


def test_training_is_equal_bit_for_bit() -> None:
    for result in run_ranks(compare, 2, args=(2,)):
        assert result == [True, True, True, True]
