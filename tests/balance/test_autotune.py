"""``retune``: on simulated ranks of different speed, the shares converge to the speeds."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.balance import CostModel, Planner, autotune
from lightning_freescale.balance.autotune import MAX_CHANGE, MIN_WORK_SHARE, SPEED_TOLERANCE, retune

speeds = st.lists(st.floats(0.4, 2.5), min_size=2, max_size=16)


@settings(max_examples=100, deadline=None)
@given(speeds=speeds, start=st.randoms(use_true_random=False))
def test_times_become_equal(speeds: list[float], start: object) -> None:
    speed = np.array(speeds)
    shares = np.array([start.uniform(0.5, 1.5) for _ in speeds])  # type: ignore[attr-defined]
    shares /= shares.sum()
    for _ in range(60):
        shares = retune(shares, work=100 * shares, seconds=100 * shares / speed)
    seconds = shares / speed
    assert np.abs(seconds / seconds.mean() - 1).max() < 2.5 * SPEED_TOLERANCE
    assert shares.sum() == pytest.approx(1)


@settings(max_examples=50, deadline=None)
@given(speeds=speeds, seed=st.integers(0, 1000))
def test_shares_converge_in_spite_of_noise(speeds: list[float], seed: int) -> None:
    speed, rng = np.array(speeds), np.random.default_rng(seed)
    shares = np.full(len(speeds), 1 / len(speeds))
    for _ in range(60):
        work = shares * rng.uniform(0.8, 1.2, len(speeds))  # a partition does not meet the shares exactly
        shares = retune(shares, work, work / speed * np.exp(0.02 * rng.standard_normal(len(speeds))))
    seconds = shares / speed
    assert np.abs(seconds / seconds.mean() - 1).max() < 0.12


@settings(max_examples=60, deadline=None)
@given(shares=st.lists(st.floats(0.5, 2), min_size=1, max_size=8), data=st.data())
def test_changes_are_bounded_and_every_rank_keeps_a_share(shares: list[float], data: st.DataObject) -> None:
    count = len(shares)
    old = np.array(shares) / sum(shares)
    measured = st.lists(st.just(0.0) | st.floats(1e-3, 1e3), min_size=count, max_size=count)
    work, seconds = data.draw(measured, label="work"), data.draw(measured, label="seconds")
    for _ in range(data.draw(st.integers(1, 30))):
        new = retune(old, work, seconds)
        assert new.sum() == pytest.approx(1)
        assert (new >= MIN_WORK_SHARE / count / (1 + MIN_WORK_SHARE)).all()
        change = new / old
        assert change.max() <= (1 + MAX_CHANGE) / (1 - MAX_CHANGE) + 1e-9  # one change, then normalisation to the sum 1
        assert change.min() >= (1 - MAX_CHANGE) / (1 + MAX_CHANGE) - 1e-9
        assert (retune(old, work, seconds) == new).all()
        old = new


def test_shares_of_equally_fast_ranks_do_not_change() -> None:
    assert retune([1, 1, 1], [5, 5, 5], [1.0, 1.015, 0.99]).tolist() == [1 / 3] * 3
    assert retune([0.25, 0.75], [0, 0], [1.0, 1.0]).tolist() == [0.25, 0.75]
    assert retune([0.25, 0.75], [0, 3], [1.0, 1.0]).tolist() == [0.25, 0.75]


def test_with_the_planner_idle_time_almost_disappears() -> None:
    """Four ranks, one of half the speed: idle time falls from a third to almost nothing."""
    rng = np.random.default_rng(0)
    speed, model = np.array([1.0, 1.0, 0.5, 1.0]), CostModel(1.0, 1 / 2048)
    shares: tuple[float, ...] = (0.25,) * 4
    idle = []
    for _ in range(30):
        lengths = np.minimum(rng.lognormal(6, 1.0, 4 * 64), 8000).astype(np.int64)
        ranks = Planner("variable", model, shares=shares)(lengths, world=4)
        work = np.bincount(ranks, weights=model(lengths), minlength=4)
        seconds = work / speed
        idle.append(1 - seconds.mean() / seconds.max())
        shares = tuple(retune(shares, work, seconds))
    assert idle[0] > 0.3
    assert np.mean(idle[-10:]) < 0.03
    assert shares[2] == pytest.approx(1 / 7, rel=0.05)


def test_the_example_in_the_docstring_is_correct() -> None:
    assert doctest.testmod(autotune).failed == 0
    assert doctest.testmod(autotune).attempted > 0
