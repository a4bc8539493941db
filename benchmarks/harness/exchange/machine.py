"""What a rank of the exchange benchmarks runs on: a real GPU with NCCL, or an emulated one with an emulated network.

The emulated device computes by letting time pass. Like a GPU it works through what is launched on it while the host goes on;
the host waits where the exchange needs a result: before the gradient of the embeddings leaves, and after the optimizer. So ranks
need no core of their own, and the rows and gradients that travel are real.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness.emulation.clock import Clock, CountedTime, RealTime
from benchmarks.harness.emulation.network import Wire, new_link
from benchmarks.harness.gpu_cluster import reserved_sms as own_cores
from benchmarks.harness.workload import Batch, Workload
from lightning_freescale import transport

Priority = Literal["high", "low"]
Transport = Literal["auto", "nccl", "host"]


class Machine(Protocol):
    """The parts of a benchmark that differ between devices."""

    device: torch.device

    def sharding_group(self) -> dist.ProcessGroup:
        """A process group of all ranks for what TorchRec exchanges itself."""

    def exchange_group(self, priority: Priority) -> dist.ProcessGroup:
        """A process group of all ranks for prioritized rows and gradients."""

    def dense(self, dim: int) -> nn.Module:
        """The dense part: rows ``[n, dim]`` to a scalar loss."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer: ...

    def mark(self) -> Any:
        """A point in the device's time."""

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks."""

    def pin(self, batch: Batch) -> Batch:
        """The batch where a loader would have put it."""

    def memory(self) -> Memory:
        """A meter of the device memory that one side takes."""

    def describe(self) -> dict[str, Any]:
        """What to write beside the figures."""


class Memory:
    """Most device memory a side took while it had its turns; here, on a device whose memory is the host's, none."""

    peak = 0  # bytes beyond what was allocated when the meter was made

    def open(self) -> None:
        """Its turn begins."""

    def close(self) -> None:
        """Its turn is over."""


def make_machine(device: str, ranks: int, clock: str, tail: float, wanted: Transport) -> tuple[Machine, Workload]:
    """This rank's machine, and what to train on it. Shapes of a real recommender on CUDA, of a small one on an emulated device.

    Args:
        clock: ``"counted"`` or ``"real"``, for the emulated device.
        tail: its compute after backward, as a share of that of forward and backward.
        wanted: transport of the prioritized exchange, for CUDA.
    """
    if device == "cuda":
        return CudaMachine(width=1024, layers=20, wanted=wanted), Workload(128, 5.8, 1.2, 8192, rows=8_000_000, dim=128)
    workload = Workload(64, 3.6, 0.8, 400, rows=60_000, dim=128)
    emulation = Emulation.around(0.05, workload, ranks, tail)
    return EmulatedMachine(emulation, CountedTime() if clock == "counted" else RealTime()), workload


# ---- emulated --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Emulation:
    """Seconds of compute, and the wire of each rank.

    A dense backward takes twice its forward. ``optimizer`` stands for all that follows backward: the tail of the dense
    AllReduce, clipping, the dense optimizer's step.
    """

    forward: float
    backward: float
    optimizer: float
    bandwidth: float  # bytes a second
    latency: float  # seconds

    @classmethod
    def around(cls, rows: float, workload: Workload, ranks: int, tail: float) -> Emulation:
        """An exchange of a batch's rows takes ``rows`` seconds and fits behind the forward.

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


class Device:
    """Does one thing after another while the host goes on."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._free = clock, 0.0

    def launch(self, seconds: float) -> None:
        self._free = max(self._free, self._clock.now()) + seconds

    def synchronize(self) -> None:
        self._clock.wait_until(self._free)


