"""The machine of a rank in the exchange benchmark: the interface that a GPU and the emulated device share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness.workload import ExchangeBatch

Priority = Literal["high", "low"]
Transport = Literal["auto", "nccl", "host"]


class Machine(Protocol):
    """The parts of the benchmark that differ between a GPU and the emulated device."""

    device: torch.device

    def sharding_group(self) -> dist.ProcessGroup:
        """A process group of all ranks for TorchRec's own exchanges."""

    def exchange_group(self, priority: Priority) -> dist.ProcessGroup:
        """A process group of all ranks for prioritized rows and gradients."""

    def dense(self, dim: int) -> nn.Module:
        """The dense part of the model: rows ``[n, dim]`` to a scalar loss."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of the dense part."""

    def timestamp(self) -> Any:
        """The current position in the device's queue."""

    def seconds(self, start: Any, end: Any) -> float:
        """The time between two timestamps."""

    def pin(self, batch: ExchangeBatch) -> ExchangeBatch:
        """The batch in the memory in which a data loader would have put it."""

    def memory_meter(self) -> MemoryMeter:
        """A meter of the device memory that one variant uses."""

    def describe(self) -> dict[str, Any]:
        """Description of the machine for the result."""


class MemoryMeter:
    """Peak device memory of a variant while it runs. Stays zero on a device whose memory is the host's."""

    peak = 0  # bytes beyond what was allocated when the meter was made

    def start(self) -> None:
        """The variant runs from now on."""

    def stop(self) -> None:
        """The variant pauses, another one runs."""
