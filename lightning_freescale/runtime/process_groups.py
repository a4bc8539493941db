"""Process groups beside the default one: whether they are open, and how a rank leaves them.

A gloo group has threads and sockets. They end when the last reference to the group is gone.
"""

from __future__ import annotations

import functools
import gc
import os
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_freescale.runtime.bounded import within
from lightning_freescale.runtime.nccl_groups import limit_the_end

CONNECT_PAUSE = 0.1  # seconds between two attempts to reach the store
CONNECT_FACTOR = 1.25  # gloo gives up after its timeout, or never; this limit is a little longer
Made = TypeVar("Made")


@functools.cache
def keep_from_forked_processes() -> None:
    """Forked processes, such as the workers of a DataLoader, never destroy the groups of this process.

    A group often ends in a reference cycle. The garbage collector may first run in a forked process, where the threads
    of the group do not exist. The destructor of the group would wait for them without end. So a forked process excludes
    all objects that it inherits from garbage collection.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def is_connection_error(error: BaseException) -> bool:
    """Whether torch has raised ``error`` because another rank or the rendezvous store does not answer."""
    return isinstance(error, (dist.DistError, ConnectionError)) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )


def describe_missing_ranks(error: BaseException, rank: int, world_size: int, timeout: timedelta) -> str:
    """Why the default process group could not be set up. Before that, a rank cannot ask the others."""
    seconds = timeout.total_seconds()
    reason = f"not all of the {world_size} ranks have come within {seconds:.0f} s"
    if rank != 0:
        store = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = f"rank 0, which hosts the rendezvous store at {store}, cannot be reached, or {reason}"
    return f"rank {rank}: {reason}: {str(error).splitlines()[0]}"


def await_store(environment: Any, timeout: timedelta) -> None:
    """Wait for the rendezvous store, which rank 0 or torchrun hosts. Raises ConnectionError after ``timeout``.

    The store's own client tries twice, each time for the whole timeout. ``environment`` is Lightning's cluster environment.
    """
    if environment.global_rank() == 0 or dist.is_initialized():
        return
    address, port = environment.main_address, environment.main_port
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((address, port), timeout=max(left, CONNECT_PAUSE)).close()
            return
        except OSError as error:
            if left <= 0:
                raise ConnectionError(f"{address}:{port}: {error}") from error
        time.sleep(CONNECT_PAUSE)


def own_store() -> Any:
    """A connection of its own to the rendezvous store. One that is shared is blocked while another thread waits in it."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()  # torch's types do not know this method.


def bounded_connect(connect: Callable[[], Made], timeout: timedelta, device: torch.device | None = None) -> Made:
    """The result of ``connect()``, which connects the ranks. Raises ConnectionError if it takes longer than ``timeout``.

    If a rank dies while the ranks connect, gloo or NCCL may wait without end, whatever the timeout of the group is. So
    ``connect()`` runs in a thread of its own, which is left behind then.

    Args:
        device: the current device of that thread, if it is a CUDA device. Each thread has its own current device.
    """
    seconds = CONNECT_FACTOR * timeout.total_seconds()

    def connect_on_device() -> Made:
        if device is not None and device.type == "cuda":
            torch.cuda.set_device(device)
        return connect()

    try:
        return within(seconds, connect_on_device)
    except TimeoutError as error:
        if device is not None and device.type == "cuda":
            limit_the_end()  # The end of the process would wait for the thread that is left behind in NCCL.
        message = f"the ranks are not connected after {seconds:.0f} s: they wait for a rank that has died or is stuck"
        raise ConnectionError(message) from error


def new_gloo_group(timeout: timedelta | None) -> Any:
    """Make a gloo group of all ranks. Every rank must call this. It returns when every rank has its connections.

    torch returns on each rank when the connections of that rank are complete. If the rank left the group at once, the
    ranks that still connect would fail with "Connection closed by peer". So the ranks wait for each other.

    Args:
        timeout: how long a transfer may take; torch's default if it is None.
    """

    def connect() -> Any:
        group = dist.new_group(backend="gloo", timeout=timeout)
        # A barrier would use the GPU that Lightning has bound to the default group. A tensor on the CPU does not.
        dist.all_reduce(torch.zeros(1), group=group)
        return group

    return connect() if timeout is None else bounded_connect(connect, timeout)


def is_open(group: dist.ProcessGroup | None) -> bool:
    """Whether ``group`` exists and was not destroyed."""
    return group is not None and group in dist.distributed_c10d._world.pg_map


def leave(group: dist.ProcessGroup | None) -> None:
    """Destroy ``group`` on this rank, unless it is the default group. It does not wait for ranks that come later.

    Its transfers must be complete: torch waits for pending ones when it releases the group. The caller must drop its own
    references to the group.
    """
    if group is not dist.group.WORLD and is_open(group):
        dist.destroy_process_group(group)


def are_complete(transfers: Iterable[Any], seconds: float) -> bool:
    """Whether all ``transfers`` (c10d works) complete within ``seconds``."""
    deadline = time.monotonic() + seconds
    for transfer in transfers:
        while not transfer.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
    return True
