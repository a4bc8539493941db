"""``prioritize="auto"``: measure the synchronous and the prioritized exchange on the first steps, and keep the faster one.

Switching between the two changes no result beyond rounding, so the measured steps are normal training steps. A trial compares two
settings. A setting is the set of modules whose exchange is prioritized. First no module is compared with all modules. If the
model has several modules, each of them is then switched alone, and the switch is kept if it makes the steps faster.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lightning_freescale.embedding.schedule import ExchangeSchedule
from lightning_freescale.runtime.log import log_once

TRIAL_WARM_UP_STEPS = 3  # before the first measurement: these steps create kernels, buffers and connections
# Consecutive steps in one setting. The first one includes the switch of settings, the last one the wait for the device. With
# gradient accumulation a block has the steps of as many micro-batches as make complete optimizer steps.
BLOCK_STEPS = 8
BLOCKS_PER_MODE = 3  # the settings alternate, so that a trend in the data favours neither
FIRST_TRIAL_STEPS = TRIAL_WARM_UP_STEPS + 2 * BLOCKS_PER_MODE * BLOCK_STEPS
# The second setting is chosen if its steps take less than this fraction of the time of the first one, also when the noise of the
# measurement is added to their time.
MAX_TIME_RATIO = 0.98


class TrialResult(NamedTuple):
    """What one rank measured in a trial, in seconds per step: the fastest block of each setting, and how much blocks differ."""

    first: float
    second: float
    noise: float  # between the two fastest blocks of one setting, the larger one of both settings


class ModeChoice(NamedTuple):
    """The result of the trials. Times are seconds per step on the slowest rank."""

    prioritized: bool  # whether any module is prioritized
    seconds: float  # of the best setting in which a module is prioritized
    synchronous_seconds: float
    modules: tuple[str, ...] = ()  # the prioritized ones

    def __str__(self) -> str:
        times = {"prioritized": self.seconds, "synchronous": self.synchronous_seconds}
        chosen, other = ("prioritized", "synchronous") if self.prioritized else ("synchronous", "prioritized")
        return f"{chosen} exchange, {times[chosen] * 1e3:.1f} ms a step against {times[other] * 1e3:.1f} {other}"


class TrialTimes:
    """Decides which of two settings each step of a trial uses, and collects the times of the blocks.

    >>> times = TrialTimes(TRIAL_WARM_UP_STEPS)
    >>> [times.second(step) for step in (0, 3, 10, 11, 18, 19)]
    [False, False, False, True, True, False]

    Args:
        warm_up: steps before the first measurement.
        micro_batches: of each optimizer step.
    """

    def __init__(self, warm_up: int, micro_batches: int = 1) -> None:
        # A block begins with the first micro-batch of an optimizer step. If the mode changed later in that step, the rows of its
        # last micro-batch could not be divided by their collisions.
        self._warm_up, self._block_steps = (
            math.ceil(steps / micro_batches) * micro_batches for steps in (warm_up, BLOCK_STEPS)
        )
        self._block_start = 0.0
        self.steps = self._warm_up + 2 * BLOCKS_PER_MODE * self._block_steps
        self.seconds: dict[bool, list[float]] = {False: [], True: []}  # per step, one entry for each block

    def second(self, step: int) -> bool:
        """Whether ``step`` of the trial uses the second setting."""
        return step >= self._warm_up and ((step - self._warm_up) // self._block_steps) % 2 == 1

    def at_boundary(self, step: int) -> bool:
        """Whether a block starts or ends before ``step``. Only there the host waits for the device."""
        return step >= self._warm_up and (step - self._warm_up) % self._block_steps == 0

    def note(self, step: int, now: float) -> None:
        """At a boundary, before ``step``: note the time ``now`` in seconds."""
        if step > self._warm_up:
            self.seconds[self.second(step - 1)].append((now - self._block_start) / self._block_steps)
        self._block_start = now

    def result(self) -> TrialResult:
        """The times of this rank. One slow block of a setting, for example because of other programs, changes nothing."""
        first, second = (sorted(self.seconds[setting]) for setting in (False, True))
        return TrialResult(first[0], second[0], max(first[1] - first[0], second[1] - second[0]))


class TrialClock:
    """Seconds, without the time between :meth:`stop` and :meth:`start`, which may be nested.

    Validations and checkpoints stop the clock: they are no part of a step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._left_out, self._stops, self._stopped_at = 0.0, 0, 0.0

    def now(self) -> float:
        return (self._stopped_at if self._stops else self._clock()) - self._left_out

    def stop(self) -> None:
        if self._stops == 0:
            self._stopped_at = self._clock()
        self._stops += 1

    def start(self) -> None:
        self._stops = max(0, self._stops - 1)
        if self._stops == 0:
            self._left_out += self._clock() - self._stopped_at
            self._stopped_at = self._clock()


