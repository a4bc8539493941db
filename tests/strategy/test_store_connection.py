"""What ranks tell each other through the rendezvous store: it needs no connection that is opened after a failure."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_freescale.runtime import store_connection
from lightning_freescale.runtime.process_groups import own_store
from lightning_freescale.runtime.store_connection import StoreConnection
from lightning_freescale.strategy import end_reports, failure_watch, questions
from lightning_freescale.strategy.control import Control
from lightning_freescale.strategy.failure_watch import FailureWatch, publish_within_limit
from lightning_freescale.strategy.questions import Questions
from tests.ranks import run_ranks

PATIENCE = 20.0


def fail_without_new_connections(rank: int, opened: bool) -> str:
    """Rank 1 fails while nobody can connect to the store any more. Returns the error of rank 0, which waits for it."""
    dist.init_process_group("gloo")
    control = Control(timedelta(seconds=PATIENCE))
    control.open()
    connection = control._reports._connection
    connection.get(PATIENCE)
    assert control._watch is not None
    while control._watch._store is None:  # It is set when the peers are connected.
        time.sleep(0.01)
    control.gather(rank)  # Both ranks are connected.
    for module in (store_connection, failure_watch):
        module.own_store = lambda: time.sleep(PATIENCE)  # type: ignore[attr-defined]
    end_reports.REPORT_SECONDS = PATIENCE if opened else 0.5
    if not opened:
        connection._store = connection._thread = None
    if rank == 1:
        control.report_exception(ValueError("the user's own mistake"))
        text = ""
    else:
        text = str(control.missing_ranks("a gather", RuntimeError("gloo")))
    dist.barrier()
    return text


def test_a_rank_reports_its_error_through_a_connection_that_is_open_already() -> None:
    text, _ = run_ranks(fail_without_new_connections, args=(True,))
    assert text == "rank 0: waited for a gather; rank 1 ended with ValueError: the user's own mistake (gloo)"


def test_without_an_open_connection_it_cannot() -> None:
    """The negative control."""
    text, _ = run_ranks(fail_without_new_connections, args=(False,))
    assert failure_watch.STORE_IS_LOST in text


def publish_before_rank_0_has_come(rank: int) -> str:
    """Rank 1 fails while its watch waits for the addresses of rank 0. Returns what rank 0 finds in the store."""
    dist.init_process_group("gloo")
    store = own_store()
    if rank == 1:
        watch = FailureWatch("early", rank, PATIENCE)
        time.sleep(0.5)  # The thread of the watch waits in the store now.
        publish_within_limit(watch, "rank 1 has failed")
        store.set("published", "")
    store.wait(["published"], timedelta(seconds=PATIENCE))
    return store.compare_set("early", "", "nothing").decode()


def test_a_rank_that_fails_before_rank_0_has_come_publishes_why() -> None:
    assert run_ranks(publish_before_rank_0_has_come) == ["rank 1 has failed"] * 2


def ask(rank: int, silent: int) -> list[list[int]]:
    """What each rank finds that asks two questions: all ranks ask the first one, all but ``silent`` the second one."""
    dist.init_process_group("gloo")
    asked = Questions("asked", rank, dist.get_world_size(), 2 * PATIENCE, StoreConnection())
    found = [asked.ask("first")]
    asked._seconds = 0.5
    if rank != silent:
        found.append(asked.ask("second"))
        questions.within = no_answer  # type: ignore[assignment]
        found.append(asked.ask("second"))
    dist.barrier()
    return found


def no_answer(seconds: float, call: Any) -> Any:
    raise TimeoutError


def test_a_question_names_the_ranks_that_do_not_ask_it_and_never_the_own_rank() -> None:
    found = run_ranks(ask, 3, args=(2,))
    assert found[2] == [[]]
    assert found[:2] == [[[], [2], [1, 2]], [[], [2], [0, 2]]]


def connect_after_a_failure(rank: int) -> str:
    """The error of a connection before there is a store. The same connection is opened when there is one."""
    connection = StoreConnection()
    with pytest.raises(ConnectionError) as failure:
        connection.get(PATIENCE)
    dist.init_process_group("gloo")
    connection.get(PATIENCE).set(str(rank), "")
    return str(failure.value)


def test_a_connection_that_cannot_be_opened_says_why_and_is_tried_again() -> None:
    for error in run_ranks(connect_after_a_failure):
        assert error.startswith("the rendezvous store does not answer: Default process group has not been initialized")
