"""Trains one sharded collection, of rows or of bags, with TorchRec's synchronous exchange or with the prioritized schedule."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType

from lightning_freescale.embedding.all_to_all import ExchangeGroups
from lightning_freescale.embedding.held_gradients import HeldTableGradients, MicroBatch
from lightning_freescale.embedding.moment_kernel import moment_kernels
from lightning_freescale.embedding.schedule import ExchangeSchedule
from lightning_freescale.embedding.table_optimizer import DECAY_MODE_OPTIMIZER, MOMENT_OPTIMIZERS, fused_params

KEYS = ["a", "b", "c"]  # b and c share a table
FEATURES = {"one": ["a"], "two": ["b", "c"]}
ROWS = {"one": 40, "two": 24}
DIM = 8
BAG_DIMS = {"one": 8, "two": 24}  # column shards of 4 and 12 columns
DECAYED = "decayed_"  # begins the name of an optimizer with weight decay
CLIPPED = "clipped_"  # begins the name of an optimizer with clipped gradients
OPTIMIZERS = ("clipped_sgd", "rowwise_adagrad", "decayed_rowwise_adagrad", "clipped_adam", *MOMENT_OPTIMIZERS)
SLEEP_CYCLES = 60_000_000  # of a GPU: 30 ms, several times as long as the host needs for a step
SHARDINGS = ("row_wise", "table_wise", "column_wise", "mixed")
BAG_SHARDINGS = ("table_wise", "one_rank", "column_wise", "both", "row_wise", "mixed")

Sharded = ShardedEmbeddingCollection | ShardedEmbeddingBagCollection

# The batches of one rank: for every step and sample, the ids of each feature.
Batches = list[list[list[list[int]]]]


def random_batches(rank: int, steps: int, seed: int, samples: Callable[[int, int], int], longest: int = 4) -> Batches:
    """``samples(rank, step)`` samples in each step. Small ids are frequent, so that some rows of consecutive batches collide."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)

    def ids(rows: int) -> list[int]:
        length = int(torch.randint(0, longest + 1, (1,), generator=generator))
        return (torch.rand(length, generator=generator).square() * rows).long().tolist()

    sizes = [ROWS["one"], ROWS["two"], ROWS["two"]]
    return [[[ids(rows) for rows in sizes] for _ in range(samples(rank, step))] for step in range(steps)]


def to_kjt(batch: list[list[list[int]]], device: str = "cpu", weighted: bool = False) -> KeyedJaggedTensor:
    batch = batch or [[[] for _ in KEYS]]  # TorchRec does not accept an empty batch: use one sample without ids
    by_feature = [[sample[f] for sample in batch] for f in range(len(KEYS))]
    values = torch.tensor([i for feature in by_feature for ids in feature for i in ids], dtype=torch.int64)
    lengths = torch.tensor([len(ids) for feature in by_feature for ids in feature], dtype=torch.int64)
    weights = torch.sin(torch.arange(values.numel()) + values) + 1.5 if weighted else None
    return KeyedJaggedTensor(KEYS, values, weights, lengths=lengths, stride=len(batch)).to(torch.device(device))


def build(
    kind: str,
    optimizer: str,
    world: int,
    device: str = "cpu",
    kernel: str = "fused",
    *,
    data_type: DataType = DataType.FP32,
    **sharder_options: Any,
) -> ShardedEmbeddingCollection:
    """A sharded collection. Its initial tables are the same in every call and for every sharding."""
    configs = [
        EmbeddingConfig(
            name=name,
            embedding_dim=DIM,
            num_embeddings=rows,
            feature_names=FEATURES[name],
            data_type=data_type,
        )
        for name, rows in ROWS.items()
    ]
    collection = EmbeddingCollection(tables=configs, device=torch.device("meta"))
    sharder = EmbeddingCollectionSharder(fused_params=_fused(optimizer, device), **sharder_options)
    plan = _plan(collection, sharder, kind, world, device, kernel)
    return _sharded(collection, sharder, plan, device, "embeddings", dict.fromkeys(ROWS, DIM))


def build_bags(
    kind: str,
    optimizer: str,
    world: int,
    device: str = "cpu",
    kernel: str = "fused",
    *,
    weighted: bool = False,
    pooling: PoolingType = PoolingType.SUM,
    data_type: DataType = DataType.FP32,
) -> ShardedEmbeddingBagCollection:
    """The same for bags. The tables have different widths."""
    configs = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=BAG_DIMS[name],
            num_embeddings=rows,
            feature_names=FEATURES[name],
            pooling=pooling,
            data_type=data_type,
        )
        for name, rows in ROWS.items()
    ]
    collection = EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=torch.device("meta"))
    sharder = EmbeddingBagCollectionSharder(fused_params=_fused(optimizer, device))
    plan = _plan(collection, sharder, kind, world, device, kernel)
    return _sharded(collection, sharder, plan, device, "embedding_bags", BAG_DIMS)


def _fused(optimizer: str, device: str) -> dict[str, Any]:
    options: dict[str, Any] = {"optimizer": optimizer.removeprefix(DECAYED).removeprefix(CLIPPED), "lr": 0.1}
    if optimizer.startswith(CLIPPED):
        options["max_gradient"] = 0.01
    if optimizer.startswith(DECAYED):
        options["weight_decay"] = 0.01
        if options["optimizer"] == DECAY_MODE_OPTIMIZER:
            options["weight_decay_mode"] = "l2"
    return fused_params(options, torch.device(device))


