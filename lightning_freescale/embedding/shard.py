"""Shards a model: the tables are split over the ranks of a process group, and everything else is data parallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardedModule, ShardingEnv

from lightning_freescale.embedding.key_order import keep_key_order
from lightning_freescale.embedding.plan import embedding_modules, make_plan, make_sharders

# DistributedModelParallel passes these to DDP itself.
_WRAPPER_ARGUMENTS = ("static_graph", "find_unused_parameters", "bucket_cap_mb")


def shard(
    module: nn.Module,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    local_size: int = 1,
    sharding: Mapping[str, str] | str | None = None,
    optimizer: Mapping[str, Any] | None = None,
    dedup: bool = False,
    ddp_kwargs: Mapping[str, Any] | None = None,
) -> DistributedModelParallel:
    """Shard the tables of ``module``, and wrap its other parameters in DDP. All ranks must call it.

    Tables that hold weights keep them.

    Args:
        group: process group of all ranks, on which TorchRec exchanges ids, rows and gradients.
        local_size: number of ranks on this host.
        sharding, optimizer, dedup: the strategy's ``sharding``, ``embedding_optimizer`` and ``dedup``.
        ddp_kwargs: arguments of DDP for the dense parameters.
    """
    sharders = make_sharders(module, optimizer, device, dedup)
    plan = make_plan(module, sharders, sharding, device=device, world_size=group.size(), local_size=local_size)
    kwargs = dict(ddp_kwargs or {})
    wrapper = {"static_graph": False} | {name: kwargs.pop(name) for name in _WRAPPER_ARGUMENTS if name in kwargs}
    weights = _table_weights(module)
    with _own_random_numbers(group.rank(), device):
        sharded = DistributedModelParallel(
            module,
            env=ShardingEnv.from_process_group(group),
            device=device,
            plan=plan,
            sharders=sharders,
            data_parallel_wrapper=_DataParallelOverAllRanks(**wrapper, ddp_kwargs=kwargs),
        )
    _fill_shards(module, weights)
    keep_key_order((name, child) for name, child in module.named_modules() if isinstance(child, ShardedModule))
    return sharded


class _DataParallelOverAllRanks(DefaultDataParallelWrapper):
    """Keeps the AllReduce of the dense parameters on the default process group, whichever group the tables use."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        assert dist.group.WORLD is not None
        super().wrap(dmp, ShardingEnv.from_process_group(dist.group.WORLD), device)


@contextmanager
def _own_random_numbers(rank: int, device: torch.device) -> Iterator[None]:
    """Use other random numbers on every rank inside the ``with`` block, and restore the random state after it.

    TorchRec draws the shards of tables on ``meta`` in here. All ranks have the same seed: without this, all shards of a table
    would hold the same rows.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(torch.initial_seed() + 1 + rank)
        yield


def _table_weights(module: nn.Module) -> dict[str, Tensor]:
    """Weights of the unsharded tables, by their key in ``module.state_dict()``. Tables on ``meta`` have none."""
    return {
        f"{name}.{key}" if name else key: value
        for name, collection in embedding_modules(module).items()
        for key, value in collection.state_dict().items()
        if value.device.type != "meta"
    }


@torch.no_grad()
def _fill_shards(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy unsharded ``weights`` into the local shards of the sharded ``module``.

    TorchRec initializes shards again. That would drop weights that were loaded before sharding, and the initial model would
    depend on the number of ranks.
    """
    state = module.state_dict()
    for key, weight in weights.items():
        for shard in state[key].local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(weight[row : row + rows, column : column + columns])
