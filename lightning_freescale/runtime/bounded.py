"""Calls that may block for long inside a library, with a limit of our own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
BOUNDED_CALL = "bounded call"  # the name of the threads


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """The result of ``call()``. Raises TimeoutError if it takes longer than ``seconds``.

    The call runs in a thread of its own, which is left behind if it takes longer. Signal handlers run meanwhile: the main
    thread waits in Python, while a call of the rendezvous store, for example, blocks in C++ until the timeout of the store
    when the host of the store cannot be reached.
    """
    results: list[Result] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        done.set()

    threading.Thread(target=run, daemon=True, name=BOUNDED_CALL).start()
    if not done.wait(seconds):
        raise TimeoutError(f"no answer within {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]
