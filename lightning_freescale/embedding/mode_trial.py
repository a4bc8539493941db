"""``prioritize="auto"``: measure the synchronous and the prioritized exchange on the first steps, and keep the faster one.

Switching between the two changes no result, so the measured steps are normal training steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lightning_freescale.embedding.schedule import ExchangeSchedule
from lightning_freescale.runtime.log import log_once

TRIAL_WARM_UP_STEPS = 3  # before the first measurement: these steps create kernels, buffers and connections
# Consecutive steps in one mode. The first one includes the switch of modes, the last one the wait for the device.
BLOCK_STEPS = 8
BLOCKS_PER_MODE = 2  # the modes alternate, so that a trend in the data favours neither
MAX_TIME_RATIO = 0.99  # prioritized is chosen if its steps take less than this fraction of the synchronous time


class ModeChoice(NamedTuple):
    """The result of the trial. Times are seconds per step on the slowest rank."""

    prioritized: bool
    seconds: float
    synchronous_seconds: float

    def __str__(self) -> str:
        times = {"prioritized": self.seconds, "synchronous": self.synchronous_seconds}
        chosen, other = ("prioritized", "synchronous") if self.prioritized else ("synchronous", "prioritized")
        return f"{chosen} exchange, {times[chosen] * 1e3:.1f} ms a step against {times[other] * 1e3:.1f} {other}"


class TrialTimes:
    """Decides which mode each step of the trial uses, and collects the times of the blocks.

    >>> [TrialTimes.prioritized(step) for step in (0, 3, 10, 11, 18, 19)]
    [False, False, False, True, True, False]
    """

    steps = TRIAL_WARM_UP_STEPS + 2 * BLOCKS_PER_MODE * BLOCK_STEPS

    def __init__(self) -> None:
        self._block_start = 0.0
        self.seconds: dict[bool, list[float]] = {False: [], True: []}  # per step, one entry for each block

    @staticmethod
    def prioritized(step: int) -> bool:
        """Whether ``step`` of the trial is prioritized."""
        return step >= TRIAL_WARM_UP_STEPS and ((step - TRIAL_WARM_UP_STEPS) // BLOCK_STEPS) % 2 == 1

    @staticmethod
    def at_boundary(step: int) -> bool:
        """Whether a block starts or ends before ``step``. Only there the host waits for the device."""
        return step >= TRIAL_WARM_UP_STEPS and (step - TRIAL_WARM_UP_STEPS) % BLOCK_STEPS == 0

    def note(self, step: int, now: float) -> None:
        """At a boundary, before ``step``: note the time ``now`` in seconds."""
        if step > TRIAL_WARM_UP_STEPS:
            self.seconds[self.prioritized(step - 1)].append((now - self._block_start) / BLOCK_STEPS)
        self._block_start = now

    def result(self) -> tuple[float, float]:
        """Seconds per synchronous and per prioritized step on this rank, in the faster block of each."""
        return min(self.seconds[False]), min(self.seconds[True])


def decide(results: Sequence[tuple[float, float]]) -> ModeChoice:
    """Choose a mode from the results of all ranks. It is a function of all results, so every rank chooses the same.

    >>> print(decide([(0.040, 0.031), (0.052, 0.032)]))
    prioritized exchange, 32.0 ms a step against 52.0 synchronous
    >>> print(decide([(0.0100, 0.0100)]))
    synchronous exchange, 10.0 ms a step against 10.0 prioritized
    """
    synchronous, prioritized = (max(times) for times in zip(*results, strict=True))
    return ModeChoice(prioritized < MAX_TIME_RATIO * synchronous, prioritized, synchronous)


class ModeTrial:
    """Runs the trial on a schedule, and leaves the schedule in the faster mode. All ranks end in the same mode.

    Args:
        schedule: the schedule of the steps to measure.
        device: the device that computes them.
        gather: gathers ``(synchronous, prioritized)`` seconds of every rank. All ranks call it together.
    """

    def __init__(
        self,
        schedule: ExchangeSchedule,
        device: torch.device,
        gather: Callable[[tuple[float, float]], list[tuple[float, float]]],
    ):
        self._schedule, self._device, self._gather = schedule, device, gather
        self._times, self._step = TrialTimes(), 0
        schedule.activate(False)

    def before_step(self) -> ModeChoice | None:
        """Set the mode of the next step. Returns the choice when the trial is complete, and None before."""
        step, self._step = self._step, self._step + 1
        if self._times.at_boundary(step):
            self._schedule.flush()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._times.note(step, time.perf_counter())
        if step < self._times.steps:
            self._schedule.activate(self._times.prioritized(step))
            return None
        choice = decide(self._gather(self._times.result()))
        self._schedule.activate(choice.prioritized)
        log_once(f"prioritize='auto': {choice}")
        return choice
