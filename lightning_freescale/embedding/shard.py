"""A model on its shards: its tables over the ranks of a group, everything else data parallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from lightning_freescale.embedding.plan import embedding_modules, make_plan, make_sharders

# DistributedModelParallel hands these to DDP itself.
_OF_THE_WRAPPER = ("static_graph", "find_unused_parameters", "bucket_cap_mb")


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
    """Shard the tables of ``module`` and wrap the rest. Tables that hold weights keep them. A collective.

    Args:
        group: on which TorchRec exchanges ids, rows and gradients; of all ranks.
        local_size: ranks on this host.
        sharding, optimizer, dedup: as the strategy's ``sharding``, ``embedding_optimizer`` and ``dedup``.
        ddp_kwargs: for the dense part.
    """
    sharders = make_sharders(module, optimizer, device, dedup)
    plan = make_plan(module, sharders, sharding, device=device, world_size=group.size(), local_size=local_size)
    kwargs = dict(ddp_kwargs or {})
    wrapper = {"static_graph": False} | {name: kwargs.pop(name) for name in _OF_THE_WRAPPER if name in kwargs}
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
    return sharded


class _DataParallelOverAllRanks(DefaultDataParallelWrapper):
    """The dense part's AllReduce stays on the default process group, whatever moves the rows of the tables."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        assert dist.group.WORLD is not None
        super().wrap(dmp, ShardingEnv.from_process_group(dist.group.WORLD), device)


@contextmanager
def _own_random_numbers(rank: int, device: torch.device) -> Iterator[None]:
    """Let shards of tables on ``meta`` be drawn from other random numbers on every rank, and leave no trace after.

    Ranks are seeded alike: without this, the shards of a table would all hold the same rows.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(torch.initial_seed() + 1 + rank)
        yield


def _table_weights(module: nn.Module) -> dict[str, Tensor]:
    """Weights of the unsharded tables that hold any (those on ``meta`` do not), by their key in ``module.state_dict()``."""
    return {
        f"{name}.{key}" if name else key: value
        for name, collection in embedding_modules(module).items()
        for key, value in collection.state_dict().items()
        if value.device.type != "meta"
    }


@torch.no_grad()
def _fill_shards(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy unsharded ``weights`` into the local shards of the sharded ``module``.

    TorchRec initialises shards anew, which would drop weights loaded before sharding, and would make the initial model
    depend on the number of ranks.
    """
    state = module.state_dict()
    for key, weight in weights.items():
        for shard in state[key].local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(weight[row : row + rows, column : column + columns])
