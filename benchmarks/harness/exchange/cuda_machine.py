"""The machine of a rank with a GPU: TorchRec exchanges over NCCL, the prioritized exchange over the chosen transport."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness.exchange.machine import MemoryMeter, Priority, Transport
from benchmarks.harness.gpu_cluster import reserved_sms
from benchmarks.harness.workload import ExchangeBatch
from lightning_freescale import transport


class LinearStack(nn.Module):
    """A stack of linear layers in bfloat16. Its cost grows with the number of events.

    One layer in four is trained. The others stand for attention, which has no parameters. If all layers were trained, their
    AllReduce would take longer than backward on the slow network between the ranks and would hide the effect to be measured.
    """

    def __init__(self, dim: int, width: int, layers: int):
        super().__init__()
        self.first = nn.Linear(dim, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for number, layer in enumerate(self.layers):
            layer.requires_grad_(number % 4 == 0)

    def forward(self, rows: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            hidden = self.first(rows)
            for layer in self.layers:
                hidden = hidden + layer(nn.functional.silu(hidden))
        return hidden.float().pow(2).mean()


class CudaMemoryMeter(MemoryMeter):
    """Does not count what the pipelines of the other variants keep allocated while they pause."""

    def __init__(self) -> None:
        self._others = self._allocated()
        self._own = 0  # bytes that this variant keeps while it pauses

    def start(self) -> None:
        self._others = self._allocated() - self._own
        torch.cuda.reset_peak_memory_stats()

    def stop(self) -> None:
        self.peak = max(self.peak, torch.cuda.max_memory_allocated() - self._others)
        self._own = self._allocated() - self._others

    @staticmethod
    def _allocated() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()


class CudaMachine:
    """This rank's GPU.

    Args:
        width: width of the dense part.
        layers: number of its layers.
        wanted: transport of prioritized rows and gradients, one of the strategy's ``transport`` options.
    """

    def __init__(self, width: int, layers: int, wanted: Transport):
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(self.device)
        reserved_sms.use(self.device)
        self._shape = {"width": width, "layers": layers}
        self._backend = transport.choose(wanted, self.device, overlapped=True).backend

    def sharding_group(self) -> dist.ProcessGroup:
        return transport.new_group("nccl", "low")

    def exchange_group(self, priority: Priority) -> dist.ProcessGroup:
        return transport.new_group(self._backend, priority)

    def dense(self, dim: int) -> nn.Module:
        return LinearStack(dim, **self._shape).to(self.device)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for parameter in parameters if parameter.requires_grad], lr=1e-3)

    def timestamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def pin(self, batch: ExchangeBatch) -> ExchangeBatch:
        return batch.pin_memory()

    def memory_meter(self) -> MemoryMeter:
        return CudaMemoryMeter()

    def describe(self) -> dict[str, Any]:
        return {
            "device": torch.cuda.get_device_name(self.device),
            "cores": reserved_sms.describe(),
            "exchange": self._backend,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        } | self._shape
