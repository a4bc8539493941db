"""How far the host may run ahead of a GPU within a step: as far as it must, and no further.

What a step does at its end, the exchange of gradients above all, is queued when the host gets there, long before the device
does. Until then several streams wait on the device, and each of them slows the start of every kernel beside it
(``benchmarks/waiting_streams.py``). So the host waits in their place, until shortly before the device needs what comes next.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

REMEMBERED = 8  # steps
MARGIN = 5e-3  # seconds


def pause(forward: float, ratios: Sequence[float], errands: Sequence[float]) -> float:
    """How long the host rests after the device has begun a backward, in seconds.

    Args:
        forward: how long the device took for the forward of this step, in seconds.
        ratios: backward over forward, of the last steps.
        errands: how long the host needed after its rest, in seconds, until it had the next forward under way; sometimes more,
            where it had to wait for something else.
    """
    if not ratios or not errands:
        return 0.0
    return max(0.0, forward * min(ratios) - 2 * min(errands) - MARGIN)


class _Moments(NamedTuple):
    """Of a step, on the compute stream."""

    forward: torch.cuda.Event
    backward: torch.cuda.Event
    end: torch.cuda.Event


class Pace:
    """Holds the host back once in a step: ``forward -> backward -> hold``.

    What is known of the device and of the host comes from the steps before. A host that is not a backward ahead is not held, nor
    one that would be late if it waited for the shortest of the last backwards to begin.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._forward: torch.cuda.Event | None = None
        self._backward: torch.cuda.Event | None = None
        self._under_way: deque[_Moments] = deque(maxlen=REMEMBERED)
        self._forwards: deque[float] = deque(maxlen=REMEMBERED)
        self._ratios: deque[float] = deque(maxlen=REMEMBERED)
        self._errands: deque[float] = deque(maxlen=REMEMBERED)
        self._let_go: float | None = None

    def forward(self) -> None:
        """The device will begin a forward here, on the current stream."""
        if not self._cuda:
            return
        self._forward = self._mark()
        if self._let_go is not None:
            self._errands.append(time.perf_counter() - self._let_go)
            self._let_go = None

    def backward(self) -> None:
        """And its backward here."""
        if self._forward is not None:
            self._backward = self._mark()

    def hold(self) -> None:
        """The backward ends here. Wait, if the device has not even begun it and has long to go after that."""
        forward, backward = self._forward, self._backward
        self._forward = self._backward = None
        if forward is None or backward is None:
            return
        self._learn()
        self._under_way.append(_Moments(forward, backward, self._mark()))
        if pause(min(self._forwards, default=0.0), self._ratios, self._errands) and not backward.query():
            backward.synchronize()
            time.sleep(pause(_seconds(forward, backward), self._ratios, self._errands))
        self._let_go = time.perf_counter()

    def _learn(self) -> None:
        while self._under_way and self._under_way[0].end.query():
            done = self._under_way.popleft()
            forward, backward = _seconds(done.forward, done.backward), _seconds(done.backward, done.end)
            self._forwards.append(forward)
            self._ratios.append(backward / max(forward, 1e-6))

    @staticmethod
    def _mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event


def _seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return start.elapsed_time(end) / 1e3
