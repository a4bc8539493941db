"""The balancer of a strategy: it balances each loader once and only on demand, and fitted costs reach every planner."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_freescale.balance import CostModel, Planner
from lightning_freescale.balance.balancer import Balancer
from lightning_freescale.balance.exchange import ExchangeLoader
from lightning_freescale.balance.planner import default_cost_model
from lightning_freescale.balance.sampler import GlobalBatchSampler
from tests.balance.batches import LengthDataset, contents, seq_batch
from tests.balance.test_online_cost_fit import TRUTH, observe
from tests.ranks import run_ranks

MODEL = CostModel(3.0, 0.5)


class Users(LengthDataset):
    def __getitem__(self, indices: list[int]) -> Any:
        return seq_batch(list(indices))


def loader(rank: int, world: int, planner: Planner | None = None, follows_strategy: bool = False) -> DataLoader:
    data = Users(64)
    sampler = GlobalBatchSampler(
        data, 8, num_replicas=world, rank=rank, planner=planner, follows_strategy=follows_strategy
    )
    return DataLoader(data, sampler=sampler, batch_size=None)  # type: ignore[arg-type]


def balancer(setting: str | Planner = "fixed", **options: Any) -> Balancer:
    return Balancer(setting, timeout=timedelta(seconds=20), **options)


def _attached(rank: int, world: int) -> None:
    dist.init_process_group("gloo")
    plain, balanced = loader(rank, world), loader(rank, world, Planner("zigzag"))

    off = balancer("off")
    assert off.attach(plain, cost_model=MODEL) is plain
    assert off.state_dict() is None
    off.begin_step(None, 50)
    off.close()

    own = balancer()
    if world == 1:
        assert own.attach(plain) is plain
        return
    assert own.attach(balanced, cost_model=MODEL) is balanced
    assert balanced.sampler.planner == Planner("zigzag", MODEL)  # type: ignore[attr-defined]
    assert own.exchanges == []

    follower = loader(rank, world, follows_strategy=True)
    assert own.attach(follower, cost_model=MODEL) is follower
    assert follower.sampler.planner == Planner("fixed", MODEL)  # type: ignore[attr-defined]
    own.close()
    assert follower.sampler.planner is None  # type: ignore[attr-defined]  # another strategy may use the loader next
    assert balanced.sampler.planner == Planner("zigzag", MODEL)  # type: ignore[attr-defined]
    assert off.attach(follower) is follower
    assert not follower.sampler.balanced  # type: ignore[attr-defined]

    other = balancer(Planner("variable", TRUTH))
    exchange = other.attach(plain, cost_model=MODEL)
    assert isinstance(exchange, ExchangeLoader)
    assert exchange.planner == Planner("variable", TRUTH)  # the cost model of the user stays
    assert other.exchanges == [exchange]
    seen = [contents(batch) for batch in exchange]
    assert len(seen) == 64 // 8 // world
    other.close()


def test_only_loaders_that_are_not_balanced_at_the_source_exchange_samples() -> None:
    run_ranks(_attached, world=2, args=(2,))
    run_ranks(_attached, world=1, args=(1,))


def _fit(rank: int) -> dict:
    dist.init_process_group("gloo")
    own = balancer(every=5)
    source, exchange = loader(rank, 2, Planner("fixed")), own.attach(loader(rank, 2))
    own.attach(source)
    assert source.sampler.planner == exchange.planner == Planner("fixed", default_cost_model())  # type: ignore[attr-defined]
    for step in range(1, 21):
        own.begin_step(None, step)
        assert own.cost_fit is not None
        observe(own.cost_fit, rank, step)
    fitted = exchange.planner
    assert source.sampler.planner != fitted  # type: ignore[attr-defined]  # with two loaders, a sampler uses them from its next epoch on
    next(iter(source.sampler))
    assert source.sampler.planner == fitted  # type: ignore[attr-defined]
    assert np.isclose(fitted.cost_model.quadratic / fitted.cost_model.linear, 7.5e-4, rtol=0.3)

    again = balancer(every=5)
    again.load_state_dict(own.state_dict())  # before there is a loader
    resumed = again.attach(loader(rank, 2), cost_model=MODEL)
    assert resumed.planner == fitted
    late = balancer(every=5)
    resumed = late.attach(loader(rank, 2), cost_model=MODEL)
    assert resumed.planner == Planner("fixed", MODEL)
    late.load_state_dict(own.state_dict())
    assert resumed.planner == fitted
    late.load_state_dict(None)  # a checkpoint without fitted costs
    never = balancer()
    never.load_state_dict(own.state_dict())
    assert never.attach(loader(rank, 2), cost_model=MODEL).planner == Planner("fixed", MODEL)
    assert never.cost_fit is None
    never.close()
    state = own.state_dict()
    for closing in (own, again, late):
        closing.close()
    assert own.state_dict() == state  # a checkpoint may be saved after the training
    return fitted.cost_model.state_dict()


def test_fitted_costs_reach_every_planner_and_survive_a_checkpoint() -> None:
    one, other = run_ranks(_fit)
    assert one == other


def _reloaded(rank: int) -> tuple[list[int], list[list[tuple]]]:
    """Return the number of process groups after each reload of two loaders, and the samples of the last two loaders."""
    dist.init_process_group("gloo")
    own = balancer(every=5)
    groups, seen = [], []
    for epoch in range(4):
        own.detach()
        both = [own.attach(loader(rank, 2)) for _ in range(2)]
        groups.append(len(dist.distributed_c10d._world.pg_map))
        seen = [[sample for batch in exchange for sample in contents(batch)] for exchange in both[: 1 + epoch % 2]]
        if epoch == 2:  # an iteration that stops early, as with limit_train_batches
            next(iter(both[1]))
        assert len(own.exchanges) == 2
    own.close()
    return groups, seen


def test_reloaded_loaders_reuse_the_process_groups() -> None:
    (groups, one), (other_groups, other) = run_ranks(_reloaded)
    assert groups == other_groups == [groups[0]] * 4
    assert groups[0] == 1 + 2 + 1  # of the job, of the two exchanges, of the cost fit
    for mine, theirs in zip(one, other, strict=True):
        assert sorted(mine + theirs) == sorted(contents(seq_batch(list(range(64)))))


def _sums(rank: int) -> None:
    dist.init_process_group("gloo")
    own = balancer(every=5)
    own.attach(loader(rank, 2))
    batch = seq_batch([1, 2, 3])
    lengths = batch.lengths.numpy()
    assert own.sums(batch).tolist() == [lengths.sum(), (lengths**2).sum(), 2 * (lengths - 1).sum(), 1]
    assert own.sums({"x": 3}) is None
    own.close()
    assert balancer().sums(batch) is None  # no costs are fitted


def test_sums_of_a_batch() -> None:
    run_ranks(_sums)
