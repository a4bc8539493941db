"""A sharded EmbeddingCollection trains to the same bits over the freescale backend as over gloo."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv

from lightning_freescale.transport import FreeScaleGroup
from tests.ranks import run_ranks
from tests.transport.collectives import ENGINES, with_each_engine

FEATURES = {"clicks": "item", "carts": "item", "shops": "shop"}
ROWS, DIM, BATCH, STEPS = 40, 8, 4, 5


def histories(rank: int, step: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, 4, (len(FEATURES) * BATCH,), generator=generator)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor.from_lengths_sync(list(FEATURES), values, lengths)


def train(rank: int, world: int, group: Any, kind: str) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and this rank's shards after ``STEPS`` steps, with all exchanges of the module on ``group``."""
    torch.manual_seed(0)
    tables = [
        EmbeddingConfig(
            name=name,
            embedding_dim=DIM,
            num_embeddings=ROWS,
            feature_names=[feature for feature, table in FEATURES.items() if table == name],
        )
        for name in ("item", "shop")
    ]
    collection = EmbeddingCollection(tables=tables)
    head = torch.nn.Linear(DIM, 1)
    sharder = EmbeddingCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    )
    placement = {
        "row_wise": lambda owner: row_wise(compute_kernel="fused"),
        "table_wise": lambda owner: table_wise(rank=owner, compute_kernel="fused"),
        "column_wise": lambda owner: column_wise(ranks=list(range(world)), compute_kernel="fused"),
    }[kind]
    plan = construct_module_sharding_plan(
        collection,
        {"item": placement(0), "shop": placement(world - 1)},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    sharded = sharder.shard(collection, plan, ShardingEnv.from_process_group(group), device=torch.device("cpu"))
    weights = [
        weight
        for lookup in sharded._lookups
        for module in lookup._emb_modules
        for weight in module._emb_module.split_embedding_weights()
    ]
    for number, weight in enumerate(weights):
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(11 + number)))
    losses = []
    for step in range(STEPS):
        embedded = sharded(histories(rank, step))
        loss = sum(head(torch.tanh(embedded[feature].values())).sum() for feature in FEATURES)
        loss.backward()
        losses.append(loss.item())
    return losses, [weight.clone() for weight in weights]


def _train_on_both(rank: int, world: int, group: FreeScaleGroup, kind: str) -> Counter:
    moved: Counter = Counter()
    exchange = group._exchange

    def counted(name: str, *args: Any) -> Any:
        moved[name] += 1
        return exchange(name, *args)

    group._exchange = counted  # type: ignore[method-assign]
    expected = train(rank, world, torch.distributed.group.WORLD, kind)
    assert not moved
    got = train(rank, world, group, kind)
    assert got[0] == expected[0]
    assert len(got[1]) == len(expected[1])
    assert all(torch.equal(a, b) for a, b in zip(got[1], expected[1], strict=True))
    assert len(set(got[0])) > 1, "nothing was trained"
    return moved


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise"])
def test_trains_to_the_same_bits_as_over_gloo(kind: str) -> None:
    for by_engine in run_ranks(with_each_engine, 2, (2, _train_on_both, (kind,))):
        assert list(by_engine) == list(ENGINES)
        for moved in by_engine.values():
            assert moved["all_to_all"] >= 3 * STEPS  # ids, rows and gradients of every step
