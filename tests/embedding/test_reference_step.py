"""The reference step, the real schedule and TorchRec's synchronous exchange are equal bit for bit, on the same ids and model."""

from __future__ import annotations

import doctest
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv

from lightning_freescale.embedding import reference_step
from lightning_freescale.embedding.reference_step import (
    GradientModel,
    Pairs,
    ReferenceBatch,
    TableShard,
    no_collisions,
    rowwise_adagrad,
    sgd,
    train_prioritized,
    train_synchronously,
)
from tests.embedding.training import make_schedule
from tests.ranks import run_ranks

WORLD, STEPS, ROWS, DIM, RATE = 2, 8, 37, 8, 0.1
UPDATES = {"sgd": sgd(RATE), "rowwise_adagrad": rowwise_adagrad(RATE)}
FUSED = {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}


def table() -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))


def make_batches() -> list[list[Tensor]]:
    """``[step][rank]``: ids that repeat within a batch, between ranks and between steps."""
    generator = torch.Generator().manual_seed(2)
    sizes = torch.randint(0, 12, (STEPS, WORLD), generator=generator)
    return [[(torch.rand(n, generator=generator).square() * ROWS).long() for n in row] for row in sizes.tolist()]


def loss_of(step: int, rank: int, rows: Tensor) -> Tensor:
    """The model. The gradient of a row depends on its value, so a stale row changes all later tables."""
    return (torch.tanh(rows) * (1 + step + rank)).sum() + rows.square().sum()


def gradient_of(step: int, rank: int, rows: Tensor) -> Tensor:
    leaf = rows.clone().requires_grad_()
    return torch.autograd.grad(loss_of(step, rank, leaf), leaf)[0]


def simulate(train: Any, optimizer: str, **options: Any) -> tuple[list[list[Tensor]], Tensor]:
    """The rows that each forward sees, ``[step][rank]``, and the final table, in one process."""
    shards = [TableShard(part.clone(), torch.zeros(len(part))) for part in table().split(math.ceil(ROWS / WORLD))]
    model: GradientModel = gradient_of
    seen = train(shards, make_batches(), model, UPDATES[optimizer], **options)
    return seen, torch.cat([shard.weight for shard in shards])


# ---- the real exchange, on two ranks -----------------------------------------------------------------------------------
def build(optimizer: str) -> ShardedEmbeddingCollection:
    config = EmbeddingConfig(name="table", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["id"])
    collection = EmbeddingCollection(tables=[config], device=torch.device("meta"))
    sharder = EmbeddingCollectionSharder(fused_params={"optimizer": FUSED[optimizer], "learning_rate": RATE})
    plan = construct_module_sharding_plan(
        collection,
        {"table": row_wise(compute_kernel="fused")},
        sharder=sharder,
        local_size=WORLD,
        world_size=WORLD,
        device_type="cpu",
    )
    assert dist.group.WORLD is not None
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    module = sharder.shard(collection, plan, env, device=torch.device("cpu"))
    local_weight(module).copy_(table().split(math.ceil(ROWS / WORLD))[dist.get_rank()])
    return module


def local_weight(module: ShardedEmbeddingCollection) -> Tensor:
    return module.state_dict()["embeddings.table.weight"].local_shards()[0].tensor


def train_real(rank: int, optimizer: str, prioritize: bool) -> tuple[list[Tensor], Tensor]:
    module = build(optimizer)
    schedule = make_schedule(module) if prioritize else None
    kjts = [
        KeyedJaggedTensor(["id"], ids[rank], lengths=torch.tensor([len(ids[rank])]), stride=1) for ids in make_batches()
    ]
    seen = []
    for step, kjt in enumerate(kjts):
        if schedule is not None:
            schedule.begin_step([kjt], kjts[step + 1 : step + 2], kjts[step + 2 : step + 3])
        rows = module(kjt)["id"].values()
        seen.append(rows.detach().clone())
        loss = loss_of(step, rank, rows)
        if schedule is not None:
            schedule.before_backward()
        loss.backward()
        if schedule is not None:
            schedule.after_backward()
    if schedule is not None:
        schedule.flush()
        assert schedule.prioritized == ["embeddings"]
        assert 0 < schedule.modules[0].exchange.stats.collision_rate < 1
    return seen, local_weight(module).clone()


