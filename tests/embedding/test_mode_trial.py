"""``prioritize="auto"``: which path each step of the trial takes, and the verdict."""

from __future__ import annotations

import doctest

import pytest

from lightning_freescale.embedding import mode_trial as trial
from lightning_freescale.embedding.mode_trial import BLOCK, ROUNDS, WARM_UP, Trial, decide


def run(seconds: dict[bool, float]) -> Trial:
    """A trial in which each step of a path takes the given time."""
    one, now = Trial(), 0.0
    for step in range(Trial.steps + 1):
        if one.at_boundary(step):
            one.note(step, now)
        now += seconds[one.prioritized(step)]
    return one


def test_blocks_of_both_paths_in_turns() -> None:
    paths = [Trial.prioritized(step) for step in range(Trial.steps)]
    assert not any(paths[:WARM_UP])
    blocks = [paths[WARM_UP + i * BLOCK : WARM_UP + (i + 1) * BLOCK] for i in range(2 * ROUNDS)]
    assert blocks == [[i % 2 == 1] * BLOCK for i in range(2 * ROUNDS)]


def test_times_reach_the_right_path() -> None:
    assert run({False: 0.5, True: 0.25}).result() == pytest.approx((0.5, 0.25))


@pytest.mark.parametrize(
    ("results", "prioritized"),
    [
        ([(1.0, 0.5), (1.0, 0.5)], True),
        ([(1.0, 0.5), (0.6, 1.0)], False),  # one rank holds all back
        ([(1.0, 0.995)], False),  # not worth it
        ([(1.0, 1.2)], False),
    ],
)
def test_verdict_follows_the_slowest_rank(results: list[tuple[float, float]], prioritized: bool) -> None:
    assert decide(results).prioritized is prioritized


def test_examples() -> None:
    assert doctest.testmod(trial).failed == 0
