"""Chooses the machine and the workload of an exchange benchmark."""

from __future__ import annotations

from benchmarks.harness.emulation.clock import RealClock, VirtualClock
from benchmarks.harness.emulation.device import EmulatedTimes
from benchmarks.harness.exchange.cuda_machine import CudaMachine
from benchmarks.harness.exchange.emulated_machine import EmulatedMachine
from benchmarks.harness.exchange.machine import Machine, Transport
from benchmarks.harness.workload import EqualCostWorkload


def make_machine(
    device: str, ranks: int, clock: str, tail: float, wanted: Transport
) -> tuple[Machine, EqualCostWorkload]:
    """This rank's machine and its workload: the size of a real recommender on CUDA, of a small one on the emulated device.

    Args:
        clock: ``"counted"`` (virtual) or ``"real"``; emulated device only.
        tail: compute after backward, as a share of forward and backward; emulated device only.
        wanted: transport of the prioritized exchange; CUDA only.
    """
    if device == "cuda":
        machine = CudaMachine(width=1024, layers=20, wanted=wanted)
        return machine, EqualCostWorkload(128, 5.8, 1.2, 8192, rows=8_000_000, dim=128)
    workload = EqualCostWorkload(64, 3.6, 0.8, 400, rows=60_000, dim=128)
    times = EmulatedTimes.for_exchange(0.05, workload, ranks, tail)
    return EmulatedMachine(times, VirtualClock() if clock == "counted" else RealClock()), workload
