"""How far the host may run ahead of a GPU within a step: as far as it must, and no further.

What a step does at its end, the exchange of gradients above all, is queued when the host gets there, long before the device
does. Until then several streams wait on the device, and each of them slows the start of every kernel beside it
(``benchmarks/waiting_streams.py``). So the host waits in their place, until shortly before the device needs what comes next.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

REMEMBERED = 8  # steps
MARGIN = 10e-3  # seconds; shorter spans are left alone


def pause(spans: Sequence[float], errands: Sequence[float]) -> float:
    """How long the host rests after the device has begun a span, in seconds.

    Args:
        spans: how long the last ones took on the device, in seconds.
        errands: how long the host has then needed, in seconds, until it was back at the device's next work; sometimes more,
            where it had to wait for something else.
    """
    if not spans or not errands:
        return 0.0
    return max(0.0, min(spans) - 3 * min(errands) - MARGIN)


class Pace:
    """Holds the host back at one point of every step.

    ``begin -> hold -> resumed`` in each: the device's span between ``begin`` and ``hold``, and the host's errands between
    ``hold`` and ``resumed``, are learnt from the steps before. A host that is late is never held.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._began: torch.cuda.Event | None = None
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=REMEMBERED)  # on the device yet
        self._spans: deque[float] = deque(maxlen=REMEMBERED)
        self._errands: deque[float] = deque(maxlen=REMEMBERED)
        self._left: float | None = None  # when the host was let go

    def begin(self) -> None:
        """The device will begin the span here, on the current stream."""
        if self._cuda:
            self._began = self._event()

    def hold(self) -> None:
        """The device's span ends here. Wait, if the device has not even begun it and has long to go after that."""
        began, self._began = self._began, None
        if began is None:
            return
        self._learn()
        self._timed.append((began, self._event()))
        rest = pause(self._spans, self._errands)
        if rest and not began.query():
            began.synchronize()
            time.sleep(rest)
        self._left = time.perf_counter()

    def resumed(self) -> None:
        """The host is back at work that the device waits for."""
        if self._left is not None:
            self._errands.append(time.perf_counter() - self._left)
            self._left = None

    def _learn(self) -> None:
        while self._timed and self._timed[0][1].query():
            began, ended = self._timed.popleft()
            self._spans.append(began.elapsed_time(ended) / 1e3)

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event
