"""``prioritize="auto"``: which setting each step of a trial uses, which one is chosen, and when it is measured again."""

from __future__ import annotations

import doctest
from collections.abc import Collection
from typing import Any

import pytest
import torch

from lightning_freescale.embedding import mode_review, mode_trial
from lightning_freescale.embedding.mode_review import REVIEW_STEPS, ModeReview, TrialConditions
from lightning_freescale.embedding.mode_trial import (
    BLOCK_STEPS,
    BLOCKS_PER_MODE,
    FIRST_TRIAL_STEPS,
    TRIAL_WARM_UP_STEPS,
    ModeChoice,
    ModeTrial,
    TrialClock,
    TrialTimes,
    decide,
)


def run(seconds: dict[bool, float]) -> TrialTimes:
    """A trial in which each step of a setting takes the given time."""
    times, now = TrialTimes(TRIAL_WARM_UP_STEPS), 0.0
    for step in range(times.steps + 1):
        if times.at_boundary(step):
            times.note(step, now)
        now += seconds[times.second(step)]
    return times


def test_blocks_of_both_settings_alternate() -> None:
    times = TrialTimes(TRIAL_WARM_UP_STEPS)
    assert times.steps == FIRST_TRIAL_STEPS
    second = [times.second(step) for step in range(times.steps)]
    assert not any(second[:TRIAL_WARM_UP_STEPS])
    measured = second[TRIAL_WARM_UP_STEPS:]
    blocks = [measured[i * BLOCK_STEPS : (i + 1) * BLOCK_STEPS] for i in range(2 * BLOCKS_PER_MODE)]
    assert blocks == [[i % 2 == 1] * BLOCK_STEPS for i in range(2 * BLOCKS_PER_MODE)]


@pytest.mark.parametrize(
    ("micro_batches", "warm_up", "block"), [(1, 3, 8), (2, 4, 8), (3, 3, 9), (5, 5, 10), (20, 20, 20)]
)
def test_a_block_has_complete_optimizer_steps(micro_batches: int, warm_up: int, block: int) -> None:
    times = TrialTimes(TRIAL_WARM_UP_STEPS, micro_batches)
    assert times.steps == warm_up + 2 * BLOCKS_PER_MODE * block
    boundaries = [step for step in range(times.steps + 1) if times.at_boundary(step)]
    assert boundaries == list(range(warm_up, times.steps + 1, block))
    for step in range(times.steps + 1):
        if times.at_boundary(step):
            times.note(step, float(step))
    assert times.result() == (1.0, 1.0, 0.0)


def test_times_count_for_the_right_setting() -> None:
    assert run({False: 0.5, True: 0.25}).result() == pytest.approx((0.5, 0.25, 0.0))


def test_one_slow_block_is_no_noise_and_two_are() -> None:
    times = TrialTimes(TRIAL_WARM_UP_STEPS)
    times.seconds = {False: [0.5, 0.9, 0.52], True: [0.25, 0.26, 0.25]}
    assert times.result() == pytest.approx((0.5, 0.25, 0.02))
    times.seconds[False] = [0.5, 0.9, 0.8]
    assert times.result() == pytest.approx((0.5, 0.25, 0.3))


@pytest.mark.parametrize(
    ("results", "prioritized"),
    [
        ([(1.0, 0.5, 0.0), (1.0, 0.5, 0.1)], True),
        ([(1.0, 0.5, 0.0), (0.6, 1.0, 0.0)], False),  # the second rank is slower when prioritized
        ([(1.0, 0.995, 0.0)], False),  # the gain is too small
        ([(1.0, 0.9, 0.05)], True),
        ([(1.0, 0.9, 0.05), (1.0, 0.9, 0.1)], False),  # blocks of one mode differ as much as the modes
        ([(1.0, 1.2, 0.0)], False),
    ],
)
def test_the_slowest_rank_decides(results: list[tuple[float, float, float]], prioritized: bool) -> None:
    assert decide(results).prioritized is prioritized


class Steps:
    """Steps of invented length: a schedule for ``ModeTrial``, and the clock on which its steps take time.

    Args:
        gains: seconds that a step is faster if a module is prioritized.
        incapable: modules that stay synchronous in any setting.
    """

    def __init__(self, gains: dict[str, float], incapable: Collection[str] = ()):
        self.gains, self.now = gains, 0.0
        self.names, self.capable = list(gains), [name for name in gains if name not in incapable]
        self.active: list[frozenset[str]] = []

    def activate(self, names: Collection[str]) -> None:
        self.setting = frozenset(names)

    def flush(self) -> None:
        pass

    def measure(self, pauses: dict[int, float] | None = None) -> ModeChoice:
        """Run steps of 100 s until the choice. ``pauses``: seconds of a validation after a step."""
        trial = ModeTrial(self, torch.device("cpu"), lambda mine: [mine])  # type: ignore[arg-type]
        trial._clock = TrialClock(lambda: self.now)
        while (choice := trial.before_step()) is None:
            self.active.append(self.setting)
            self.now += 100.0 - sum(self.gains[name] for name in self.setting)
            if pauses and len(self.active) in pauses:
                trial.stop_clock()
                trial.stop_clock()  # a checkpoint in the validation
                self.now += pauses[len(self.active)]
                trial.start_clock()
                trial.start_clock()
        assert self.setting == frozenset(choice.modules)
        return choice


