"""The partition solver: it equals its reference, has the documented properties, and reaches the required quality."""

from __future__ import annotations

import doctest
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_freescale.balance import partition
from lightning_freescale.balance.partition import fixed, loads, lower_bound, straggler, variable, zigzag
from tests.balance import reference
from tests.conftest import SHARED_DATA
from tests.ranks import run_ranks

whole_costs = st.lists(st.integers(0, 12) | st.integers(0, 10_000), max_size=24).map(lambda c: np.array(c, dtype=float))
real_costs = st.lists(st.floats(0, 1e6, allow_subnormal=False), max_size=60).map(np.array)
any_costs = whole_costs | real_costs
worlds = st.integers(1, 9)
SLACK = 1 + 1e-12  # rounding of sums of doubles


def heaviest(costs: NDArray, ranks_of_samples: NDArray, world: int) -> float:
    return float(loads(costs, ranks_of_samples, world).max())


def history_costs(lengths: NDArray) -> NDArray:
    return lengths + lengths.astype(float) ** 2 / 2048


def long_tail(n: int, seed: int) -> NDArray:
    """Return the costs of log-normal histories with up to 21,000 events."""
    lengths = np.random.default_rng(seed).lognormal(7.3, 1.2, size=n)
    return history_costs(np.minimum(lengths, 21_000).astype(np.int64))


# ---- against the reference ----


@given(whole_costs, worlds)
def test_zigzag_equals_its_reference(costs: NDArray, world: int) -> None:
    assert zigzag(costs, world).tolist() == reference.zigzag(costs.tolist(), world)


def whole_number_costs(rng: np.random.Generator, n: int) -> NDArray:
    """Return costs with many ties or a long tail. They are integers, so that no sum is rounded in any order."""
    scale = rng.choice([3, 20, 300, 100_000])
    return np.floor(rng.pareto(1.2, n) * scale).clip(0, 1e7) if rng.random() < 0.5 else rng.integers(0, scale, n) * 1.0


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_fixed_equals_its_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world, costs = int(rng.integers(1, 6)), whole_number_costs(rng, int(rng.integers(0, 22)))
    assert fixed(costs, world).tolist() == reference.fixed(costs.tolist(), world)


# The mean of the shares over each share is a power of two. So times are exact, and both solvers see the same ties.
EXACT_SHARES = [None, [1], [3, 3], [1, 1, 4], [1, 1, 2, 4], [4, 1, 2, 1]]


