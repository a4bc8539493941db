"""What the monitor itself costs, and how many steps it may record for that price."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

import torch

from lightning_freescale.bubbles.spans import Kind, Step
from lightning_freescale.bubbles.timeline import Timeline

MAX_OVERHEAD = 0.005  # share of the training time
# After the first interval, at most one step in ten is recorded. On an H200, recorded steps took up to 7% longer, which is more
# than the overhead measured here: the monitor cannot see how much its events slow down the compute.
MIN_SAMPLING_PERIOD = 10


def sampling_period(share: float) -> int:
    """Number of steps from one recorded step to the next, if recording a step takes ``share`` of the time of a step."""
    return max(MIN_SAMPLING_PERIOD, math.ceil(share / MAX_OVERHEAD))


def measure_span_cost(device: torch.device, tries: int = 100) -> float:
    """Approximate host time of recording one span, in seconds."""
    timeline = Timeline()
    timeline.open(device)
    for index in range(2):  # the first round creates the events that the second reuses
        timeline.begin_step(index)
        began = timeline.clock()
        for _ in range(tries):
            with timeline.span(Kind.METRICS):
                pass
        seconds = (timeline.clock() - began) / tries
        timeline.end_step()
        timeline.take()
    return seconds


class OverheadMeter:
    """Host time that the monitor takes, in seconds.

    Attributes:
        batch: to record the last batch.
        gather: to start the last gather of an interval.
    """

    def __init__(self, device: torch.device):
        self.batch, self.gather = 0.0, 0.0
        self._per_step: deque[float] = deque(maxlen=100)  # of the last recorded steps, without their spans
        self._span = measure_span_cost(device)

    def add_step(self, seconds: float) -> None:
        """Add the time at the end of a recorded step, besides that of its batch."""
        self._per_step.append(self.batch + seconds)

    def per_step(self, steps: Sequence[Step]) -> float:
        """Seconds for each of ``steps``, the recorded steps of an interval.

        Uses medians, because other processes on the machine can interrupt the monitor, and that is not its cost.
        """
        spans = self._span * statistics.median(len(step.spans) for step in steps)
        return statistics.median(self._per_step) + spans + self.gather / len(steps)
