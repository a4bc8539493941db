"""``prioritize="auto"``: which mode each step of the trial uses, and which mode is chosen."""

from __future__ import annotations

import doctest

import pytest

from lightning_freescale.embedding import mode_trial
from lightning_freescale.embedding.mode_trial import (
    BLOCK_STEPS,
    BLOCKS_PER_MODE,
    TRIAL_WARM_UP_STEPS,
    TrialTimes,
    decide,
)


def run(seconds: dict[bool, float]) -> TrialTimes:
    """A trial in which each step of a mode takes the given time."""
    times, now = TrialTimes(), 0.0
    for step in range(TrialTimes.steps + 1):
        if times.at_boundary(step):
            times.note(step, now)
        now += seconds[times.prioritized(step)]
    return times


def test_blocks_of_both_modes_alternate() -> None:
    modes = [TrialTimes.prioritized(step) for step in range(TrialTimes.steps)]
    assert not any(modes[:TRIAL_WARM_UP_STEPS])
    measured = modes[TRIAL_WARM_UP_STEPS:]
    blocks = [measured[i * BLOCK_STEPS : (i + 1) * BLOCK_STEPS] for i in range(2 * BLOCKS_PER_MODE)]
    assert blocks == [[i % 2 == 1] * BLOCK_STEPS for i in range(2 * BLOCKS_PER_MODE)]


def test_times_count_for_the_right_mode() -> None:
    assert run({False: 0.5, True: 0.25}).result() == pytest.approx((0.5, 0.25))


@pytest.mark.parametrize(
    ("results", "prioritized"),
    [
        ([(1.0, 0.5), (1.0, 0.5)], True),
        ([(1.0, 0.5), (0.6, 1.0)], False),  # the second rank is slower when prioritized
        ([(1.0, 0.995)], False),  # the gain is too small
        ([(1.0, 1.2)], False),
    ],
)
def test_the_slowest_rank_decides(results: list[tuple[float, float]], prioritized: bool) -> None:
    assert decide(results).prioritized is prioritized


def test_examples() -> None:
    assert doctest.testmod(mode_trial).failed == 0
