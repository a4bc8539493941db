"""The times of a block of steps of one variant."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.exchange.machine import Machine
from benchmarks.harness.exchange.variants import Steps


def run_steps(steps: Steps, machine: Machine, count: int) -> tuple[list[float], list[Tensor]]:
    """Milliseconds of each of the next ``count`` steps on the slowest rank, and this rank's losses. A collective."""
    timestamps, losses = [machine.timestamp()], []
    for _ in range(count):
        losses.append(next(steps))
        timestamps.append(machine.timestamp())
    seconds = [machine.seconds(*pair) for pair in itertools.pairwise(timestamps)]
    slowest = torch.tensor(seconds, dtype=torch.float64, device=machine.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [1e3 * value for value in slowest.tolist()], losses