@given(st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_variable_equals_its_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shares = EXACT_SHARES[rng.integers(len(EXACT_SHARES))]
    world = len(shares) if shares else int(rng.integers(1, 5))
    costs = whole_number_costs(rng, int(rng.integers(1, 18)))
    tokens = limit = None
    if rng.random() < 0.7:  # a bound from impossible to generous
        tokens = rng.integers(0, 12, len(costs)).tolist()
        limit = max(*tokens, 1, -(-sum(tokens) // world)) + int(rng.integers(0, 4))
    try:
        expected = reference.variable(costs.tolist(), world, tokens, limit, shares)
    except ValueError:
        with pytest.raises(ValueError, match=f"max_tokens = {limit} is too tight"):
            variable(costs, world, tokens=tokens, max_tokens=limit, shares=shares)
    else:
        assert variable(costs, world, tokens=tokens, max_tokens=limit, shares=shares).tolist() == expected


def test_the_comparison_detects_a_wrong_plan() -> None:
    costs = long_tail(24, seed=0).round()
    assert zigzag(costs, 4).tolist() != reference.fixed(costs.tolist(), 4)
    assert fixed(costs, 4).tolist() != reference.zigzag(costs.tolist(), 4)


# ---- properties ----


@pytest.mark.parametrize("mode", ["zigzag", "fixed", "variable"])
@given(costs=any_costs, world=worlds)
def test_every_sample_has_one_rank_and_counts_are_equal(mode: partition.Mode, costs: NDArray, world: int) -> None:
    ranks = partition.PARTITIONS[mode](costs, world)
    assert ranks.shape == costs.shape
    assert ranks.dtype == np.int64
    assert ((ranks >= 0) & (ranks < world)).all()
    if mode != "variable":
        counts = np.bincount(ranks, minlength=world)
        assert counts.max() - counts.min() <= (1 if len(costs) % world else 0)


@given(any_costs, worlds)
def test_variable_is_never_worse_than_fixed_nor_fixed_than_zigzag(costs: NDArray, world: int) -> None:
    by_zigzag, by_fixed, by_variable = (heaviest(costs, f(costs, world), world) for f in (zigzag, fixed, variable))
    assert by_variable <= by_fixed * SLACK
    assert by_fixed <= by_zigzag * SLACK


@given(any_costs, worlds)
def test_no_plan_goes_below_its_bound(costs: NDArray, world: int) -> None:
    for mode, solve in partition.PARTITIONS.items():
        assert heaviest(costs, solve(costs, world), world) * SLACK >= lower_bound(costs, world, mode)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_the_bounds_hold_for_every_possible_plan(costs: list[int], world: int) -> None:
    best = {"fixed": float("inf"), "variable": float("inf")}
    for plan in itertools.product(range(world), repeat=len(costs)):
        counts = np.bincount(plan, minlength=world)
        load = heaviest(np.array(costs), np.array(plan), world)
        best["variable"] = min(best["variable"], load)
        if counts.max() - counts.min() <= 1:
            best["fixed"] = min(best["fixed"], load)
    assert lower_bound(costs, world, "variable") <= best["variable"] * SLACK
    assert lower_bound(costs, world, "fixed") <= best["fixed"] * SLACK
    assert lower_bound(costs, world, "zigzag") == lower_bound(costs, world, "fixed")


@given(any_costs, worlds, st.integers(0, 99))
def test_the_order_of_the_batch_does_not_matter(costs: NDArray, world: int, seed: int) -> None:
    """If the batch is shuffled, each rank still gets the same costs, also among samples of equal cost."""
    order = np.random.default_rng(seed).permutation(len(costs))
    for solve in partition.PARTITIONS.values():
        plan, shuffled = solve(costs, world), solve(costs[order], world)
        for rank in range(world):
            assert np.array_equal(np.sort(costs[plan == rank]), np.sort(costs[order][shuffled == rank]))


@given(any_costs, worlds)
def test_the_unit_of_cost_does_not_matter(costs: NDArray, world: int) -> None:
    for solve in partition.PARTITIONS.values():
        assert np.array_equal(solve(costs, world), solve(costs * 1024, world))


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 100)), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(0, 60),
)
def test_variable_keeps_the_memory_bound_or_raises(samples: list[tuple[int, int]], world: int, spare: int) -> None:
    costs, tokens = (np.array(column) for column in zip(*samples, strict=True))
    limit = int(max(tokens.max(), -(-tokens.sum() // world))) + spare
    try:
        ranks = variable(costs, world, tokens=tokens, max_tokens=limit)
    except ValueError as error:
        assert "is too tight for this batch" in str(error)  # noqa: PT017 - both outcomes are allowed
        assert spare < tokens.max()  # if one more sample would fit everywhere, balancing by tokens always finds a plan
    else:
        assert loads(tokens, ranks, world).max() <= limit


def test_the_memory_bound_changes_the_plan_and_holds() -> None:
    """Cheap samples can take much memory, so a plan by cost alone breaks the bound."""
    costs = np.array([100.0] + [1.0] * 40)
    tokens = np.array([10] + [10] * 40)
    free = variable(costs, 2)
    assert loads(tokens, free, 2).max() == 400
    bounded = variable(costs, 2, tokens=tokens, max_tokens=250)
    assert loads(tokens, bounded, 2).tolist() == [160, 250]


def test_shares_divide_the_work() -> None:
    costs = long_tail(4 * 64, seed=1)
    shares = np.array([1.0, 2.0, 3.0, 4.0])
    load = loads(costs, variable(costs, 4, shares=shares), 4)
    np.testing.assert_allclose(load / load.sum(), shares / shares.sum(), rtol=1e-3)
    assert np.array_equal(variable(costs, 4, shares=shares), variable(costs, 4, shares=shares / 10))


def test_samples_without_cost_are_distributed_evenly() -> None:
    for mode, solve in partition.PARTITIONS.items():
        assert np.bincount(solve(np.zeros(12), 4)).tolist() == [3, 3, 3, 3], mode


def _plans(rank: int, seeds: range) -> list[list[int]]:
    return [solve(long_tail(96, seed), 6).tolist() for seed in seeds for solve in partition.PARTITIONS.values()]


def test_all_ranks_compute_the_same_plan() -> None:
    first, second = run_ranks(_plans, world=2, args=(range(5),))
    assert first == second == _plans(0, range(5))


def test_any_type_of_array_is_accepted() -> None:
    costs = np.arange(1, 13)
    plan = fixed(costs, 3)
    for same in (costs.tolist(), costs.astype(np.float32), np.repeat(costs, 2)[::2]):
        assert np.array_equal(fixed(same, 3), plan)


# ---- figures ----


@pytest.mark.parametrize(("world", "batch_size", "goal"), [(8, 32, 0.0010), (64, 128, 0.0001)])
def test_fixed_leaves_almost_no_straggler(world: int, batch_size: int, goal: float) -> None:
    draws = [long_tail(world * batch_size, seed) for seed in range(10)]
    by_mode = {
        mode: np.mean([straggler(costs, solve(costs, world), world) for costs in draws])
        for mode, solve in partition.PARTITIONS.items()
    }
    assert by_mode["fixed"] <= goal
    assert by_mode["variable"] <= goal
    assert by_mode["zigzag"] > 10 * goal  # the data are hard enough


def movielens_lengths(path: Path) -> NDArray:
    users = np.loadtxt(path, delimiter=",", skiprows=1, usecols=0, dtype=np.int64)
    return np.unique(users, return_counts=True)[1]


def wikipedia_lengths() -> NDArray:
    path = SHARED_DATA / "wikipedia-edits.txt"
    if not path.exists():
        pytest.skip(f"{path.name} is not part of the package")
    return np.unique(np.loadtxt(path, usecols=0, dtype=np.int64), return_counts=True)[1]


@pytest.mark.parametrize("data", ["movielens", "wikipedia"])
def test_real_histories_come_within_half_a_percent_of_the_bound(data: str, request: pytest.FixtureRequest) -> None:
    world, batch = 8, 8 * 32
    lengths = movielens_lengths(request.getfixturevalue("movielens")) if data == "movielens" else wikipedia_lengths()
    for seed in range(3):
        shuffled = np.random.default_rng(seed).permutation(history_costs(lengths))
        for start in range(0, len(lengths) - batch + 1, batch):
            costs = shuffled[start : start + batch]
            for mode in ("fixed", "variable"):
                load = heaviest(costs, partition.PARTITIONS[mode](costs, world), world)
                assert load <= 1.005 * lower_bound(costs, world, mode), (mode, seed, start)


def test_the_straggler_share_is_the_mean_idle_time() -> None:
    assert straggler([3, 1, 2], [0, 1, 1], 2) == 0.0
    assert straggler([4, 1, 1], [0, 1, 1], 2) == 0.25  # rank 1 is idle for 2 of 4, rank 0 never
    assert straggler([4], [0], 4) == 0.75
    assert straggler([], [], 3) == 0.0


# ---- bad input ----


@pytest.mark.parametrize("solve", [zigzag, fixed, variable])
@pytest.mark.parametrize(
    ("costs", "world", "message"),
    [
        ([1.0, -2.0], 2, r"costs\[1\] = -2.0+ must be finite and not negative"),
        ([float("nan")], 2, r"costs\[0\] = nan must be finite"),
        ([1.0, float("inf")], 2, r"costs\[1\] = inf must be finite"),
        ([[1.0]], 2, "costs: must be 1-D, not 2-D"),
        ([1.0], 0, "ranks = 0 must be at least 1"),
    ],
)
def test_invalid_costs_are_refused(solve, costs: list, world: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve(costs, world)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tokens": 5}, "max_tokens is 5, tokens is missing"),
        ({"tokens": [1, 2, 3]}, "max_tokens is None, tokens is given"),
        ({"tokens": [1, 2], "max_tokens": 5}, "tokens: 2 entries, but costs has 3"),
        ({"tokens": [1, -2, 3], "max_tokens": 5}, r"tokens\[1\] = -2 is negative"),
        ({"tokens": [1, 2, 6], "max_tokens": 5}, r"tokens\[2\] = 6 is more than max_tokens = 5"),
        ({"tokens": [5, 5, 5], "max_tokens": 5}, "max_tokens = 5 is too tight .* on 2 ranks: .* needs 10"),
        ({"tokens": [1.5, 2, 3], "max_tokens": 5}, "tokens: dtype float64 is not an integer type"),
        ({"shares": [1, 2, 3]}, "shares: 3 entries for 2 ranks"),
        ({"shares": [1, 0]}, r"shares\[1\] = 0.0+ must be finite and positive"),
    ],
)
def test_invalid_bounds_and_shares_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        variable([1, 2, 3], 2, **arguments)


def test_an_unknown_mode_or_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="mode: 'fbs' is unknown; choose one of zigzag, fixed, variable"):
        lower_bound([1], 1, "fbs")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ranks_of_samples: 0 to 2, outside 0 \.\. 1"):
        straggler([1, 1], [0, 2], 2)


def test_the_example_in_the_docstring_is_correct() -> None:
    results = doctest.testmod(partition)
    assert results.attempted > 0
    assert results.failed == 0
