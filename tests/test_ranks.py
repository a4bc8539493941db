"""``run_ranks``, with which most tests start their ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks


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
