"""The cost model fitted during training: the same on all real ranks, from the same step on."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from lightning_freescale.balance import CostModel, Planner
from lightning_freescale.balance.online_cost_fit import OnlineCostFit, _fit_helps
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


def observe(cost_fit: OnlineCostFit, rank: int, step: int, speed: float = 1.0) -> None:
    rng = np.random.default_rng((rank, step))
    lengths = np.minimum(rng.lognormal(7.3, 1.2, 32), 21_000).astype(np.int64)
    sums = CostModel().sums(lengths, lengths * rng.integers(16, 256, 32))
    cost_fit.observe(sums, float(TRUTH.predict(sums)) / speed * float(np.exp(0.02 * rng.standard_normal())))


def _train(rank: int, mode: Mode, speeds: tuple[float, ...]) -> tuple[list[tuple[int, Planner]], float, dict]:
    cost_fit = OnlineCostFit(Planner(mode, PRIOR), group=connect(), every=10)
    updates = []
    for step in range(100):
        planner = cost_fit.maybe_update(step)
        if planner is not None:
            updates.append((step, planner))
        if rank or step % 2:  # rank 0 gets only half of its measurements
            observe(cost_fit, rank, step, speeds[rank])
    cost_fit.close()
    return updates, cost_fit.error, cost_fit.state_dict()


def test_all_ranks_get_the_same_model_at_the_same_step() -> None:
    (updates, error, state), *others = run_ranks(_train, world=3, args=("fixed", (1.0,) * 3))
    assert all(other == (updates, error, state) for other in others)
    assert [step for step, _ in updates] == list(range(20, 100, 10))  # gathered at 10, used from 20 on
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


def _no_measurements(rank: int) -> list[Any]:
    cost_fit = OnlineCostFit(Planner("variable", PRIOR), group=connect(), every=3)
    return [cost_fit.maybe_update(step) for step in range(13)]


def test_without_measurements_costs_and_shares_do_not_change() -> None:
    for updates in run_ranks(_no_measurements):
        planners = [planner for planner in updates if planner is not None]
        assert all(planner.cost_model == PRIOR for planner in planners)
        assert all(planner.shares == (0.5, 0.5) for planner in planners)


def _noise(rank: int) -> tuple[list[Planner], float]:
    """Times that have nothing to do with the samples."""
    cost_fit = OnlineCostFit(Planner("fixed", PRIOR), group=connect(), every=20)
    updates = []
    for step in range(101):
        if (planner := cost_fit.maybe_update(step)) is not None:
            updates.append(planner)
        rng = np.random.default_rng((rank, step))
        lengths = np.minimum(rng.lognormal(7.3, 0.1, 32), 21_000).astype(np.int64)
        cost_fit.observe(CostModel().sums(lengths), float(np.exp(rng.standard_normal())))
    return updates, cost_fit.error


def test_step_times_that_do_not_depend_on_samples_are_not_fitted() -> None:
    for updates, error in run_ranks(_noise):
        assert all(planner.cost_model.linear + planner.cost_model.quadratic > 0 for planner in updates)
        assert error > 0.3  # and the error is reported


def test_a_fit_must_predict_better_than_its_prior() -> None:
    rng = np.random.default_rng(0)
    sums = np.stack([CostModel().sums(rng.integers(10, 2000, 16)) for _ in range(60)])
    seconds = TRUTH.predict(sums)
    assert _fit_helps(PRIOR, sums, seconds)
    assert not _fit_helps(TRUTH, sums, seconds)  # nothing is better than the truth
    assert not _fit_helps(PRIOR, sums, np.full(60, 0.5))  # samples that cost nothing
    assert not _fit_helps(PRIOR, sums[:1], seconds[:1])


def _restore(rank: int) -> tuple[Planner, Planner, Planner, str]:
    state = {"cost_model": TRUTH.state_dict(), "shares": [0.7, 0.3]}
    same = OnlineCostFit(Planner("variable", PRIOR), group=connect())
    same.load_state_dict(state)
    fixed = OnlineCostFit(Planner("fixed", PRIOR), group=connect())
    fixed.load_state_dict(state)
    more = OnlineCostFit(Planner("variable", PRIOR), group=connect())
    more.load_state_dict({**state, "shares": [0.2, 0.3, 0.5]})
    with pytest.raises(CheckpointError) as raised:
        more.load_state_dict({"shares": None})
    with pytest.raises(ValueError, match=r"seconds = nan must be finite and positive"):
        more.observe([1, 1, 1, 1], float("nan"))
    return same.planner, fixed.planner, more.planner, str(raised.value)


def test_the_state_is_restored_on_any_number_of_ranks() -> None:
    for same, fixed, more, message in run_ranks(_restore):
        assert same == Planner("variable", TRUTH, shares=(0.7, 0.3))
        assert fixed == Planner("fixed", TRUTH)
        assert more == Planner("variable", TRUTH)
        assert message == "balance: the checkpoint has the keys ['shares'], expected cost_model and shares"