class _Compute(torch.autograd.Function):
    """The identity, after a while."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, device: Device, forward: float, backward: float) -> Tensor:
        ctx.device, ctx.seconds = device, backward
        device.launch(forward)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.device.launch(ctx.seconds)
        ctx.device.synchronize()  # the gradient leaves for the other ranks
        return gradients[0], None, None, None


class EmulatedDense(nn.Module):
    """A dense part that takes its time; a small linear layer makes its gradients real."""

    def __init__(self, dim: int, device: Device, forward: float, backward: float):
        super().__init__()
        self.head = nn.Linear(dim, 4)
        self._times = device, forward, backward

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(_Compute.apply(rows, *self._times)).pow(2).mean()


class EmulatedMachine:
    def __init__(self, emulation: Emulation, clock: Clock):
        torch.set_num_threads(1)
        self.device = torch.device("cpu")
        self.emulation, self._clock = emulation, clock
        self._wire = Wire(clock, emulation.bandwidth, emulation.latency)
        self._compute = Device(clock)

    def sharding_group(self) -> dist.ProcessGroup:
        return new_link(self._wire, priority=0)

    def exchange_group(self, priority: Priority) -> dist.ProcessGroup:
        return new_link(self._wire, priority=0 if priority == "high" else 1)

    def dense(self, dim: int) -> nn.Module:
        return EmulatedDense(dim, self._compute, self.emulation.forward, self.emulation.backward)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=1e-2)

        def take_time(*_: Any) -> None:
            self._compute.launch(self.emulation.optimizer)
            self._compute.synchronize()  # what TorchRec does next is queued behind it

        optimizer.register_step_post_hook(take_time)
        return optimizer

    def mark(self) -> float:
        return self._clock.now()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def pin(self, batch: Batch) -> Batch:
        return batch

    def memory(self) -> Memory:
        return Memory()

    def describe(self) -> dict[str, Any]:
        emulation = self.emulation
        return {
            "device": f"emulated on {os.cpu_count()} cores ({platform.machine()})",
            "forward_ms": 1e3 * emulation.forward,
            "backward_ms": 1e3 * emulation.backward,
            "after_backward_ms": 1e3 * emulation.optimizer,
            "bandwidth_mb_per_s": emulation.bandwidth / 1e6,
            "latency_ms": 1e3 * emulation.latency,
        }


# ---- real ------------------------------------------------------------------------------------------------------------------
class Layers(nn.Module):
    """A stack of linear layers in bfloat16, whose cost grows with the events.

    One layer in four is trained. The others stand for attention, which computes without parameters: were all trained, their
    AllReduce would take longer than their backward on the slow network of a virtual cluster, and hide what is measured.
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


class CudaMemory(Memory):
    """What the others hold while their pipelines wait for their turn is not counted."""

    def __init__(self) -> None:
        self._others = self._start()
        self._own = 0  # held between turns

    def open(self) -> None:
        self._others = self._start() - self._own
        torch.cuda.reset_peak_memory_stats()

    def close(self) -> None:
        self.peak = max(self.peak, torch.cuda.max_memory_allocated() - self._others)
        self._own = self._start() - self._others

    @staticmethod
    def _start() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()


class CudaMachine:
    """This rank's GPU.

    Args:
        width, layers: shape of the dense part.
        wanted: what moves prioritized rows and gradients, as the strategy's ``transport``.
    """

    def __init__(self, width: int, layers: int, wanted: Transport):
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(self.device)
        own_cores.use(self.device)
        self._shape = {"width": width, "layers": layers}
        self._backend = transport.choose(wanted, self.device, overlapped=True).backend

    def sharding_group(self) -> dist.ProcessGroup:
        return transport.new_group("nccl", "low")

    def exchange_group(self, priority: Priority) -> dist.ProcessGroup:
        return transport.new_group(self._backend, priority)

    def dense(self, dim: int) -> nn.Module:
        return Layers(dim, **self._shape).to(self.device)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for parameter in parameters if parameter.requires_grad], lr=1e-3)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def pin(self, batch: Batch) -> Batch:
        return batch.pin_memory()

    def memory(self) -> Memory:
        return CudaMemory()

    def describe(self) -> dict[str, Any]:
        return {
            "device": torch.cuda.get_device_name(self.device),
            "cores": own_cores.describe(),
            "exchange": self._backend,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        } | self._shape
