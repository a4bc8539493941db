"""A process that can do nothing else any more ends with an explanation, also if no Python code runs."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable

import pytest

from lightning_freescale.runtime import last_resort

LONG = 60  # seconds


def hold_the_lock() -> None:
    """A call that keeps the lock of the interpreter, as a call of a driver may."""
    ctypes.PyDLL(None).sleep(LONG)


def start(life: Callable[[], None]) -> int:
    """A forked process that runs ``life`` and ends with exit code 0. Returns its number."""
    if (child := os.fork()) == 0:
        life()
        os._exit(0)
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_whose_python_code_cannot_run_ends_itself(capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair()
    dead, end = socket.socketpair()
    silent, other = socket.socketpair()

    def life() -> None:
        for part in (ours, end, other):
            part.close()
        last_resort.arm(LONG, "the first message", [])
        last_resort.arm(0.5, "rank 1 is stuck", [(theirs.fileno(), 0), (dead.fileno(), 7), (silent.fileno(), 8)])
        hold_the_lock()

    ours.send(b"+(rank 2 has died)")
    child = start(life)
    end.close()
    assert exit_code(child) == 1
    assert capfd.readouterr().err == "rank 1 is stuck\nrank 0 reports: rank 2 has died\nrank 7 has died.\n"


def test_a_process_that_goes_on_is_not_ended() -> None:
    def life() -> None:
        for _ in range(10):
            last_resort.arm(0.6, "not reached", [])
            time.sleep(0.1)
        last_resort.disarm()
        time.sleep(1.0)

    assert exit_code(start(life)) == 0


def test_the_time_in_which_a_process_is_stopped_does_not_count() -> None:
    def life() -> None:
        for _ in range(15):
            last_resort.arm(2.0, "not reached", [])
            time.sleep(0.1)

    child = start(life)
    time.sleep(0.3)
    os.kill(child, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(child, signal.SIGCONT)
    assert exit_code(child) == 0


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_crash_after_an_abort_is_explained(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    def life() -> None:
        last_resort.name_crashes("rank 0: rank 2 has died")
        if number == signal.SIGSEGV:
            ctypes.string_at(0)
        os.abort()

    assert exit_code(start(life)) == 1
    expected = f"rank 0: rank 2 has died\nThe process ends itself after the signal {int(number)}.\n"
    assert capfd.readouterr().err == expected