@pytest.mark.parametrize(
    ("gains", "best"),
    [
        ({"a": 20.0}, {"a"}),
        ({"a": -5.0}, set()),
        ({"a": 20.0, "b": -8.0}, {"a"}),  # all modules together are faster than none
        ({"a": 8.0, "b": -20.0}, {"a"}),  # all modules together are slower than none
        ({"a": 5.0, "b": 6.0, "c": 7.0}, {"a", "b", "c"}),
        ({"a": -5.0, "b": -6.0}, set()),
    ],
)
def test_every_module_gets_the_faster_exchange(gains: dict[str, float], best: set[str]) -> None:
    steps = Steps(gains)
    choice = steps.measure()
    assert set(choice.modules) == best
    assert choice.prioritized is bool(best)
    assert choice.synchronous_seconds == pytest.approx(100.0)
    if best:
        assert choice.seconds == pytest.approx(100.0 - sum(gains[name] for name in best))
    alone = 2 * BLOCKS_PER_MODE * BLOCK_STEPS * (len(gains) if len(gains) > 1 else 0)
    assert len(steps.active) == FIRST_TRIAL_STEPS + alone


def test_a_module_that_stays_synchronous_is_not_tried_alone() -> None:
    steps = Steps({"a": 20.0, "b": 0.0}, incapable=["b"])
    assert "a" in steps.measure().modules
    assert len(steps.active) == FIRST_TRIAL_STEPS + 2 * BLOCKS_PER_MODE * BLOCK_STEPS


FIRST_PRIORITIZED = TRIAL_WARM_UP_STEPS + BLOCK_STEPS
# Seconds of a validation after a step, one in each prioritized block.
PAUSES = {
    FIRST_PRIORITIZED + 3: 500.0,
    FIRST_PRIORITIZED + 2 * BLOCK_STEPS + 5: 900.0,
    FIRST_PRIORITIZED + 4 * BLOCK_STEPS + 1: 400.0,
}


def test_validations_and_checkpoints_do_not_count() -> None:
    """A validation in each prioritized block would decide against it."""
    choice = Steps({"a": 20.0}).measure(PAUSES | {1: 70.0})
    assert choice == Steps({"a": 20.0}).measure()
    assert choice.prioritized
    clock = TrialClock(lambda: 0.0)
    clock.stop()
    assert clock.now() == 0.0


def test_stopping_the_clock_matters() -> None:
    """The control of the test above: the same pauses on a clock that does not stop."""
    times, now = TrialTimes(TRIAL_WARM_UP_STEPS), 0.0
    for step in range(times.steps + 1):
        if times.at_boundary(step):
            times.note(step, now)
        now += 80.0 if times.second(step) else 100.0
        now += PAUSES.get(step + 1, 0.0)
    assert not decide([times.result()]).prioritized


# ---- after the choice ------------------------------------------------------------------------------------------------
class OneModule:
    """A schedule of one module with invented counts."""

    def __init__(self) -> None:
        self.rows = self.collisions = 0

    @property
    def modules(self) -> Any:
        return [self]

    @property
    def exchange(self) -> Any:
        return self

    @property
    def stats(self) -> Any:
        return self


@pytest.mark.parametrize(
    ("ids", "collisions", "change"),
    [
        (100, 10, None),
        (140, 15, None),
        (160, 16, "a batch has 160 ids instead of 100"),
        (60, 6, "a batch has 60 ids instead of 100"),
        (100, 25, "25% of the rows collide instead of 10%"),
    ],
)
def test_much_other_batches_are_noticed(ids: int, collisions: int, change: str | None) -> None:
    schedule: Any = OneModule()
    review = ModeReview(lambda mine: [mine, mine])
    for _ in range(FIRST_TRIAL_STEPS):
        review.add_step(100)
        schedule.rows, schedule.collisions = schedule.rows + 100, schedule.collisions + 10
    review.choice_made(schedule)
    for _ in range(REVIEW_STEPS):
        assert review.change(schedule) is None  # not yet
        review.add_step(ids)
        schedule.rows, schedule.collisions = schedule.rows + ids, schedule.collisions + collisions
    assert review.change(schedule) == change


def test_another_number_of_micro_batches_is_noticed_at_once() -> None:
    review = ModeReview(lambda mine: [mine, mine])
    review.choice_made(OneModule(), 4)  # type: ignore[arg-type]
    assert review.change(None, 4) is None
    assert review.change(None, 1) == "accumulate_grad_batches is 1 instead of 4"


def test_without_a_schedule_only_the_size_counts() -> None:
    assert TrialConditions(100, None).change_since(TrialConditions(100, 0.5)) is None


def test_examples() -> None:
    for module in (mode_trial, mode_review):
        assert doctest.testmod(module).failed == 0
