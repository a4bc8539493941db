"""An emulated device. It computes by letting time pass.

Like a GPU, the device processes its queue while the host continues. The host waits where the exchange needs a result: before the
gradient of the embeddings is sent, and after the optimizer. Emulated ranks therefore do not need a CPU core each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.emulation.clock import Clock
from benchmarks.harness.workload import EqualCostWorkload


@dataclass(frozen=True)
class EmulatedTimes:
    """Compute times of a step in seconds, and the wire of each rank.

    ``optimizer`` stands for everything after backward: the end of the dense AllReduce, clipping, the dense optimizer's step.
    """

    forward: float
    backward: float
    optimizer: float
    bandwidth: float  # bytes per second
    latency: float  # seconds

    @classmethod
    def for_exchange(cls, rows: float, workload: EqualCostWorkload, ranks: int, tail: float) -> EmulatedTimes:
        """An exchange of a batch's rows takes ``rows`` seconds and fits behind the forward. Backward takes twice the forward.

        Args:
            tail: compute after backward, as a share of forward and backward.
        """
        off_rank = workload.row_bytes * (ranks - 1) / ranks
        return cls(
            forward=1.2 * rows,
            backward=2.4 * rows,
            optimizer=tail * 3.6 * rows,
            bandwidth=off_rank / rows,
            latency=1e-4,
        )


class EmulatedDevice:
    """Processes one operation after another while the host continues."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._free = clock, 0.0

    def launch(self, seconds: float) -> None:
        """Queue an operation."""
        self._free = max(self._free, self._clock.now()) + seconds

    def synchronize(self) -> None:
        """Wait until the queue is empty."""
        self._clock.wait_until(self._free)


class _EmulatedCompute(torch.autograd.Function):
    """The identity. Its forward and its backward take the given times on the device."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, device: EmulatedDevice, forward: float, backward: float) -> Tensor:
        ctx.device, ctx.seconds = device, backward
        device.launch(forward)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.device.launch(ctx.seconds)
        ctx.device.synchronize()  # the gradient is now sent to other ranks
        return gradients[0], None, None, None


class EmulatedDense(nn.Module):
    """A dense part with emulated compute time; a small linear layer makes its gradients real."""

    def __init__(self, dim: int, device: EmulatedDevice, forward: float, backward: float):
        super().__init__()
        self.head = nn.Linear(dim, 4)
        self._times = device, forward, backward

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(_EmulatedCompute.apply(rows, *self._times)).pow(2).mean()
