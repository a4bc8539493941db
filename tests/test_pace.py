"""Where the host rests: rules on CPU, the rest itself on a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_freescale.pace import MARGIN, Pace, pause

CPU = torch.device("cpu")


def test_nothing_is_known_at_first() -> None:
    assert pause([], []) == pause([1.0], []) == pause([], [0.001]) == 0.0


def test_the_host_is_back_in_time() -> None:
    assert pause([0.2, 0.1, 0.3], [0.01, 0.5]) == pytest.approx(0.1 - 0.03 - MARGIN)


@pytest.mark.parametrize(("span", "errand"), [(MARGIN, 0.0), (0.1, 0.04), (0.002, 0.02)])
def test_a_host_that_has_much_to_do_does_not_rest(span: float, errand: float) -> None:
    assert pause([span] * 8, [errand] * 8) == 0.0


def test_no_rest_on_cpu() -> None:
    pace = Pace(CPU)
    for _ in range(3):
        pace.begin()
        pace.hold()
        pace.resumed()
    assert not pace._spans
    assert not pace._errands


CYCLES = 100_000_000  # of a GPU's clock: some 50 ms


@pytest.mark.gpu
def test_the_host_rests_while_it_is_ahead() -> None:
    """A device that has much to do before each span and in it, and a host that has nothing to do."""
    pace = Pace(torch.device("cuda"))
    held, ahead = [], []
    for _ in range(8):
        torch.cuda._sleep(CYCLES)
        pace.begin()
        begun = pace._began
        assert begun is not None
        torch.cuda._sleep(CYCLES)
        pace.hold()
        held.append(begun.query())
        end = torch.cuda.Event()
        end.record()
        ahead.append(not end.query())
        pace.resumed()
    assert not held[0]  # nothing was known
    assert all(held[4:])
    assert all(ahead)  # the device never ran out of work


@pytest.mark.gpu
def test_a_late_host_does_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(time, "sleep", rests.append)
    pace = Pace(torch.device("cuda"))
    for late in (True, True, True, True, False):
        if not late:
            torch.cuda._sleep(CYCLES)
        pace.begin()
        torch.cuda._sleep(CYCLES)
        if late:
            torch.cuda.synchronize()
        pace.hold()
        pace.resumed()
        assert bool(rests) is not late
