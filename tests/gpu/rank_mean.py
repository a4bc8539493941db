"""The mean over ranks by copy engines on a GPU. ``test_cluster.py`` starts each rank.

Rank 0 prints one JSON line: ``wrong``, the elements that differ from a mean on one rank, over many tensors in flight beside
matrix products; ``ddp``, the largest relative difference of weights that DDP has trained with this mean and with NCCL; and
``control``, the same for a mean that forgets the values of one rank.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.rank_setup import leave_group, use_device
from lightning_freescale import transport
from lightning_freescale.transport.rank_mean import RankMean, average_gradients

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SIZES = (1, 63, 1000, 30_011, 1 << 20, 9_000_001)


class WithoutLastRank(RankMean):
    """The negative control: it forgets the values of the last rank."""

    def _average(self, tensor: Tensor) -> None:
        if self._rank == self._world - 1:
            tensor.zero_()
        super()._average(tensor)


def values_of(rank: int, number: int, size: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(1000 * number + rank)
    return torch.randn(size, generator=generator, device=device)


def count_wrong(mean: RankMean, device: torch.device) -> int:
    """Average tensors beside compute, several at a time."""
    factor = torch.randn(2048, 2048, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for number in range(20):
        tensors = [values_of(RANK, number, size, device) for size in SIZES]
        futures = [mean.start(tensor) for tensor in tensors]
        for _ in range(4):
            factor @ factor
        for size, future in zip(SIZES, futures, strict=True):
            right = torch.stack([values_of(rank, number, size, device) for rank in range(RANKS)]).mean(0)
            wrong += (future.wait() != right).sum()
    return int(wrong)


def trained(mean: RankMean | None, device: torch.device) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 700), nn.ReLU(), nn.Linear(700, 700), nn.ReLU(), nn.Linear(700, 5)).to(device)
    wrapped = DistributedDataParallel(model, device_ids=[device], bucket_cap_mb=0.5, gradient_as_bucket_view=True)
    if mean is not None:
        average_gradients(wrapped, mean)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator(device).manual_seed(RANK)
    for _ in range(20):
        optimizer.zero_grad()
        wrapped(torch.randn(64, 300, generator=generator, device=device)).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def main() -> None:
    device = use_device("cuda")
    dist.init_process_group("nccl")
    group: Any = dist.new_group(backend="freescale", pg_options=transport.Options(priority="high"))
    mean = RankMean(group, device)
    wrong = torch.tensor(count_wrong(mean, device), device=device)
    dist.all_reduce(wrong)
    right = trained(None, device)

    def difference(kind: type[RankMean]) -> float:
        mean.__class__ = kind
        return float((trained(mean, device) - right).abs().max() / right.abs().max())

    ddp, control = difference(RankMean), difference(WithoutLastRank)
    if RANK == 0:
        print("RESULT " + json.dumps({"wrong": int(wrong), "ddp": ddp, "control": control}))
    leave_group()


if __name__ == "__main__":
    main()
