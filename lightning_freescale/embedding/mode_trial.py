"""``prioritize="auto"``: try both paths on the first steps, keep the faster one. Switching between them is exact."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lightning_freescale.embedding.schedule import Schedule
from lightning_freescale.runtime.log import log_once

WARM_UP = 3  # steps before the first measurement: kernels, buffers and connections are made in them
BLOCK = 8  # steps of one path in a row; the first of them pays for the switch and the last for waiting at its end
ROUNDS = 2  # blocks of each path, in turns, so that a drift of the data favours neither
GAIN = 0.99  # the prioritized path must take less than this share of the synchronous one's time


class Verdict(NamedTuple):
    """What the trial found. Seconds are a step's, on the slowest rank."""

    prioritized: bool
    seconds: float
    synchronous_seconds: float

    def __str__(self) -> str:
        chosen, other = ("prioritized", "synchronous") if self.prioritized else ("synchronous", "prioritized")
        mine, theirs = self.seconds, self.synchronous_seconds
        if not self.prioritized:
            mine, theirs = theirs, mine
        return f"{chosen} exchange, {mine * 1e3:.1f} ms a step against {theirs * 1e3:.1f} {other}"


class Trial:
    """Says for each step which path it takes, and collects how long the blocks last.

    >>> trial = Trial()
    >>> [trial.prioritized(step) for step in (0, 3, 10, 11, 18, 19)]
    [False, False, False, True, True, False]
    """

    steps = WARM_UP + 2 * ROUNDS * BLOCK

    def __init__(self) -> None:
        self._start = 0.0
        self.seconds: dict[bool, list[float]] = {False: [], True: []}  # per step, one entry a block

    @staticmethod
    def prioritized(step: int) -> bool:
        """Whether ``step`` of the trial takes the prioritized path."""
        return step >= WARM_UP and ((step - WARM_UP) // BLOCK) % 2 == 1

    @staticmethod
    def at_boundary(step: int) -> bool:
        """Whether a block begins or ends before ``step``: the device is synchronised there, and nowhere else."""
        return step >= WARM_UP and (step - WARM_UP) % BLOCK == 0

    def note(self, step: int, now: float) -> None:
        """Take the time ``now`` (seconds) before ``step``, at a boundary."""
        if step > WARM_UP:
            self.seconds[self.prioritized(step - 1)].append((now - self._start) / BLOCK)
        self._start = now

    def result(self) -> tuple[float, float]:
        """Seconds a step of the synchronous and the prioritized path on this rank: the better block of each."""
        return min(self.seconds[False]), min(self.seconds[True])


def decide(results: Sequence[tuple[float, float]]) -> Verdict:
    """The verdict on all ranks' results: equal everywhere, because it is a function of all of them.

    >>> print(decide([(0.040, 0.031), (0.052, 0.032)]))
    prioritized exchange, 32.0 ms a step against 52.0 synchronous
    >>> print(decide([(0.0100, 0.0100)]))
    synchronous exchange, 10.0 ms a step against 10.0 prioritized
    """
    synchronous, prioritized = (max(side) for side in zip(*results, strict=True))
    return Verdict(prioritized < GAIN * synchronous, prioritized, synchronous)


class Chooser:
    """Takes a schedule through the trial and leaves it on the faster path, the same on all ranks.

    Args:
        schedule: of the steps to come.
        device: that computes them.
        gather: ``(synchronous, prioritized)`` seconds of every rank, from this rank's. A collective.
    """

    def __init__(
        self,
        schedule: Schedule,
        device: torch.device,
        gather: Callable[[tuple[float, float]], list[tuple[float, float]]],
    ):
        self._schedule, self._device, self._gather = schedule, device, gather
        self._trial, self._step = Trial(), 0
        schedule.activate(False)

    def before_step(self) -> Verdict | None:
        """Take the time, choose the path of the step, and in the end decide: then there is a verdict, and nothing more to do."""
        step, self._step = self._step, self._step + 1
        if self._trial.at_boundary(step):
            self._schedule.flush()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._trial.note(step, time.perf_counter())
        if step < self._trial.steps:
            self._schedule.activate(self._trial.prioritized(step))
            return None
        verdict = decide(self._gather(self._trial.result()))
        self._schedule.activate(verdict.prioritized)
        log_once(f"prioritize='auto': {verdict}")
        return verdict
