"""The end of a process that can do nothing else any more: with an explanation on stderr, and within a limit.

A call of a driver that never returns may hold the lock of the Python interpreter. Then no Python code runs any more, and nothing
that is written in Python can end the process. So a thread of the C++ core counts down. Python code that runs from time to time
sets the limit anew. The core also names the reason of a crash that an abort of NCCL may cause.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from contextlib import suppress

from lightning_freescale._C import arm_last_resort, disarm_last_resort
from lightning_freescale._C import name_crashes as _name_crashes

POSITIONS_SHARE = 0.9  # After this part of the limit of the end, the process prints where its threads are.
_last_words = ""  # What the process says if it crashes.


def arm(seconds: float, message: str, connections: list[tuple[int, int]]) -> None:
    """End the process after ``seconds``, unless :func:`arm` or :func:`disarm` is called before. There is one limit in a process.

    Args:
        message: what is written to stderr at the end.
        connections: descriptor and rank of connections to other ranks. What has arrived there is added to the message: the end of
            a connection, and texts in parentheses.
    """
    arm_last_resort(seconds, message, connections)


def disarm() -> None:
    """Remove the limit."""
    disarm_last_resort()


def name_crashes(message: str) -> None:
    """If the process crashes from now on, it writes ``message`` to stderr and ends with exit code 1."""
    global _last_words
    _last_words = message
    _name_crashes(message)


def limit_the_end(seconds: float) -> None:
    """End the process if its normal end takes longer than ``seconds``. The message is that of :func:`name_crashes`."""
    with suppress(Exception):  # stderr is closed.
        faulthandler.dump_traceback_later(POSITIONS_SHARE * seconds, file=2)
    known = f"{_last_words}\n" if _last_words else ""
    arm(seconds, f"{known}The end of the process takes longer than {seconds:g} s. The process ends itself.", [])


def end_process(explanation: str) -> None:
    """Print why, and where all threads are, and end the process at once. Nothing else ends a call that blocks in a driver."""
    with suppress(Exception):
        print(f"{explanation}\nThe process ends itself, because it is stuck:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
    os._exit(1)
