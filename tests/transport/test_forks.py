"""Processes that a rank forks, as a DataLoader does: they have the memory and the descriptors of a queue, but not its threads."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.transport import TransportError, host_staged
from tests.ranks import run_ranks
from tests.transport.collectives import in_group

QUEUE = {"cpu": "queue", "chunk_bytes": 4096, "buffer_bytes": 1 << 20}


def _forked(body: Callable[[], object]) -> int:
    """Fork a child that calls ``body`` and ends. Return its process number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.alarm(60)  # it must not stay behind if it hangs
        body()
        status = 7
    finally:
        os._exit(status)


def _leave_while_a_child_lives(rank: int, world: int, group: Any) -> float:
    dist.all_to_all_single(torch.empty(2), torch.empty(2), group=group)
    dist.barrier()
    seconds = 0.0
    if rank == 1:
        child = _forked(lambda: time.sleep(30))
        group._movers[torch.device("cpu")].close(5)
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(TransportError, match="rank 1 cannot be reached: it closed the connection"):
            dist.all_to_all_single(torch.empty(2), torch.empty(2), group=group)
        seconds = time.monotonic() - start
    dist.barrier()
    if rank == 1:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return seconds


def _as_hosts(rank: int, fn: Callable) -> Any:
    os.environ["FREESCALE_HOST_ID"] = f"host{rank}"
    return in_group(rank, 2, QUEUE, fn, ())


def test_a_peer_sees_the_end_of_a_rank_whose_forked_child_lives() -> None:
    assert run_ranks(_as_hosts, args=(_leave_while_a_child_lives,))[0] < 10  # the timeout of the group is 30 s


def _end_a_child_in_order(rank: int, world: int, group: Any) -> int:
    dist.all_to_all_single(torch.empty(2), torch.empty(2), group=group)
    status = 7 << 8
    if rank == 0:  # rank 1 sends its part when the child has ended
        received = torch.zeros(2)
        work = dist.all_to_all_single(received, torch.ones(2), group=group, async_op=True)

        def end() -> None:
            host_staged._close_all()  # as the end of the interpreter does
            group.shutdown()  # as destroy_process_group() does

        _, status = os.waitpid(_forked(end), 0)
    dist.barrier()
    if rank == 1:
        received = torch.zeros(2)
        work = dist.all_to_all_single(received, torch.ones(2), group=group, async_op=True)
    work.wait()
    assert received.tolist() == [1.0, 1.0]
    return os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_forked_child_that_ends_in_order_leaves_the_group_alone(hosts: int) -> None:
    ranks = (_as_hosts, (_end_a_child_in_order,)) if hosts == 2 else (in_group, (2, QUEUE, _end_a_child_in_order, ()))
    assert run_ranks(ranks[0], args=ranks[1], timeout=40) == [7, 7]
