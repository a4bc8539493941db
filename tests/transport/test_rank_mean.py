"""The mean over ranks by copy engines, on the queue with CPU threads in place of copy engines."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale.transport import Options, rank_mean
from lightning_freescale.transport.rank_mean import PART_ALIGNMENT, RankMean, average_gradients, divide
from tests.ranks import run_ranks
from tests.transport.collectives import same_bits

CPU = torch.device("cpu")
SIZES = (0, 1, PART_ALIGNMENT - 1, PART_ALIGNMENT, 1000, 30_011)


def test_examples() -> None:
    assert doctest.testmod(rank_mean).failed == 0


@pytest.mark.parametrize("world", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("elements", [1, 63, 64, 65, 1000, 12345])
def test_the_parts_cover_the_tensor(elements: int, world: int) -> None:
    sizes = divide(elements, world)
    assert len(sizes) == world
    assert sum(sizes) == elements
    assert min(sizes) >= 0
    assert all(size % PART_ALIGNMENT == 0 for size in sizes[: sum(map(bool, sizes)) - 1])


def make_mean(**options: Any) -> RankMean:
    dist.init_process_group("gloo")
    group: Any = dist.new_group(backend="freescale", pg_options=Options(cpu="queue", **options))
    return RankMean(group, CPU)


def values_of(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + size)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def means(rank: int, world: int, chunk_bytes: int) -> int:
    mean, checked = make_mean(chunk_bytes=chunk_bytes, buffer_bytes=1 << 20), 0
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for size in SIZES * 2:  # The second time, the parts are known.
            tensor = values_of(rank, size, dtype)
            right = torch.stack([values_of(peer, size, dtype) for peer in range(world)]).mean(0)
            assert mean.start(tensor).wait() is tensor
            assert same_bits(tensor, right)
            checked += size
    return checked


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_mean_has_the_bits_of_a_mean_on_one_rank(world: int) -> None:
    for chunk_bytes in (4096, 8 << 20):
        assert run_ranks(means, world, (world, chunk_bytes)) == [6 * sum(SIZES)] * world


def divided(rank: int, world: int) -> tuple[bool, bool]:
    mean, values = make_mean(), values_of(rank, 10_000, torch.float32)
    whole, halves = values.clone(), values.clone()
    mean.start(whole)
    for part in halves.split([3_001, 6_999]):
        mean.start(part)
    other = values.clone()
    if rank == 1:
        other[7] = torch.nextafter(other[7], torch.tensor(9.0)) * 1.0001
    mean.start(other)
    return same_bits(whole, halves), same_bits(whole, other)


def test_the_division_into_buckets_does_not_change_the_mean() -> None:
    assert run_ranks(divided, 3, (3,)) == [(True, False)] * 3  # The control: a change of one value is seen.


class WithoutLastRank(RankMean):
    """The negative control: it forgets the values of the last rank."""

    def _average(self, tensor: Tensor) -> None:
        if self._rank == self._world - 1:
            tensor.zero_()
        super()._average(tensor)


def gradients(rank: int, world: int, kind: type[RankMean] | None) -> list[list[float]]:
    mean = make_mean()
    if kind is not None:
        mean.__class__ = kind
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(37, 50), nn.ReLU(), nn.Linear(50, 3))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.002, gradient_as_bucket_view=True)
    if kind is not None:
        average_gradients(wrapped, mean)
    torch.manual_seed(rank)
    for _ in range(3):  # DDP lays out its buckets anew after the first step.
        wrapped(torch.randn(20, 37)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def test_ddp_trains_as_with_gloo() -> None:
    right = run_ranks(gradients, 2, (2, None))
    assert right[0] == right[1]
    assert run_ranks(gradients, 2, (2, RankMean)) == right  # Two ranks add up to the same bits in either order.
    assert run_ranks(gradients, 2, (2, WithoutLastRank)) != right
