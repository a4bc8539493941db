"""The planner: modes and bounds in one value."""

from __future__ import annotations

import doctest
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.balance import CostModel, Planner, fixed, planner, straggler, variable, zigzag
from lightning_freescale.runtime.errors import ConfigurationError

LENGTHS = np.minimum(np.random.default_rng(0).lognormal(5, 1.2, 64), 4000).astype(np.int64)


def test_each_mode_is_its_solver_on_the_model_s_costs() -> None:
    model = CostModel(3.0, 0.01, 0.5)
    candidates = LENGTHS[::-1]
    costs = model(LENGTHS, candidates)
    for mode, solve in {"fixed": fixed, "zigzag": zigzag, "variable": variable}.items():
        plan = Planner(mode, model)(LENGTHS, candidates, world=4)  # type: ignore[arg-type]
        assert plan.tolist() == solve(costs, 4).tolist()
    assert Planner("fixed", model)(LENGTHS, world=4).tolist() != fixed(costs, 4).tolist()  # the candidates count


def test_variable_keeps_its_memory_bound() -> None:
    free = Planner("variable", CostModel(0.0, 1.0))
    tokens = np.bincount(free(LENGTHS, world=4), weights=LENGTHS)
    bound = int(tokens.max()) - 100
    kept = np.bincount(replace(free, max_tokens=bound)(LENGTHS, world=4), weights=LENGTHS)
    assert tokens.max() > bound >= kept.max()


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    world=st.integers(1, 8),
    slow=st.floats(1e-6, 1.0),
)
def test_every_rank_gets_a_sample_if_there_are_enough(lengths: list[int], world: int, slow: float) -> None:
    shares = (slow,) + (1.0,) * (world - 1)
    counts = np.bincount(Planner("variable", shares=shares)(lengths, world=world), minlength=world)
    assert counts.sum() == len(lengths)
    assert len(counts) == world
    if len(lengths) >= world:
        assert counts.min() >= 1


def test_without_that_rule_a_rank_with_a_small_share_gets_no_sample() -> None:
    costs = planner.default_cost_model()(LENGTHS)
    assert 0 not in variable(costs, 4, shares=(1e-6, 1.0, 1.0, 1.0))


def test_the_default_cost_beats_the_batch_order() -> None:
    costs = Planner().cost_model(LENGTHS)
    assert straggler(costs, Planner()(LENGTHS, world=4), 4) < straggler(costs, np.arange(64) // 16, 4) / 3


def test_samples_stay_if_a_move_gains_too_little() -> None:
    current = np.arange(64) // 16
    even = np.tile(LENGTHS[:16], 4)  # every rank has the same histories
    longer = even + 400 * (np.arange(64) == 5)
    for mode in ("fixed", "zigzag", "variable"):
        plan = Planner(mode)  # type: ignore[arg-type]
        assert plan.reassign(current, even, world=4) is current
        assert plan.reassign(current, longer, world=4).tolist() == plan(longer, world=4).tolist()
    uneven = np.minimum(np.arange(64) // 8, 3)  # unequal sample counts always lead to a new partition
    assert Planner().reassign(uneven, np.full(64, 9), world=4).tolist() == Planner()(np.full(64, 9), world=4).tolist()


def test_settings() -> None:
    assert Planner.of("off") is None
    assert Planner.of(False) is None
    with pytest.raises(ConfigurationError, match="balance=True does not name a mode"):
        Planner.of(True)
    assert Planner.of("zigzag") == Planner("zigzag")
    assert Planner.of(own := Planner("variable", max_tokens=10)) is own
    with pytest.raises(
        ConfigurationError, match="balance: 'even' is unknown; choose one of off, zigzag, fixed, variable"
    ):
        Planner.of("even")
    with pytest.raises(ConfigurationError, match="max_tokens and shares need balance='variable'"):
        Planner("fixed", max_tokens=10)


def test_the_example_in_the_docstring_is_correct() -> None:
    assert doctest.testmod(planner).failed == 0
    assert doctest.testmod(planner).attempted > 0
