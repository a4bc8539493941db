"""Trains one sharded collection of bags in a plain loop, with TorchRec's exchange or with the prioritized schedule."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv

from lightning_freescale.embedding.schedule import ExchangeSchedule
from tests.embedding.training import KEYS, OPTIMIZERS, ROWS, Batches, to_kjt

WIDTHS = {"one": 8, "two": 24}  # column shards of 4 and 12 columns
BAG_SHARDINGS = ("table_wise", "one_rank", "column_wise", "both")


def build_bags(
    kind: str, optimizer: str, world: int, *, weighted: bool = False, pooling: PoolingType = PoolingType.SUM
) -> ShardedEmbeddingBagCollection:
    """A sharded collection. Its initial tables are the same in every call and for every sharding."""
    generator = torch.Generator().manual_seed(3)
    features = {"one": ["a"], "two": ["b", "c"]}
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name,
                embedding_dim=WIDTHS[name],
                num_embeddings=rows,
                feature_names=features[name],
                pooling=pooling,
            )
            for name, rows in ROWS.items()
        ],
        is_weighted=weighted,
        device=torch.device("meta"),
    )
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": OPTIMIZERS[optimizer], "learning_rate": 0.1})
    kernel = {"compute_kernel": "fused"}
    column, last = column_wise(ranks=list(range(min(world, 2))), **kernel), table_wise(rank=world - 1, **kernel)
    placement = {
        "table_wise": (table_wise(rank=0, **kernel), last),
        "one_rank": (last, last),  # the other ranks own nothing
        "column_wise": (column, column),
        "both": (column, last),
    }[kind]
    plan = construct_module_sharding_plan(
        collection,
        dict(zip(ROWS, placement, strict=True)),
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    group = dist.group.WORLD
    assert group is not None
    module = sharder.shard(collection, plan, ShardingEnv.from_process_group(group), device=torch.device("cpu"))
    for name, rows in ROWS.items():
        weight = torch.randn(rows, WIDTHS[name], generator=generator)
        for shard in module.state_dict()[f"embedding_bags.{name}.weight"].local_shards():
            (r, c), (h, w) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(weight[r : r + h, c : c + w])
    return module


def to_bags(batch: list[list[list[int]]], weighted: bool) -> KeyedJaggedTensor:
    plain = to_kjt(batch)
    if not weighted:
        return plain
    weights = torch.sin(torch.arange(plain.values().numel()) + plain.values()) + 1.5
    return KeyedJaggedTensor(KEYS, plain.values(), weights=weights, lengths=plain.lengths(), stride=plain.stride())


def train_bags(
    module: ShardedEmbeddingBagCollection,
    batches: Batches,
    schedule: ExchangeSchedule | None,
    weighted: bool = False,
    rates: Callable[[int], float] = lambda step: 0.1 / (1 + step),
    between: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Train, and return the loss of each step."""
    torch.manual_seed(5)
    head = nn.Linear(WIDTHS["one"] + 2 * WIDTHS["two"], 1)
    kjts = [to_bags(batch, weighted) for batch in batches]
    losses: list[Tensor] = []
    for step, kjt in enumerate(kjts):
        for group in module.fused_optimizer.param_groups:
            group["lr"] = rates(step)
        module.fused_optimizer.step()
        if schedule is not None:
            schedule.begin_step([kjt], kjts[step + 1 : step + 2], kjts[step + 2 : step + 3])
        pooled = module(kjt)
        loss = head(torch.tanh(torch.cat([pooled[key] for key in KEYS], dim=1))).square().sum()
        if schedule is not None:
            schedule.before_backward()
        loss.backward()
        if schedule is not None:
            schedule.after_backward()
        losses.append(loss.detach())
        between(step)
    if schedule is not None:
        schedule.flush()
    return torch.stack(losses).tolist() if losses else []
