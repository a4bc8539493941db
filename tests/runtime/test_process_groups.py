"""Process groups: a forked process never destroys those of a rank, and ranks do not wait without end to connect."""

from __future__ import annotations

import gc
import os
import socket
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_freescale.runtime.process_groups import (
    await_store,
    bounded_connect,
    is_connection_error,
    keep_from_forked_processes,
)
from tests.ranks import free_port, run_ranks


def forked_child_ends(rank: int, protected: bool) -> bool:
    """Leave a group in a reference cycle, then fork a process that collects garbage. Whether it ends within 5 s."""
    if protected:
        keep_from_forked_processes()
    dist.init_process_group("gloo")
    gc.disable()
    holder: dict[str, object] = {"group": dist.group.WORLD}
    holder["cycle"] = holder
    dist.destroy_process_group()
    del holder
    child = os.fork()
    if child == 0:
        if not protected:
            gc.unfreeze()  # an earlier test of this process may have protected it
        gc.collect()
        os._exit(0)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0] == child:
            return True
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


@pytest.mark.parametrize("protected", [True, False], ids=["protected", "negative control"])
def test_a_forked_process_does_not_destroy_groups(protected: bool) -> None:
    assert run_ranks(forked_child_ends, 2, (protected,)) == [protected, protected]


def test_a_connection_that_takes_too_long_is_an_error() -> None:
    """gloo's constructor may wait without end if a rank dies at the wrong moment."""
    assert bounded_connect(lambda: 5, timedelta(seconds=1)) == 5
    with pytest.raises(ConnectionError, match="not connected after 0 s"):
        bounded_connect(lambda: time.sleep(1), timedelta(seconds=0.1))
    with pytest.raises(ValueError, match="own"):
        bounded_connect(lambda: int("own"), timedelta(seconds=1))


class Environment:
    """A rank whose rendezvous store nobody hosts."""

    main_address, main_port = "127.0.0.1", free_port()

    @staticmethod
    def global_rank() -> int:
        return 1


def test_a_store_that_does_not_answer_is_an_error() -> None:
    with pytest.raises(ConnectionError, match=str(Environment.main_port)) as caught:
        await_store(Environment(), timedelta(seconds=0.3))
    assert is_connection_error(caught.value)
    with socket.create_server((Environment.main_address, Environment.main_port)):
        await_store(Environment(), timedelta(seconds=5))
