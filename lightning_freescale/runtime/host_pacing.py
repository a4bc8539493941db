"""How far the host runs ahead of the GPU within a step: far enough to hide its launch latency, and no further.

The host queues the work of a step's end, above all the exchange of gradients, long before the GPU reaches it. Until then
several streams wait on the device, and each waiting stream slows the start of every kernel beside it
(``benchmarks/waiting_streams.py`` measures this). So the host waits instead, until shortly before the GPU needs the next work.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch

PACING_STEPS = 8  # number of recent steps whose times are kept
PACING_MARGIN = 3e-3  # seconds by which the host resumes earlier than the estimate says


def host_wait(forward: float, backward_ratios: Sequence[float], launch_latencies: Sequence[float]) -> float:
    """How long the host may wait after the GPU has started a backward, in seconds; 0 while nothing is measured.

    Args:
        forward: the time that the GPU took for the forward of this step, in seconds.
        backward_ratios: the time of the backward divided by the time of the forward, for each of the last steps.
        launch_latencies: for each of the last steps, the seconds from the end of the host's wait until it had launched the
            start of the next forward. Some are too long, because the host also waited for something else.
    """
    if not backward_ratios or not launch_latencies:
        return 0.0
    return max(0.0, forward * min(backward_ratios) - median(launch_latencies) - PACING_MARGIN)


class _StepEvents(NamedTuple):
    """The events of one step on the compute stream: start of the forward, start and end of the backward."""

    forward: torch.cuda.Event
    backward: torch.cuda.Event
    end: torch.cuda.Event


class HostPacer:
    """Makes the host wait once in each step. Call ``forward_starts``, ``backward_starts`` and ``hold_host``, in this order.

    The times of earlier steps decide how long the host waits. It does not wait if the GPU has already started the backward,
    nor if even the shortest of the recent steps would leave too little time to launch the next work. On CPU nothing happens.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._forward: torch.cuda.Event | None = None
        self._backward: torch.cuda.Event | None = None
        self._unfinished: deque[_StepEvents] = deque(maxlen=PACING_STEPS)
        self._forwards: deque[float] = deque(maxlen=PACING_STEPS)
        self._backward_ratios: deque[float] = deque(maxlen=PACING_STEPS)
        self._launch_latencies: deque[float] = deque(maxlen=PACING_STEPS)
        self._resumed_at: float | None = None

    def forward_starts(self) -> None:
        """Note that the forward of a step starts here, on the current stream."""
        if not self._cuda:
            return
        self._forward = self._record_event()
        if self._resumed_at is not None:
            self._launch_latencies.append(time.perf_counter() - self._resumed_at)
            self._resumed_at = None

    def backward_starts(self) -> None:
        """Note that the backward of the step starts here, on the current stream."""
        if self._forward is not None:
            self._backward = self._record_event()

    def hold_host(self) -> None:
        """Note that the backward ends here, and make the host wait if it is far ahead of the GPU."""
        forward, backward = self._forward, self._backward
        self._forward = self._backward = None
        if forward is None or backward is None:
            return
        self._read_finished_steps()
        self._unfinished.append(_StepEvents(forward, backward, self._record_event()))
        expected = host_wait(min(self._forwards, default=0.0), self._backward_ratios, self._launch_latencies)
        if expected and not backward.query():
            backward.synchronize()
            time.sleep(host_wait(_seconds(forward, backward), self._backward_ratios, self._launch_latencies))
        self._resumed_at = time.perf_counter()

    def _read_finished_steps(self) -> None:
        while self._unfinished and self._unfinished[0].end.query():
            step = self._unfinished.popleft()
            forward, backward = _seconds(step.forward, step.backward), _seconds(step.backward, step.end)
            self._forwards.append(forward)
            self._backward_ratios.append(backward / max(forward, 1e-6))

    @staticmethod
    def _record_event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event


def _seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return start.elapsed_time(end) / 1e3
