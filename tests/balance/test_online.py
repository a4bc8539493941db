"""The cost model learnt while training: the same on all real ranks, at the same step."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from lightning_freescale.balance import CostModel, Planner
from lightning_freescale.balance.online import OnlineFit, _explains
from lightning_freescale.balance.partition import Mode
from lightning_freescale.runtime.errors import CheckpointError
from tests.ranks import run_ranks

TRUTH = CostModel(linear=2e-6, quadratic=1.5e-9, candidate=4e-8, constant=0.02)  # seconds
PRIOR = CostModel.from_hstu(embedding_dim=64, num_layers=2, num_heads=2)  # FLOPs, and other ratios
SPEEDS = (1.0, 0.8, 1.25)


def connect() -> dist.ProcessGroup:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=20))


def observe(online: OnlineFit, rank: int, step: int, speed: float = 1.0) -> None:
    rng = np.random.default_rng((rank, step))
    lengths = np.minimum(rng.lognormal(7.3, 1.2, 32), 21_000).astype(np.int64)
    sums = CostModel.sums(lengths, lengths * rng.integers(16, 256, 32))
    online.observe(sums, float(TRUTH.predict(sums)) / speed * float(np.exp(0.02 * rng.standard_normal())))


def _train(rank: int, mode: Mode, speeds: tuple[float, ...]) -> tuple[list[tuple[int, Planner]], float, dict]:
    online = OnlineFit(Planner(mode, PRIOR), group=connect(), every=10)
    updates = []
    for step in range(100):
        planner = online.maybe_update(step)
        if planner is not None:
            updates.append((step, planner))
        if rank or step % 2:  # rank 0 hears of only half of its times
            observe(online, rank, step, speeds[rank])
    online.close()
    return updates, online.error, online.state_dict()


def test_all_ranks_get_the_same_model_at_the_same_step() -> None:
    (updates, error, state), *others = run_ranks(_train, world=3, args=("fixed", (1.0,) * 3))
    assert all(other == (updates, error, state) for other in others)
    assert [step for step, _ in updates] == list(range(20, 100, 10))  # gathered at 10, in force at 20
    model = updates[-1][1].cost_model
    assert error < 0.03
    assert model.quadratic / model.linear == pytest.approx(TRUTH.quadratic / TRUTH.linear, rel=0.2)
    assert PRIOR.quadratic / PRIOR.linear != pytest.approx(TRUTH.quadratic / TRUTH.linear, rel=0.5)
    assert updates[-1][1].shares is None
    assert state == {"cost_model": model.state_dict(), "shares": None}


def test_with_variable_the_shares_follow_the_speeds() -> None:
    (updates, _, state), *others = run_ranks(_train, world=3, args=("variable", SPEEDS))
    assert all(other[0] == updates for other in others)
    shares = np.array(updates[-1][1].shares)
    assert shares == pytest.approx(np.array(SPEEDS) / sum(SPEEDS), rel=0.05)
    assert state["shares"] == shares.tolist()


def _nothing_seen(rank: int) -> list[Any]:
    online = OnlineFit(Planner("variable", PRIOR), group=connect(), every=3)
    return [online.maybe_update(step) for step in range(13)]


def test_nothing_observed_changes_nothing_but_says_so_alike() -> None:
    for updates in run_ranks(_nothing_seen):
        planners = [planner for planner in updates if planner is not None]
        assert all(planner.cost_model == PRIOR for planner in planners)
        assert all(planner.shares == (0.5, 0.5) for planner in planners)


def _noise(rank: int) -> tuple[list[Planner], float]:
    """Times that have nothing to do with the samples."""
    online = OnlineFit(Planner("fixed", PRIOR), group=connect(), every=20)
    updates = []
    for step in range(101):
        if (planner := online.maybe_update(step)) is not None:
            updates.append(planner)
        rng = np.random.default_rng((rank, step))
        lengths = np.minimum(rng.lognormal(7.3, 0.1, 32), 21_000).astype(np.int64)
        online.observe(CostModel.sums(lengths), float(np.exp(rng.standard_normal())))
    return updates, online.error


def test_times_that_samples_do_not_explain_leave_the_costs_alone() -> None:
    for updates, error in run_ranks(_noise):
        assert all(planner.cost_model.linear + planner.cost_model.quadratic > 0 for planner in updates)
        assert error > 0.3  # and it is told


def test_a_fit_must_tell_more_than_what_it_began_with() -> None:
    rng = np.random.default_rng(0)
    sums = np.stack([CostModel.sums(rng.integers(10, 2000, 16)) for _ in range(60)])
    seconds = TRUTH.predict(sums)
    assert _explains(PRIOR, sums, seconds)
    assert not _explains(TRUTH, sums, seconds)  # nothing is better than the truth
    assert not _explains(PRIOR, sums, np.full(60, 0.5))  # samples that cost nothing
    assert not _explains(PRIOR, sums[:1], seconds[:1])


def _restore(rank: int) -> tuple[Planner, Planner, Planner, str]:
    state = {"cost_model": TRUTH.state_dict(), "shares": [0.7, 0.3]}
    same = OnlineFit(Planner("variable", PRIOR), group=connect())
    same.load_state_dict(state)
    fixed = OnlineFit(Planner("fixed", PRIOR), group=connect())
    fixed.load_state_dict(state)
    more = OnlineFit(Planner("variable", PRIOR), group=connect())
    more.load_state_dict({**state, "shares": [0.2, 0.3, 0.5]})
    with pytest.raises(CheckpointError) as raised:
        more.load_state_dict({"shares": None})
    with pytest.raises(ValueError, match=r"seconds = nan must be finite and positive"):
        more.observe([1, 1, 1, 1], float("nan"))
    return same.planner, fixed.planner, more.planner, str(raised.value)


def test_the_state_comes_back_on_any_number_of_ranks() -> None:
    for same, fixed, more, message in run_ranks(_restore):
        assert same == Planner("variable", TRUTH, shares=(0.7, 0.3))
        assert fixed == Planner("fixed", TRUTH)
        assert more == Planner("variable", TRUTH)
        assert message == "balance: keys ['shares'] in the checkpoint, expected cost_model and shares"
