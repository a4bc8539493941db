"""When and how long the host waits: the rules run on CPU, the waits themselves on a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_freescale.runtime.host_pacing import PACING_MARGIN, HostPacer, host_wait


def test_the_host_does_not_wait_before_anything_is_measured() -> None:
    assert host_wait(1.0, [], []) == host_wait(1.0, [2.0], []) == host_wait(1.0, [], [0.001]) == 0.0


def test_the_wait_leaves_the_usual_launch_latency_and_the_margin() -> None:
    assert host_wait(0.1, [2.5, 2.0, 3.0], [0.01, 0.02, 0.5]) == pytest.approx(0.2 - 0.02 - PACING_MARGIN)


@pytest.mark.parametrize(("forward", "latency"), [(PACING_MARGIN / 2, 0.0), (0.05, 0.1), (0.002, 0.02)])
def test_a_host_with_a_long_launch_latency_does_not_wait(forward: float, latency: float) -> None:
    assert host_wait(forward, [2.0] * 8, [latency] * 8) == 0.0


def test_the_host_does_not_wait_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("the host waits"))
    pacer = HostPacer(torch.device("cpu"))
    for _ in range(3):
        pacer.forward_starts()
        pacer.backward_starts()
        pacer.hold_host()


class FakeEvent:
    """An event of a device that is far behind the host. It counts how often the host waits for such an event."""

    waits = 0

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        FakeEvent.waits += 1

    def elapsed_time(self, later: FakeEvent) -> float:
        return 0.0


@pytest.mark.parametrize(("forward", "waits"), [(0.05, True), (0.004, False)])
def test_the_host_does_not_wait_for_a_backward_that_is_shorter_than_its_launch_latency(
    monkeypatch: pytest.MonkeyPatch, forward: float, waits: bool
) -> None:
    monkeypatch.setattr(HostPacer, "_record_event", staticmethod(FakeEvent))
    monkeypatch.setattr(FakeEvent, "waits", 0)
    pacer = HostPacer(torch.device("cuda"))
    pacer._forwards.append(forward)
    pacer._backward_ratios.append(2.0)
    pacer._launch_latencies.append(0.01)  # with the margin: the host must be 13 ms ahead
    pacer.forward_starts()
    pacer.backward_starts()
    pacer.hold_host()
    assert bool(FakeEvent.waits) is waits


GPU_CYCLES = 50_000_000  # about 25 ms of a GPU's clock


def run_step(pacer: HostPacer, late: bool = False) -> torch.cuda.Event:
    """A forward and a backward that takes twice as long. Returns the event between them."""
    pacer.forward_starts()
    torch.cuda._sleep(GPU_CYCLES)
    pacer.backward_starts()
    between = pacer._backward
    assert between is not None
    torch.cuda._sleep(2 * GPU_CYCLES)
    if late:
        torch.cuda.synchronize()
    pacer.hold_host()
    return between


@pytest.mark.alone  # Other processes on the GPU would change how long a forward or a backward takes.
@pytest.mark.gpu
def test_the_host_waits_while_it_is_ahead() -> None:
    pacer = HostPacer(torch.device("cuda"))
    assert not run_step(pacer).query()  # nothing is measured yet: the host does not wait
    torch.cuda.synchronize()
    # The pacer takes that synchronize() for launch latency. The median of three latencies leaves it out.
    for _ in range(3):
        run_step(pacer)
    for _ in range(4):
        between = run_step(pacer)
        assert between.query()
        end = torch.cuda.Event()
        end.record()
        assert not end.query()  # the GPU still has work queued
    torch.cuda.synchronize()


@pytest.mark.alone  # Other processes on the GPU would change how long a forward or a backward takes.
@pytest.mark.gpu
def test_a_host_that_is_late_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    pacer = HostPacer(torch.device("cuda"))
    for late in (True, True, True, False):
        run_step(pacer, late)
        assert bool(waits) is not late
