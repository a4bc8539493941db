"""``run_ranks``, with which most tests start their ranks."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.free_ports import PORTS_KEPT, free_port
from tests.ranks import RankFailed, run_ranks


def total(rank: int, start: int) -> int:
    dist.init_process_group("gloo")
    value = torch.tensor(start + rank)
    dist.all_reduce(value)
    return int(value)


@pytest.fixture
def open_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("open_group")
def test_ranks_are_not_forked_from_a_process_with_a_group() -> None:
    with pytest.raises(RuntimeError, match=r"would hang\. .* call torch\.distributed\.destroy_process_group\(\)"):
        run_ranks(total, args=(10,))
    dist.destroy_process_group()
    assert run_ranks(total, args=(10,)) == [21, 21]


def test_a_port_is_given_once_even_if_nobody_has_opened_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port()
    numbers = iter([first, first, *range(first - 20, first)])
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(numbers))
    assert free_port() != first
    monkeypatch.undo()
    for _ in range(PORTS_KEPT):
        free_port()
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: first)
    assert free_port() == first  # the control: it is given again later


def fail_one_after_another(rank: int) -> None:
    time.sleep(0.3 * rank)
    raise ValueError(f"the error of rank {rank}")


def test_the_errors_of_all_ranks_are_reported() -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(fail_one_after_another)
    assert list(failure.value.errors) == [0, 1]
    assert "the error of rank 1" in str(failure.value)


def killed_after_its_end(rank: int) -> int:
    if rank == 1:
        subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {os.getpid()}"])
    else:
        time.sleep(1.0)
    return rank


def test_a_rank_may_be_killed_while_it_waits_for_the_others() -> None:
    """A condition variable of multiprocessing would wait for it without end."""
    assert run_ranks(killed_after_its_end) == [0, 1]
