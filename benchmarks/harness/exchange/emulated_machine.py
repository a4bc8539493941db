"""The machine of a rank without a GPU: an emulated device and an emulated network."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness.emulation.clock import Clock
from benchmarks.harness.emulation.device import EmulatedDense, EmulatedDevice, EmulatedTimes
from benchmarks.harness.emulation.network import Wire, new_emulated_group
from benchmarks.harness.exchange.machine import MemoryMeter, Priority
from benchmarks.harness.workload import ExchangeBatch


class EmulatedMachine:
    """The emulated device and network of one rank; implements the interface ``Machine``."""

    def __init__(self, times: EmulatedTimes, clock: Clock):
        torch.set_num_threads(1)
        self.device = torch.device("cpu")
        self.times, self._clock = times, clock
        self._wire = Wire(clock, times.bandwidth, times.latency)
        self._compute = EmulatedDevice(clock)

    def sharding_group(self) -> dist.ProcessGroup:
        return new_emulated_group(self._wire, priority=0)

    def exchange_group(self, priority: Priority) -> dist.ProcessGroup:
        return new_emulated_group(self._wire, priority=0 if priority == "high" else 1)

    def dense(self, dim: int) -> nn.Module:
        return EmulatedDense(dim, self._compute, self.times.forward, self.times.backward)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=1e-2)

        def take_time(*_: Any) -> None:
            self._compute.launch(self.times.optimizer)
            self._compute.synchronize()  # TorchRec's next operation would be queued behind it

        optimizer.register_step_post_hook(take_time)
        return optimizer

    def timestamp(self) -> float:
        return self._clock.now()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def pin(self, batch: ExchangeBatch) -> ExchangeBatch:
        return batch

    def memory_meter(self) -> MemoryMeter:
        return MemoryMeter()

    def describe(self) -> dict[str, Any]:
        times = self.times
        return {
            "device": f"emulated on {os.cpu_count()} cores ({platform.machine()})",
            "forward_ms": 1e3 * times.forward,
            "backward_ms": 1e3 * times.backward,
            "after_backward_ms": 1e3 * times.optimizer,
            "bandwidth_mb_per_s": times.bandwidth / 1e6,
            "latency_ms": 1e3 * times.latency,
        }
