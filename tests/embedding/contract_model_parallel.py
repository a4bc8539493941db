"""The part of ``contract.py`` about ``DistributedModelParallel`` and the layout of DDP's buckets."""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lightning_freescale.embedding import plan as sharding
from lightning_freescale.embedding.shard import shard
from lightning_freescale.embedding.table_optimizer import has_own_optimizer
from tests.embedding.training import DIM


def small_model() -> nn.Module:
    model = nn.Module()
    model.embeddings = EmbeddingCollection(
        tables=[EmbeddingConfig(name="t", embedding_dim=DIM, num_embeddings=64, feature_names=["a"])]
    )
    model.head = nn.Linear(DIM, 1)
    return model


def check_fixed_buckets(model: DistributedDataParallel) -> None:
    """The buckets begin with the last parameter, and DDP does not lay them out again."""
    first = model.reducer._get_zeros_like_grad_buckets()[0].parameters()[0]
    assert first is list(model.module.parameters())[-1]
    assert not model.reducer._rebuild_buckets()


def check_model_parallel(world: int) -> None:
    """The names of DistributedModelParallel, and of optimizers inside backward, that the strategy uses."""
    arguments = list(inspect.signature(DefaultDataParallelWrapper._ddp_wrap).parameters)
    assert arguments == ["self", "dmp", "env", "device", "ddp_ignore_param_names"]  # overridden in embedding/shard.py
    wrapped = shard(small_model(), dist.group.WORLD, torch.device("cpu"), ddp_kwargs={"bucket_cap_mb": 3})
    assert isinstance(wrapped._dmp_wrapped_module, DistributedDataParallel)
    assert wrapped._dmp_wrapped_module.bucket_bytes_cap == 3 * 1024 * 1024
    check_fixed_buckets(wrapped._dmp_wrapped_module)
    assert hasattr(ShardedManagedCollisionCollection, "_dedup_indices")
    model = small_model()
    collection = model.embeddings
    device, group = torch.device("cpu"), dist.group.WORLD
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    assert has_own_optimizer([collection])
    assert all(hasattr(parameter, "_optimizer_classes") for parameter in collection.parameters())
    assert all(parameter._optimizer_kwargs == [{"lr": 0.1}] for parameter in collection.parameters())
    sharders = sharding.make_sharders(model, None, device)
    plan = sharding.make_plan(model, sharders, "row_wise", device=device, world_size=world, local_size=world)
    assert group is not None
    env = ShardingEnv.from_process_group(group)
    sharded = DistributedModelParallel(model, env=env, device=device, plan=plan, sharders=sharders)
    assert isinstance(sharded._dmp_wrapped_module, DistributedDataParallel)
    assert isinstance(model.embeddings, ShardedEmbeddingCollection)
    fused = {id(parameter) for parameter in sharded.fused_optimizer.params.values()}
    fused |= {id(p) for p in model.parameters() if hasattr(p, "_in_backward_optimizers")}
    dense = [name for name, parameter in model.named_parameters() if id(parameter) not in fused]
    assert dense == ["head.weight", "head.bias"]
    assert isinstance(sharded.fused_optimizer.state_dict()["state"], dict)
