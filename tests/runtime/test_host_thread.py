"""``HostThread`` runs tasks beside the caller, one at a time, and passes their errors on."""

from __future__ import annotations

import threading

import pytest
import torch

from lightning_freescale.runtime.host_thread import HostThread

CPU = torch.device("cpu")


def test_a_task_runs_beside_the_caller_and_join_waits_for_it() -> None:
    thread, go, seen = HostThread(CPU, "test-beside"), threading.Event(), []

    def task() -> None:
        go.wait(10)
        seen.append(threading.current_thread().name)

    thread.start(task)
    assert seen == []  # The caller goes on while the task waits.
    go.set()
    thread.join()
    assert seen == ["test-beside"]
    thread.join()  # There is nothing to wait for.


def test_tasks_run_in_order() -> None:
    thread, seen = HostThread(CPU, "test-order"), []
    for number in range(20):
        thread.start(lambda number=number: seen.append(number))  # type: ignore[misc]
    thread.join()
    assert seen == list(range(20))


def test_an_error_is_raised_once() -> None:
    thread = HostThread(CPU, "test-error")

    def task() -> None:
        raise ValueError("of the task")

    thread.start(task)
    with pytest.raises(ValueError, match="of the task"):
        thread.join()
    thread.join()
    thread.start(task)
    with pytest.raises(ValueError, match="of the task"):
        thread.start(lambda: None)


def test_a_task_does_not_wait_for_itself() -> None:
    thread = HostThread(CPU, "test-itself")
    thread.start(thread.join)
    thread.join()


def test_close_ends_the_thread() -> None:
    thread = HostThread(CPU, "test-close")
    thread.start(lambda: None)
    thread.join()
    running = next(other for other in threading.enumerate() if other.name == "test-close")
    thread.close()
    running.join(10)
    assert not running.is_alive()
    thread.start(lambda: None)  # in a new thread
    thread.join()
    thread.close()
