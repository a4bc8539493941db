"""Run a function on several real ranks. Forked, so a fit costs a fraction of a second; a dead rank fails the test at once."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.harness.free_ports import free_port


class RankFailed(AssertionError):
    """A rank raised or died. ``errors`` maps each rank that had failed by then to its traceback."""

    def __init__(self, errors: dict[int, str]):
        self.errors = errors
        super().__init__("\n".join(f"rank {rank} failed:\n{text}" for rank, text in sorted(errors.items())))


BUSY_FACTOR = 3.0  # A machine that is busy with other work may be slower by this factor.
LINGER = 30.0  # seconds that a rank stays after its end at most, for others that are late on a busy machine
GRACE = 1.0  # seconds that the others have to report their errors after the first one


def run_rank(rank: int, world: int, port: int, fn: Callable, args: tuple, pipe: connection.Connection) -> None:
    """The life of the process of one rank: call ``fn(rank, *args)``, send ``("ok", result)`` or ``("error", traceback)``, end."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)  # oneDNN's state does not survive a fork: matrix products hang on ARM
    # With LOCAL_RANK set, Lightning takes the processes as given and launches none of its own.
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(world),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        OMP_NUM_THREADS="1",  # Lightning sets the threads of torch otherwise; more than one hang after a fork
    )
    try:
        result = ("ok", fn(rank, *args))
    except BaseException:
        result = ("error", traceback.format_exc())
    pipe.send_bytes(pickle.dumps(result))  # plain pickle: torch's own would share memory that dies with this process
    if result[0] == "ok":
        pipe.poll(LINGER)  # the others may be about to use the store that rank 0 serves, or a connection to this rank
    os._exit(0)  # skip the parent's atexit and pytest hooks


def let_end(pipes: Iterable[connection.Connection]) -> None:
    """Tell the ranks at the other ends that all ranks are done. An Event would block if one of them was killed in its wait."""
    for pipe in pipes:
        with suppress(OSError):  # the rank has ended
            pipe.send_bytes(b"")


def _refuse_an_open_process_group() -> None:
    """A forked rank inherits the group without its threads, and its first collective over gloo waits without end."""
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            "run_ranks: torch.distributed is initialized in this process, and a rank that is forked from it would hang. "
            "Train or call init_process_group inside the function that run_ranks runs, with world=1 if one rank is "
            "enough, or call torch.distributed.destroy_process_group() before run_ranks"
        )


def run_ranks(
    fn: Callable, world: int = 2, args: tuple = (), timeout: float = 60, every_error: bool = False
) -> list[Any]:
    """Run ``fn(rank, *args)`` in ``world`` forked processes and return the results in rank order.

    The calling process must not have a process group, see :func:`_refuse_an_open_process_group`.

    A failure ends the run with :class:`RankFailed`. The other ranks get ``GRACE`` seconds to report their own errors, because
    the first error is often "connection closed by peer" and the cause is on another rank. With ``every_error`` all ranks are
    awaited. It takes ``BUSY_FACTOR * timeout`` seconds at most.
    """
    _refuse_an_open_process_group()
    port = free_port()
    context = mp.get_context("fork")
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=run_rank, args=(rank, world, port, fn, args, theirs)))
        processes[-1].start()
        theirs.close()  # so that a dead child reads as EOF here
        pipes.append(ours)
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    deadline = time.monotonic() + BUSY_FACTOR * timeout
    try:
        while len(results) + len(errors) < world:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results and rank not in errors]
            ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready and errors and not every_error:
                break
            if not ready:
                raise AssertionError(
                    f"timeout after {BUSY_FACTOR * timeout} s; done: {sorted(results)}, failed: {errors}"
                )
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    status, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    processes[rank].join()
                    status, value = "error", f"died with exit code {processes[rank].exitcode}"
                (results if status == "ok" else errors)[rank] = value
            if errors and not every_error:
                deadline = min(deadline, time.monotonic() + GRACE)
    finally:
        let_end(pipes)
        for process in processes:  # one rank's failure must not leave the others in a collective
            if len(results) < world:
                process.kill()
            process.join()
    if errors:
        raise RankFailed(errors)
    return [results[rank] for rank in range(world)]