def train_both(rank: int) -> dict[tuple[str, bool], Any]:
    dist.init_process_group("gloo")
    cases = [(optimizer, prioritize) for optimizer in UPDATES for prioritize in (False, True)]
    return {case: train_real(rank, *case) for case in cases}


@pytest.fixture(scope="module")
def real() -> list[dict[tuple[str, bool], Any]]:
    """For each rank: the rows that its forwards saw, and its shard of the final table, by optimizer and mode."""
    return run_ranks(train_both, WORLD)


def same(a: Tensor, b: Tensor, optimizer: str) -> bool:
    """Bitwise equality. FBGEMM adds the squares of a row in an order that depends on the CPU: there, up to rounding."""
    return torch.allclose(a, b, rtol=1e-6, atol=1e-7) if optimizer == "rowwise_adagrad" else torch.equal(a, b)


def equal(first: list[list[Tensor]], second: list[list[Tensor]], optimizer: str) -> bool:
    return all(same(a, b, optimizer) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("optimizer", UPDATES)
@pytest.mark.parametrize("prioritize", [False, True], ids=["synchronous", "prioritized"])
def test_reference_equals_the_real_exchange(real: list[Any], optimizer: str, prioritize: bool) -> None:
    for train in (train_synchronously, train_prioritized):
        seen, weight = simulate(train, optimizer)
        real_seen = [list(step) for step in zip(*(rank[optimizer, prioritize][0] for rank in real), strict=True)]
        assert equal(seen, real_seen, optimizer)
        assert same(weight, torch.cat([rank[optimizer, prioritize][1] for rank in real]), optimizer)
        assert not torch.equal(weight, table())  # there was training


@pytest.mark.parametrize("optimizer", UPDATES)
def test_prefetching_every_row_early_differs(optimizer: str) -> None:
    expected, expected_weight = simulate(train_synchronously, optimizer)
    seen, weight = simulate(train_prioritized, optimizer, find=no_collisions)
    assert equal(expected[:1], seen[:1], optimizer)  # nothing precedes the first batch
    assert not equal(expected, seen, optimizer)
    assert not same(expected_weight, weight, optimizer)


def test_the_reference_reads_some_rows_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of the training both kinds of rows exist, and exclusive rows are read before the backward."""
    calls: list[tuple[str, int]] = []
    fetch_rows = reference_step.fetch_rows

    def noted(shards: Any, batch: ReferenceBatch, chosen: Pairs, into: list[Tensor]) -> None:
        calls.append(("rows", sum(int(mask.sum()) for row in chosen for mask in row)))
        fetch_rows(shards, batch, chosen, into)

    def model(step: int, rank: int, rows: Tensor) -> Tensor:
        calls.append(("backward", 0))
        return gradient_of(step, rank, rows)

    monkeypatch.setattr(reference_step, "fetch_rows", noted)
    shards = [TableShard(part.clone(), torch.zeros(len(part))) for part in table().split(math.ceil(ROWS / WORLD))]
    train_prioritized(shards, make_batches(), model, sgd(RATE))
    kinds = [name for name, _ in calls]
    assert kinds == ["rows", *["rows", *["backward"] * WORLD, "rows"] * (STEPS - 1), *["backward"] * WORLD]
    early, collisions = ([count for name, count in calls[1:] if name == "rows"][k::2] for k in (0, 1))
    assert sum(early) > 0
    assert sum(collisions) > 0


def test_examples() -> None:
    result = doctest.testmod(reference_step)
    assert result.attempted > 0
    assert result.failed == 0