def _plan(collection: nn.Module, sharder: Any, kind: str, world: int, device: str, kernel: str) -> Any:
    of_kernel = {"compute_kernel": kernel}
    row, column = row_wise(**of_kernel), column_wise(ranks=list(range(min(world, 2))), **of_kernel)
    first, last = table_wise(rank=0, **of_kernel), table_wise(rank=world - 1, **of_kernel)
    placement = {
        "row_wise": (row, row),
        "table_wise": (first, last),
        "one_rank": (last, last),  # the other ranks own nothing
        "column_wise": (column, column),
        "mixed": (row, last),
        "both": (column, last),
    }[kind]
    return construct_module_sharding_plan(
        collection,
        dict(zip(ROWS, placement, strict=True)),
        sharder=sharder,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        world_size=world,
        device_type=device,
    )


def _sharded(collection: nn.Module, sharder: Any, plan: Any, device: str, prefix: str, dims: Mapping[str, int]) -> Any:
    group = dist.group.WORLD
    assert group is not None
    with moment_kernels(torch.device(device)):
        module = sharder.shard(collection, plan, ShardingEnv.from_process_group(group), device=torch.device(device))
    generator = torch.Generator().manual_seed(3)
    for name, rows in ROWS.items():
        weight = torch.randn(rows, dims[name], generator=generator)
        for shard in module.state_dict()[f"{prefix}.{name}.weight"].local_shards():
            (r, c), (h, w) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(weight[r : r + h, c : c + w])
    return module


def tables(module: ShardedEmbeddingCollection) -> dict[str, Tensor]:
    """The local shards of the weights and of the optimizer's state."""
    found = {
        key: torch.cat([s.tensor.flatten() for s in value.local_shards()] or [torch.empty(0)]).clone()
        for key, value in module.state_dict().items()
    }
    for table, entry in module.fused_optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            if hasattr(value, "local_shards"):
                found[f"{table}.{name}"] = torch.cat([s.tensor.flatten() for s in value.local_shards()]).clone()
    return {key: value.cpu() for key, value in found.items()}


def _row_loss(device: str) -> Callable[[Any], Tensor]:
    head = nn.Linear(DIM, 1).to(device)

    def loss_of(output: Any) -> Tensor:
        return sum(
            (head(torch.tanh(output[key].values())).sum() + output[key].lengths().sum() for key in KEYS),
            torch.zeros((), device=device),
        )

    return loss_of


def _bag_loss(device: str) -> Callable[[Any], Tensor]:
    head = nn.Linear(BAG_DIMS["one"] + 2 * BAG_DIMS["two"], 1).to(device)

    def loss_of(output: Any) -> Tensor:
        loss: Tensor = head(torch.tanh(torch.cat([output[key] for key in KEYS], dim=1))).square().sum()
        return loss

    return loss_of


def train(
    module: Sharded,
    batches: Batches,
    schedule: ExchangeSchedule | None,
    device: str = "cpu",
    rates: Callable[[int], float] = lambda step: 0.1,
    between: Callable[[int], None] = lambda step: None,
    wrong_prefetch: bool = False,
    weighted: bool = False,
    window: int = 1,
) -> list[float]:
    """Train, and return the loss of each step.

    On CUDA, sleeps in forward and backward keep the device behind the host, as in a long training. They show whether a stream
    fails to wait for another one. The host itself may wait for the device before a backward, so a sleep in forward is not enough.

    Args:
        schedule: its hooks are called as the strategy calls them; None for TorchRec's synchronous exchange.
        rates: learning rate of each step.
        between: called after each step.
        wrong_prefetch: announce a batch two steps ahead that another batch then replaces.
        weighted: whether the ids of bags have weights.
        window: batches whose gradients are accumulated. If the last window has fewer, its gradients are scaled.
    """
    torch.manual_seed(5)
    held = HeldTableGradients(module) if window > 1 else None
    loss_of = (_bag_loss if isinstance(module, ShardedEmbeddingBagCollection) else _row_loss)(device)
    kjts = [to_kjt(batch, device, weighted) for batch in batches]
    losses: list[Tensor] = []
    for step, kjt in enumerate(kjts):
        micro_batch = None
        if held is not None:
            is_last = step % window == window - 1 or step == len(kjts) - 1
            micro_batch = MicroBatch(held, step % window, window, is_last)
            if step % window == 0:
                held.drop()
            held.hold(True)
        for group in module.fused_optimizer.param_groups:
            group["lr"] = rates(step)
        module.fused_optimizer.step()
        if schedule is not None:
            after_next = kjts[step + 2 : step + 3]
            if wrong_prefetch and after_next:
                after_next = [to_kjt(batches[0], device, weighted)]
            schedule.begin_step([kjt], kjts[step + 1 : step + 2], after_next, micro_batch)
        output = module(kjt)
        if device == "cuda":
            torch.cuda._sleep(SLEEP_CYCLES)
        loss = loss_of(output)
        if micro_batch is not None and micro_batch.last and (step + 1) % window:
            _await_late(schedule)
            micro_batch.held.scale(1.25)
        if schedule is not None:
            schedule.before_backward()
        if device == "cuda":
            torch.cuda._sleep(SLEEP_CYCLES // 2)
        loss.backward()
        if schedule is not None:
            schedule.after_backward()
        if micro_batch is not None and micro_batch.last and not micro_batch.held.all_applied:
            _await_late(schedule)
            micro_batch.held.apply()
        losses.append(loss.detach())
        between(step)
    if schedule is not None:
        schedule.flush()
    return torch.stack(losses).tolist() if losses else []


def _await_late(schedule: ExchangeSchedule | None) -> None:
    if schedule is not None:
        schedule.apply_late()
        for module in schedule.modules:
            module.exchange.table_stream.join()


def make_schedule(module: Sharded, backend: str | None = None) -> ExchangeSchedule:
    groups = ExchangeGroups(dist.new_group(backend=backend), dist.new_group(backend=backend))
    return ExchangeSchedule({"embeddings": module}, groups)