def decide(results: Sequence[tuple[float, float, float]]) -> ModeChoice:
    """Choose a mode from the results of all ranks. It is a function of all results, so every rank chooses the same.

    The prioritized exchange is chosen if it is clearly faster: by more than blocks of the same mode differ. A wrong choice would
    slow all later steps, and where the exchange can be hidden the gain is large.

    Args:
        results: the :class:`TrialResult` of each rank. The first setting is the synchronous one.

    >>> print(decide([(0.040, 0.031, 0.001), (0.052, 0.032, 0.002)]))
    prioritized exchange, 32.0 ms a step against 52.0 synchronous
    >>> print(decide([(0.0100, 0.0099, 0.0)]))
    synchronous exchange, 10.0 ms a step against 9.9 prioritized
    >>> print(decide([(0.0100, 0.0090, 0.0015)]))
    synchronous exchange, 10.0 ms a step against 9.0 prioritized
    """
    synchronous, prioritized, noise = (max(times) for times in zip(*results, strict=True))
    return ModeChoice(prioritized + noise < MAX_TIME_RATIO * synchronous, prioritized, synchronous)


class ModeTrial:
    """Runs the trials on a schedule, and leaves the schedule in the fastest setting. All ranks end in the same setting.

    Args:
        schedule: the schedule of the steps to measure.
        device: the device that computes them.
        gather: gathers the results of every rank. All ranks call it together.
        micro_batches: of each optimizer step.
    """

    def __init__(
        self,
        schedule: ExchangeSchedule,
        device: torch.device,
        gather: Callable[[TrialResult], list[TrialResult]],
        micro_batches: int = 1,
    ):
        self._schedule, self._device, self._gather = schedule, device, gather
        self.micro_batches = micro_batches
        self._clock = TrialClock()
        self._choice: ModeChoice | None = None  # of no module or all modules, until single modules change it
        self._left = list(schedule.names) if len(schedule.names) > 1 else []  # modules that are not tried alone yet
        self._begin(frozenset(), frozenset(schedule.names), TRIAL_WARM_UP_STEPS)
        schedule.activate(())

    def _begin(self, first: frozenset[str], second: frozenset[str], warm_up: int) -> None:
        self._first, self._second = first, second
        self._times, self._step = TrialTimes(warm_up, self.micro_batches), 0

    def before_step(self) -> ModeChoice | None:
        """Set the setting of the next step. Returns the choice when all trials are complete, and None before."""
        while True:
            step, self._step = self._step, self._step + 1
            if self._times.at_boundary(step):
                self._schedule.flush()
                self._wait_for_device()
                self._times.note(step, self._clock.now())
            if step < self._times.steps:
                self._schedule.activate(self._second if self._times.second(step) else self._first)
                return None
            best = self._compare()
            # A module that is called in an unsupported way stays synchronous in any setting.
            left = [name for name in self._left if name in self._schedule.capable]
            if not left:
                return self._conclude(best)
            self._left = left[1:]
            self._begin(best, best ^ {left[0]}, warm_up=0)

    def stop_clock(self) -> None:
        """Leave the time until :meth:`start_clock` out of the measurement. Waits for the device."""
        self._wait_for_device()
        self._clock.stop()

    def start_clock(self) -> None:
        self._wait_for_device()
        self._clock.start()

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _compare(self) -> frozenset[str]:
        """The faster setting of the trial that has just ended."""
        found = decide(self._gather(self._times.result()))
        best = self._second if found.prioritized else self._first
        if self._choice is None:
            self._choice = found
            return best
        seconds = min(found.seconds, found.synchronous_seconds) if best else self._choice.seconds
        (switched,) = self._first ^ self._second
        times = {self._first: found.synchronous_seconds, self._second: found.seconds}
        texts = {switched in setting: f"{1e3 * times[setting]:.1f} ms a step" for setting in times}
        log_once(
            f"prioritize='auto': {switched} alone: {texts[True]} prioritized, {texts[False]} synchronous; "
            f"{'prioritized' if switched in best else 'synchronous'} is kept"
        )
        self._choice = ModeChoice(bool(best), seconds, self._choice.synchronous_seconds)
        return best

    def _conclude(self, best: frozenset[str]) -> ModeChoice:
        assert self._choice is not None
        times = self._choice.seconds, self._choice.synchronous_seconds
        choice = ModeChoice(bool(best), *times, modules=tuple(sorted(best)))
        self._schedule.activate(best)
        log_once(f"prioritize='auto': {choice}")
        return choice
