"""Loaders that write a batch into the memory of earlier batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightning_freescale.batch.reused_memory import ReusedMemory
from lightning_freescale.runtime.errors import InputError


def take(batches: Iterator[dict[str, Tensor]], waiting: int = 4) -> list[Tensor]:
    memory, taken = ReusedMemory(waiting), []
    while True:
        try:
            taken.append(memory.next(batches)["x"])
        except StopIteration:
            return taken


def fills(buffers: int) -> Iterator[dict[str, Tensor]]:
    """Fill a part of a few buffers in turn. The strides of the part have gaps."""
    ring = [torch.zeros(6, 8)[::2, 1:7] for _ in range(buffers)]
    for number in range(8):
        yield {"x": ring[number % buffers].fill_(number)}


@pytest.mark.parametrize("buffers", [1, 3])
def test_memory_that_is_filled_again_is_refused(buffers: int) -> None:
    with pytest.raises(InputError, match=f"batch {buffers} into the memory of batch 0"):
        take(fills(buffers))


def test_more_buffers_than_batches_that_wait_are_right() -> None:
    assert len(take(fills(5))) == 8


def test_a_step_may_change_its_own_batch_while_another_thread_loads() -> None:
    """The step is simulated inside the loader, at the moment at which the other thread could run it."""
    data = torch.arange(40.0).reshape(8, 5)  # the batches are parts of one tensor

    def loads_during_steps() -> Iterator[dict[str, Tensor]]:
        for number in range(8):
            if number:
                data[number - 1].mul_(-1)
            yield {"x": data[number]}

    taken = take(loads_during_steps())
    torch.testing.assert_close(torch.stack(taken)[:7], -torch.arange(35.0).reshape(7, 5), rtol=0, atol=0)
