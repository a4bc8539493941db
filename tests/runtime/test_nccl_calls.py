"""Threads inside a call of NCCL are found, and communicators are not aborted under them. gloo stands for NCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

from lightning_freescale.runtime import nccl_calls, nccl_groups
from lightning_freescale.runtime.nccl_calls import threads_in_nccl
from lightning_freescale.runtime.process_groups import own_store
from tests.ranks import run_ranks

PATIENCE = 20.0  # seconds


def become(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


def wait_for_each_other(rank: int) -> None:
    nccl_calls.NAME, nccl_calls.DEVICE = "gloo", torch.device("cpu")
    dist.init_process_group("gloo")
    store = own_store()
    if rank == 1:  # It comes late to a transfer of the default group, and to a new group.
        for step in ("transfer", "group"):
            store.wait([f"found {step}"], timedelta(seconds=PATIENCE))
            dist.all_reduce(torch.ones(1)) if step == "transfer" else dist.new_group(backend="gloo")
        return
    aborted: list[str] = []
    backends = [SimpleNamespace(abort=lambda: aborted.append("aborted"))]
    calls: dict[str, Callable[[], object]] = {
        "transfer": lambda: dist.all_reduce(torch.ones(1)),
        "group": lambda: dist.new_group(backend="gloo"),
    }
    for name, call in calls.items():
        thread = threading.Thread(target=call, name=name)
        assert threads_in_nccl() == []
        thread.start()
        assert become(lambda: threads_in_nccl() == [name])  # noqa: B023
        nccl_calls.NAME = "another"
        assert threads_in_nccl() == []  # Only calls of the backend count.
        nccl_calls.NAME = "gloo"
        assert not nccl_groups.abort_all(backends)
        store.set(f"found {name}", "")
        thread.join(PATIENCE)
    assert aborted == []
    assert nccl_groups.abort_all(backends)
    assert become(lambda: aborted == ["aborted"])


def test_communicators_are_not_aborted_under_a_thread_that_uses_them() -> None:
    run_ranks(wait_for_each_other)
