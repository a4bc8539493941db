"""NCCL's process groups after a failure: what they report, and how the waits for their transfers end.

A kernel of NCCL waits on the device for the other ranks. If one of them is dead, it waits until its communicator is aborted, and
a host thread that waits for the device waits with it. By default, torch then ends the process with SIGABRT, and nothing names
the rank. So torch is told to leave failures to this package, which aborts the communicators and raises an error.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from lightning_freescale.runtime import last_resort
from lightning_freescale.runtime.last_resort import end_process
from lightning_freescale.runtime.log import log_once, logger
from lightning_freescale.runtime.nccl_calls import threads_in_nccl

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
TORCHRUNS_HANDLING = "1"  # torchrun sets this value unless the user has set one.
# What torch reads when it makes a group of NCCL.
FAILURE_DEFAULTS = {
    HANDLING: "0",  # torch notes errors and does not end the process.
    # After the error of a transfer, the watchdog of torch waits four times this long. Meanwhile a new transfer blocks its thread.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    # Otherwise a thread of torch sleeps for 8 minutes after an error, and the end of the process waits for it.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Otherwise the watchdog of torch ends the process with SIGABRT when it meets an error of CUDA before the training does.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
TOGETHER_SECONDS = 1.0  # How long the first abort waits until the others can begin too.
GUARD_SECONDS = 1.0  # between two looks at the groups
END_SECONDS = 15.0  # How long the end of the interpreter may take after an abort.
_aborted = threading.Event()  # Whether the communicators of this process were aborted. They cannot be used again.
_limits: list[float] = []  # How long an error may stay unhandled: the timeouts of all trainings of this process.


def leave_failures_to_us(timeout: float) -> None:
    """Tell torch not to end the process when a transfer of NCCL fails. Variables that the user has set stay as they are.

    Call it before the groups are made. From then on, this process ends itself if an error of NCCL is not handled within
    ``timeout`` seconds, so that no wait is without a limit after the training either.
    """
    backend = getattr(dist, "ProcessGroupNCCL", None)
    if not (hasattr(backend, "get_error") and hasattr(backend, "abort")):
        log_once("this torch does not report errors of NCCL: torch ends the process if a transfer of NCCL fails")
        return
    for name, value in FAILURE_DEFAULTS.items():
        given = os.environ.get(name)
        if given is None or (name == HANDLING and given == TORCHRUNS_HANDLING and dist.is_torchelastic_launched()):
            os.environ[name] = value
    if os.environ[HANDLING] == FAILURE_DEFAULTS[HANDLING]:
        log_once(f"{HANDLING}=0: this package ends waits of NCCL for a rank that has failed, and names the rank")
        if timeout not in _limits:
            _start_guard(timeout)


def nccl_backends() -> list[Any]:
    """NCCL's part of every open process group."""
    found = []
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(Exception):  # The group has no backend for CUDA.
            backend = group._get_backend(torch.device("cuda"))
            if backend.name() == "nccl":
                found.append(backend)
    return found


def nccl_error(backends: list[Any]) -> str | None:
    """The first error that torch's watchdog has noted: ``"TIMEOUT"`` or ``"COMM_ERROR"``, for example. Does not wait."""
    for backend in backends:
        with suppress(Exception):
            if (name := backend.get_error().name) != "SUCCESS":
                return str(name)
    return None


def abort_all(backends: list[Any]) -> bool:
    """Abort the communicators, so that their kernels end. Returns at once.

    Each has a thread of its own. An abort may wait for all kernels of the device, and so for those of another communicator that
    is not aborted yet.

    Returns:
        Whether they are being aborted. They are not while a thread is inside a call of NCCL: it would crash.
    """
    _aborted.set()
    if not backends:
        return True
    limit_the_end()
    if inside := threads_in_nccl():
        logger.error("the waits of the device cannot be ended now: inside a call of NCCL: %s", ", ".join(inside))
        return False
    # A thread that comes out of a wait for one communicator must not use another one that is about to be aborted. So all
    # aborts begin at the same time.
    together = threading.Barrier(len(backends), timeout=TOGETHER_SECONDS)
    for backend in backends:
        threading.Thread(target=_abort, args=(backend, together), daemon=True, name="freescale-abort").start()
    return True


def _abort(backend: Any, together: threading.Barrier) -> None:
    with suppress(threading.BrokenBarrierError):
        together.wait()
    with suppress(Exception):  # It took longer than the timeout of the group. The process then ends itself.
        backend.abort()


def limit_the_end() -> None:
    """From now on, the normal end of the process has a limit: a thread that is stuck in NCCL would block it."""
    with suppress(RuntimeError):  # The interpreter ends already.
        atexit.register(_limit_the_end)


def _limit_the_end() -> None:
    """End the process if its normal end takes too long. An abort that cannot complete blocks the end of the groups."""
    last_resort.limit_the_end(END_SECONDS)


def _start_guard(timeout: float) -> None:
    """Start the thread that ends the process if nobody handles an error of NCCL. There is one in a process."""
    _limits.append(timeout)
    if len(_limits) == 1:
        threading.Thread(target=_guard, daemon=True, name="freescale-nccl").start()


def _guard() -> None:
    since: float | None = None
    while not _aborted.wait(GUARD_SECONDS):
        error = nccl_error(nccl_backends())
        if error is None:
            since = None
        elif since is None:
            since = time.monotonic()
        elif time.monotonic() - since > max(_limits):
            end_process(f"NCCL reports {error}, and nothing has ended the wait within {max(_limits):.0f} s")
            return
