"""Shards a model: the tables are split over the ranks of a process group, and everything else is data parallel."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import ShardedModule, ShardingEnv, ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.embedding.batched_copies import BatchedCopiesDDP
from lightning_freescale.embedding.distinct_ids import Dedup, DedupTrial
from lightning_freescale.embedding.fixed_buckets import FixedBucketsDDP
from lightning_freescale.embedding.gradient_buckets import choose_bucket_megabytes, may_choose
from lightning_freescale.embedding.key_order import keep_key_order
from lightning_freescale.embedding.mean_pooling import refuse_wrong_means
from lightning_freescale.embedding.moment_kernel import moment_kernels
from lightning_freescale.embedding.partial_sums import refuse_uneven_batches
from lightning_freescale.embedding.plan import embedding_modules, is_of_a_table, make_plan, make_sharders, table_configs
from lightning_freescale.embedding.table_optimizer import count_training_lookups_only
from lightning_freescale.embedding.unsharded_api import refuse_lost_hooks, resemble
from lightning_freescale.embedding.user_plan import users_plan
from lightning_freescale.embedding.wire import Wire
from lightning_freescale.embedding.zero_collision.sharded import ShardedZeroCollisionCollection
from lightning_freescale.runtime.errors import ConfigurationError


def shard(
    module: nn.Module,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    local_size: int = 1,
    sharding: Mapping[str, str] | str | None = None,
    plan: ShardingPlan | None = None,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    topology: Topology | None = None,
    optimizer: Mapping[str, Any] | None = None,
    dedup: Dedup = False,
    wire: Wire = "float32",
    ddp_kwargs: Mapping[str, Any] | None = None,
) -> DistributedModelParallel:
    """Shard the tables of ``module``, and wrap its other parameters in DDP. All ranks must call it.

    Tables that hold weights keep them.

    Args:
        group: process group of all ranks, on which TorchRec exchanges ids, rows and gradients.
        local_size: number of ranks on this host.
        sharding, plan, constraints, topology: the strategy's options with these names.
        optimizer, dedup, wire: the strategy's ``embedding_optimizer``, ``dedup`` and ``wire``.
        ddp_kwargs: arguments of DDP for the dense parameters.
    """
    weights, unsharded = _table_weights(module), embedding_modules(module)
    refuse_lost_hooks(unsharded)
    sharders = make_sharders(module, optimizer, device, dedup, wire)
    plan = users_plan(
        module,
        sharders,
        plan=plan,
        constraints=constraints,
        topology=topology,
        device=device,
        group=group,
        local_size=local_size,
    ) or make_plan(module, sharders, sharding, device=device, world_size=group.size(), local_size=local_size)
    for name, collection in unsharded.items():
        refuse_wrong_means(name, table_configs(collection), plan.plan[name])
    with _own_random_numbers(group.rank(), device), moment_kernels(device):
        sharded = DistributedModelParallel(
            module,
            env=ShardingEnv.from_process_group(group),
            device=device,
            plan=plan,
            sharders=sharders,
            data_parallel_wrapper=_DataParallelOverAllRanks(ddp_kwargs or {}),
        )
    _fill_shards(module, weights)
    resemble(module, unsharded)
    count_training_lookups_only(module)
    keep_key_order((name, child) for name, child in module.named_modules() if isinstance(child, ShardedModule))
    if device.type == "cpu":
        refuse_uneven_batches(module)
    _refuse_weights_with_gradients(module)
    if dedup == "auto":
        _try_dedup(module)
    return sharded


def _refuse_weights_with_gradients(module: nn.Module) -> None:
    """Let bags whose weights need gradients fail. The weights travel to the owners, and TorchRec returns no gradient for them."""

    def check(name: str, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        weights = arguments[0].weights_or_none() if arguments and isinstance(arguments[0], KeyedJaggedTensor) else None
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            raise ConfigurationError(
                f"{name}: the weights of its bags need gradients, which do not return from the owners of the rows. Compute "
                "the weights with a FeatureProcessedEmbeddingBagCollection, or detach them"
            )

    for name, child in module.named_modules():
        if isinstance(child, ShardedEmbeddingBagCollection):
            child.register_forward_pre_hook(functools.partial(check, name))


def _try_dedup(module: nn.Module) -> None:
    inside: list[str] = []  # a collection with zero-collision ids decides for the collection inside it
    for name, child in module.named_modules():
        if isinstance(child, ShardedZeroCollisionCollection):
            inside.append(f"{name}.")
        if isinstance(child, (ShardedEmbeddingCollection, ShardedZeroCollisionCollection)) and not name.startswith(
            tuple(inside)
        ):
            DedupTrial(name, child)


class _DataParallelOverAllRanks(DefaultDataParallelWrapper):
    """Wraps the dense parameters in DDP with the user's options, on the default process group.

    The AllReduce of the dense parameters does not depend on the group of the tables. As with plain DDP, buffers such as the
    statistics of a BatchNorm layer are those of rank 0 on all ranks. Buffers of the tables are not, and neither are buffers
    that are not part of the state dict.
    """

    def __init__(self, options: Mapping[str, Any]):
        super().__init__()
        defaults = inspect.signature(DistributedDataParallel.__init__).parameters
        # A command line hands over every option of DDP, even if the user has set none.
        changed = {name: value for name, value in options.items() if value != defaults[name].default}
        self._options = {"process_group": dist.group.WORLD, "gradient_as_bucket_view": True} | changed

    def _ddp_wrap(
        self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device, ddp_ignore_param_names: set[str]
    ) -> None:
        module = dmp._dmp_wrapped_module
        assert isinstance(module, nn.Module)
        if {name for name, _ in dmp.named_parameters()} <= ddp_ignore_param_names:
            return
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            module, ddp_ignore_param_names | _unsynchronized_buffers(module)
        )
        # A resume that is equal to the last bit is promised on a CPU only. On a GPU, DDP may adapt its buckets to the model.
        if device.type == "cpu":
            dmp._dmp_wrapped_module = FixedBucketsDDP(module.to(device), **self._options)
        else:
            options = self._options
            given = {"bucket_cap_mb", "bucket_cap_mb_list"} & options.keys()
            if not given and may_choose(options["process_group"]):
                dense = [
                    (name, value.numel() * value.element_size())
                    for name, value in dmp.named_parameters()
                    if name not in ddp_ignore_param_names and value.requires_grad
                ]
                keeps_first = options.get("find_unused_parameters", False) and not options.get("static_graph", False)
                chosen = choose_bucket_megabytes(dense, options["process_group"], device, model_order=keeps_first)
                options = options | {"bucket_cap_mb": chosen}
            dmp._dmp_wrapped_module = BatchedCopiesDDP(module.to(device), device_ids=[device], **options)


def _unsynchronized_buffers(module: nn.Module) -> set[str]:
    """Names of the buffers that each rank keeps for itself: those of sharded tables, and those not in the state dict."""
    tables = [f"{name}." for name, child in module.named_modules() if isinstance(child, ShardedModule)]
    saved = {name for name in module.state_dict() if not name.startswith(tuple(tables))}
    return {name for name, _ in module.named_buffers() if name not in saved}


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
        if value.device.type != "meta" and is_of_a_table(key)
    }


@torch.no_grad()
def _fill_shards(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy unsharded ``weights`` into the local shards of the sharded ``module``.

    TorchRec initializes shards again. That would drop weights that were loaded before sharding, and the initial model would
    depend on the number of ranks.
    """
    state = module.state_dict()
    for key, weight in weights.items():
        if not hasattr(state[key], "local_shards"):
            state[key].copy_(weight)  # a data-parallel table, or a count of a zero-collision table
            continue
        for shard in state[key].local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(weight[row : row + rows, column : column + columns])
