"""Where the host rests: rules on CPU, the rest itself on a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_freescale.runtime.pace import MARGIN, Pace, pause


def test_nothing_is_known_at_first() -> None:
    assert pause(1.0, [], []) == pause(1.0, [2.0], []) == pause(1.0, [], [0.001]) == 0.0


def test_the_host_is_back_in_time() -> None:
    assert pause(0.1, [2.5, 2.0, 3.0], [0.01, 0.5]) == pytest.approx(0.2 - 0.02 - MARGIN)


@pytest.mark.parametrize(("forward", "errand"), [(MARGIN / 2, 0.0), (0.05, 0.05), (0.002, 0.02)])
def test_a_host_that_has_much_to_do_does_not_rest(forward: float, errand: float) -> None:
    assert pause(forward, [2.0] * 8, [errand] * 8) == 0.0


def test_no_rest_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("the host rests"))
    pace = Pace(torch.device("cpu"))
    for _ in range(3):
        pace.forward()
        pace.backward()
        pace.hold()


class FakeEvent:
    """Of a device that is far behind; a wait for it is noted."""

    waits = 0

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        FakeEvent.waits += 1

    def elapsed_time(self, later: FakeEvent) -> float:
        return 0.0


@pytest.mark.parametrize(("forward", "held"), [(0.05, True), (0.004, False)])
def test_the_host_does_not_wait_for_a_backward_that_is_over_before_it_is_back(
    monkeypatch: pytest.MonkeyPatch, forward: float, held: bool
) -> None:
    monkeypatch.setattr(Pace, "_mark", staticmethod(FakeEvent))
    monkeypatch.setattr(FakeEvent, "waits", 0)
    pace = Pace(torch.device("cuda"))
    pace._forwards.append(forward)
    pace._ratios.append(2.0)
    pace._errands.append(0.01)  # with twice that and the margin, 25 ms ahead is enough
    pace.forward()
    pace.backward()
    pace.hold()
    assert bool(FakeEvent.waits) is held


CYCLES = 50_000_000  # of a GPU's clock: some 25 ms


def a_step(pace: Pace, late: bool = False) -> torch.cuda.Event:
    """A forward and a backward twice as long; returns the moment between them."""
    pace.forward()
    torch.cuda._sleep(CYCLES)
    pace.backward()
    between = pace._backward
    assert between is not None
    torch.cuda._sleep(2 * CYCLES)
    if late:
        torch.cuda.synchronize()
    pace.hold()
    return between


@pytest.mark.gpu
def test_the_host_rests_while_it_is_ahead() -> None:
    pace = Pace(torch.device("cuda"))
    assert not a_step(pace).query()  # nothing is known: the host goes on at once
    torch.cuda.synchronize()
    a_step(pace)  # that wait passes for an errand of the host: it goes on once more
    for _ in range(4):
        between = a_step(pace)
        assert between.query()
        end = torch.cuda.Event()
        end.record()
        assert not end.query()  # the device has not run out of work
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_late_host_does_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(time, "sleep", rests.append)
    pace = Pace(torch.device("cuda"))
    for late in (True, True, True, False):
        a_step(pace, late)
        assert bool(rests) is not late
