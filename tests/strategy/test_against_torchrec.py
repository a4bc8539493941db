"""``freescale_sync`` is TorchRec: a loop written by hand around DistributedModelParallel gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.utils.data import DistributedSampler
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType

from lightning_freescale import FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks

SAMPLES = 32  # two ranks with batches of 2 make 8 steps an epoch
STEPS = 11  # ends in the second epoch
FUSED = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


def plan_by_hand(model: toy.Model, world: int, kind: str, sharder: Any) -> ShardingPlan:
    """``kind`` for both tables; two kinds with a slash between them for the tables ``item`` and ``shop``."""
    makers: dict[str, Callable[[int], Any]] = {
        "row_wise": lambda owner: row_wise(),
        "table_wise": lambda owner: table_wise(rank=owner),
        "column_wise": lambda owner: column_wise(ranks=list(range(world))),
        "table_row_wise": lambda owner: table_row_wise(host_index=0),
        "grid_shard": lambda owner: grid_shard(host_indexes=[0]),
        "data_parallel": lambda owner: data_parallel(),
    }
    kinds = kind.split("/") if "/" in kind else [kind, kind]
    plan = construct_module_sharding_plan(
        model.embeddings,
        {"item": makers[kinds[0]](0), "shop": makers[kinds[1]](world - 1)},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    for placement in plan.values():
        if placement.sharding_type != "data_parallel":
            placement.compute_kernel = "fused"
    return ShardingPlan({"embeddings": plan})


def by_hand(
    rank: int, world: int, kind: str, optimizer: str, bags: bool, half: bool = False, **fused: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What a TorchRec user writes, without Lightning."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    pl.seed_everything(1, verbose=False)
    model = toy.Model(bags=bags, data_type=DataType.FP16 if half else DataType.FP32)
    initial = {key: value.clone() for key, value in model.embeddings.state_dict().items()}
    sharder_type = EmbeddingBagCollectionSharder if bags else EmbeddingCollectionSharder
    sharder = sharder_type(fused_params={"optimizer": FUSED[optimizer], "learning_rate": 0.1, **fused})
    dmp = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan_by_hand(model, world, kind, sharder), sharders=[sharder]
    )
    for key, value in model.embeddings.state_dict().items():
        if not hasattr(value, "local_shards"):  # a data-parallel table
            value.copy_(initial[key])
            continue
        for shard in value.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(initial[key][row : row + rows, column : column + columns])
    not_fused = [part for part in model.parameters() if not hasattr(part, "_in_backward_optimizers")]
    dense = torch.optim.Adam(not_fused, lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(dense, step_size=3, gamma=0.5)
    samples = toy.Samples(SAMPLES)
    sampler = DistributedSampler(samples, world, rank, shuffle=True, seed=1)
    batches = torch.utils.data.DataLoader(samples, batch_size=2, collate_fn=toy.collate, sampler=sampler)
    losses: list[float] = []
    epoch = 0
    while len(losses) < STEPS:
        sampler.set_epoch(epoch)
        for batch in batches:
            for group in dmp.fused_optimizer.param_groups:
                group["lr"] = 0.1 * schedule.get_last_lr()[0] / 0.05
            dmp.fused_optimizer.step()
            loss = nn_loss(dmp(batch.features), batch.label)
            dense.zero_grad()
            loss.backward()
            dense.step()
            schedule.step()
            losses.append(loss.item())
            if len(losses) == STEPS:
                break
        epoch += 1
    return losses, toy.weights(model)


def nn_loss(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, label)


def by_strategy(
    rank: int, world: int, options: dict[str, Any], bags: bool, half: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    pl.seed_everything(1, verbose=False)
    model = toy.Model(bags=bags, data_type=DataType.FP16 if half else DataType.FP32)
    strategy = FreeScaleStrategy(**({"balance": "off", "prioritize": False} | options))
    toy.trainer(strategy, world, max_epochs=-1, max_steps=STEPS).fit(model, toy.loader(SAMPLES))
    return model.losses, toy.weights(model)


@pytest.mark.parametrize(
    ("kind", "optimizer", "bags"),
    [
        ("row_wise", "sgd", False),
        ("row_wise", "rowwise_adagrad", True),
        ("table_wise", "rowwise_adagrad", False),
        ("table_wise", "sgd", True),
        ("column_wise", "sgd", False),
        ("column_wise", "rowwise_adagrad", True),
    ],
)
def test_equal_to_a_hand_written_loop(kind: str, optimizer: str, bags: bool) -> None:
    options = {"sharding": kind, "embedding_optimizer": {"optimizer": optimizer, "lr": 0.1}}
    for expected, got in zip(
        run_ranks(by_hand, args=(2, kind, optimizer, bags)),
        run_ranks(by_strategy, args=(2, options, bags)),
        strict=True,
    ):
        assert len(got[0]) == STEPS
        assert got[0] == expected[0]
        assert toy.same(got[1], expected[1])


@pytest.mark.parametrize("change", [{"optimizer": "sgd", "lr": 0.1001}, {"optimizer": "adagrad", "lr": 0.1}], ids=str)
def test_the_comparison_can_fail(change: dict[str, Any]) -> None:
    expected = run_ranks(by_hand, args=(2, "row_wise", "sgd", False))
    got = run_ranks(by_strategy, args=(2, {"sharding": "row_wise", "embedding_optimizer": change}, False))
    assert got[0][0] != expected[0][0]
    assert not toy.same(got[0][1], expected[0][1])


def test_the_initial_model_does_not_depend_on_ranks_or_sharding() -> None:
    results = [
        run_ranks(by_strategy_untrained, world=world, args=(world, kind))[0]
        for world in (1, 2, 3)
        for kind in ("row_wise", "table_wise", "column_wise")
    ]
    assert all(toy.same(results[0], other) for other in results[1:])


def by_strategy_untrained(rank: int, world: int, kind: str) -> dict[str, torch.Tensor]:
    pl.seed_everything(1, verbose=False)
    model = toy.Model()
    toy.trainer(FreeScaleStrategy(sharding=kind), world, limit_val_batches=1).validate(
        model, toy.loader(), verbose=False
    )
    return toy.weights(model)
