"""Process groups: a forked process never destroys those of a rank, and ranks do not wait without end to connect."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.free_ports import free_port
from lightning_freescale.runtime import nccl_groups
from lightning_freescale.runtime.process_groups import (
    await_store,
    bounded_connect,
    is_connection_error,
    keep_from_forked_processes,
    new_gloo_group,
    own_store,
)
from lightning_freescale.strategy.connecting import BoundedSetup
from lightning_freescale.transport.groups import new_group
from tests.ranks import run_ranks


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


def rank_0_is_connected(rank: int, ours: bool) -> bool:
    """Make a group, which takes longer on rank 0. Return whether rank 0 was connected when this rank got the group."""
    dist.init_process_group("gloo")
    store = own_store()
    make = dist.new_group

    def slow(*args: Any, **options: Any) -> Any:
        group = make(*args, **options)
        if ours:
            time.sleep(0.3)
        else:
            store.wait(["rank 1 has looked"], timedelta(seconds=20))
        store.set("connected", "")
        return group

    if rank == 0:
        dist.new_group = slow
    new_gloo_group(timedelta(seconds=20)) if ours else dist.new_group(backend="gloo")
    connected = store.check(["connected"])
    store.set(f"rank {rank} has looked", "")
    dist.barrier()
    return connected


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "negative control"])
def test_a_new_group_is_connected_on_every_rank(ours: bool) -> None:
    """A rank may leave the group at once. The ranks that still connect would fail then."""
    assert run_ranks(rank_0_is_connected, 2, (ours,)) == [True, ours]


def test_a_connection_that_takes_too_long_is_an_error() -> None:
    """gloo's constructor may wait without end if a rank dies at the wrong moment."""
    assert bounded_connect(lambda: 5, timedelta(seconds=1)) == 5
    with pytest.raises(ConnectionError, match="not connected after 0 s"):
        bounded_connect(lambda: time.sleep(1), timedelta(seconds=0.1))
    with pytest.raises(ValueError, match="own"):
        bounded_connect(lambda: int("own"), timedelta(seconds=1))


@pytest.mark.parametrize("backend", ["default", "nccl"])
def test_ranks_on_gpus_do_not_wait_without_end_to_connect(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default group and further groups of NCCL. A call that never returns stands for NCCL, which waits for a dead rank."""
    waits, devices, at_exit = threading.Event(), {}, []

    def connect(*args: Any, **options: Any) -> None:
        devices["NCCL"] = devices.pop(threading.current_thread().name)  # CUDA knows one current device per thread.
        waits.wait(60.0)

    monkeypatch.setattr(torch.cuda, "set_device", lambda at: devices.update({threading.current_thread().name: at}))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(nccl_groups.atexit, "register", at_exit.append)
    monkeypatch.setattr(dist, "new_group", connect)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", MagicMock(), raising=False)
    gpu, seconds = torch.device("cuda", 3), timedelta(seconds=0.1)
    rank = object.__new__(type("Strategy", (BoundedSetup, type("Base", (), {"setup_distributed": connect})), {}))
    rank.root_device, rank._wait = gpu, seconds
    with pytest.raises(ConnectionError, match="not connected"):
        new_group("nccl", "high", seconds) if backend == "nccl" else rank.setup_distributed()
    waits.set()
    assert devices == {"NCCL": gpu}
    assert at_exit == [nccl_groups._limit_the_end]  # The end of the process would wait for the thread in NCCL.


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
