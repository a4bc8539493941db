"""Which table goes where, and how its rows are updated: the user's words turned into TorchRec's plan and fused optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.log import log_once

SHARDING_TYPES = ("row_wise", "table_wise", "column_wise")

# Optimizers whose update of a row depends on that row's gradient and state alone: splitting or delaying the rows of a batch
# leaves the result the same. Norm-based ones (LAMB, LARS) and those with counters over the table are not among them.
OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}
CUDA_ONLY = ("adam",)  # FBGEMM's CPU kernels have no Adam
DEFAULT_OPTIMIZER: Mapping[str, Any] = {"optimizer": "rowwise_adagrad", "lr": 0.02}
_OPTIONS = {"lr": "learning_rate", "eps": "eps", "weight_decay": "weight_decay"}

# A row-wise shard smaller than this is not worth an exchange with every rank: the table stays whole on one of them.
MIN_ROWS_PER_RANK = 16


def embedding_modules(module: nn.Module) -> dict[str, EmbeddingCollection | EmbeddingBagCollection]:
    """The collections to shard, by their qualified name in ``module``."""
    return {
        name: child
        for name, child in module.named_modules()
        if isinstance(child, (EmbeddingCollection, EmbeddingBagCollection))
    }


def _configs(collection: EmbeddingCollection | EmbeddingBagCollection) -> list[BaseEmbeddingConfig]:
    if isinstance(collection, EmbeddingCollection):
        return list(collection.embedding_configs())
    return list(collection.embedding_bag_configs())


def rows_by_feature(module: nn.Module) -> dict[str, int]:
    """Number of rows of the (smallest) table that each feature is looked up in."""
    rows: dict[str, int] = {}
    for collection in embedding_modules(module).values():
        for config in _configs(collection):
            for feature in config.feature_names:
                rows[feature] = min(config.num_embeddings, rows.get(feature, config.num_embeddings))
    return rows


def fused_params(options: Mapping[str, Any] | None, device: torch.device) -> dict[str, Any]:
    """FBGEMM's arguments for ``options`` such as ``{"optimizer": "rowwise_adagrad", "lr": 0.02, "eps": 1e-8}``.

    Raises:
        ConfigurationError: for an optimizer that is unknown, not exact row by row, or absent on ``device``.
    """
    options = dict(DEFAULT_OPTIMIZER if options is None else options)
    name = options.pop("optimizer", DEFAULT_OPTIMIZER["optimizer"])
    if name not in OPTIMIZERS:
        raise ConfigurationError(
            f"embedding_optimizer: optimizer {name!r} is not supported; choose one of {', '.join(OPTIMIZERS)} "
            "(their update of a row depends on that row alone, which keeps sharded and overlapped training exact)"
        )
    if name in CUDA_ONLY and device.type != "cuda":
        on_cpu = [other for other in OPTIMIZERS if other not in CUDA_ONLY]
        raise ConfigurationError(
            f"embedding_optimizer: optimizer {name!r} needs a CUDA device; on {device.type} choose one of {', '.join(on_cpu)}"
        )
    params: dict[str, Any] = {"optimizer": OPTIMIZERS[name], "learning_rate": DEFAULT_OPTIMIZER["lr"]}
    for key, value in options.items():
        if key == "betas" and name == "adam":
            params["beta1"], params["beta2"] = value
        elif key in _OPTIONS:
            params[_OPTIONS[key]] = value
        else:
            known = [*_OPTIONS, *(["betas"] if name == "adam" else [])]
            raise ConfigurationError(
                f"embedding_optimizer: {key}={value!r} is unknown for {name!r}; known: {', '.join(known)}"
            )
    if params["learning_rate"] < 0:
        raise ConfigurationError(f"embedding_optimizer: lr={params['learning_rate']} must not be negative")
    return params


def brings_own_optimizer(module: nn.Module) -> bool:
    """Whether the user attached optimizers to the tables, with TorchRec's ``apply_optimizer_in_backward``."""
    return any(
        hasattr(parameter, "_optimizer_classes")
        for collection in embedding_modules(module).values()
        for parameter in collection.parameters()
    )


def make_sharders(
    module: nn.Module, options: Mapping[str, Any] | None, device: torch.device, dedup: bool = False
) -> list[ModuleSharder]:
    """Sharders for both kinds of collection, with the fused optimizer the user asked for."""
    if dedup and device.type != "cuda":
        raise ConfigurationError(f"dedup=True needs a CUDA device: FBGEMM finds distinct ids on no {device.type}")
    if options is None and brings_own_optimizer(module):
        params: dict[str, Any] = {}
    else:
        if brings_own_optimizer(module):
            raise ConfigurationError(
                "embedding_optimizer: the tables have an optimizer already (apply_optimizer_in_backward); use one of the two"
            )
        params = fused_params(options, device)
    return [
        EmbeddingCollectionSharder(fused_params=dict(params), use_index_dedup=dedup),
        EmbeddingBagCollectionSharder(fused_params=dict(params)),
    ]


def choose_sharding(
    configs: Sequence[BaseEmbeddingConfig], sharding: Mapping[str, str] | str | None, world_size: int
) -> dict[str, str]:
    """Sharding type of each table: the user's, or row-wise, or table-wise where a table is too small to split."""
    tables = {config.name: config for config in configs}
    wanted = dict.fromkeys(tables, sharding) if isinstance(sharding, str) else dict(sharding or {})
    if unknown := sorted(set(wanted) - set(tables)):
        raise ConfigurationError(f"sharding: no table named {unknown[0]!r}; the tables are {', '.join(sorted(tables))}")
    chosen = {}
    for name, config in tables.items():
        small = config.num_embeddings < MIN_ROWS_PER_RANK * world_size
        kind = wanted.get(name) or ("table_wise" if small else "row_wise")
        if kind not in SHARDING_TYPES:
            raise ConfigurationError(
                f"sharding: {kind!r} for table {name!r} is unknown; choose one of {', '.join(SHARDING_TYPES)}"
            )
        if name not in wanted and small and world_size > 1:
            log_once(
                f"sharding: table {name!r} has only {config.num_embeddings} rows and stays whole on one rank (table_wise)"
            )
        chosen[name] = kind
    return chosen


def make_plan(
    module: nn.Module,
    sharders: Sequence[ModuleSharder],
    sharding: Mapping[str, str] | str | None,
    *,
    device: torch.device,
    world_size: int,
    local_size: int,
) -> ShardingPlan:
    """TorchRec's plan for every collection of ``module``. Pure: equal on all ranks without a collective.

    With one sharding type a table there is nothing left for TorchRec's planner to weigh (and it knows no row-wise sharding
    on CPU); whole tables go to the rank that holds the fewest bytes so far, the largest first.
    """
    collections = embedding_modules(module)
    configs = [config for collection in collections.values() for config in _configs(collection)]
    chosen = choose_sharding(configs, sharding, world_size)
    load = [0] * world_size  # bytes of whole tables by rank
    owner: dict[str, int] = {}
    for config in sorted(configs, key=lambda config: -config.num_embeddings * config.embedding_dim):
        if chosen[config.name] == "table_wise":
            owner[config.name] = load.index(min(load))
            load[owner[config.name]] += config.num_embeddings * config.embedding_dim
    sharder_of = {sharder.module_type: sharder for sharder in sharders}
    plan: dict[str, Any] = {}
    for name, collection in collections.items():
        plan[name] = construct_module_sharding_plan(
            collection,
            {
                config.name: _placement(config, chosen[config.name], owner, world_size)
                for config in _configs(collection)
            },
            sharder=sharder_of[type(collection)],
            local_size=local_size,
            world_size=world_size,
            device_type=device.type,
        )
    return ShardingPlan(plan=plan)


def _placement(
    config: BaseEmbeddingConfig, kind: str, owner: Mapping[str, int], world_size: int
) -> ParameterShardingGenerator:
    # The fused kernel everywhere: on CPU the default, "dense", pools sequences.
    kernel = EmbeddingComputeKernel.FUSED.value
    if kind == "row_wise":
        return row_wise(compute_kernel=kernel)
    if kind == "table_wise":
        return table_wise(rank=owner[config.name], compute_kernel=kernel)
    return column_wise(ranks=list(range(_column_shards(config, world_size))), compute_kernel=kernel)


def _column_shards(config: BaseEmbeddingConfig, world_size: int) -> int:
    """The most ranks the columns divide over evenly, in widths that FBGEMM can vectorise (multiples of 4)."""
    shards = [n for n in range(world_size, 0, -1) if config.embedding_dim % (4 * n) == 0]
    if not shards:
        raise ConfigurationError(
            f"sharding: table {config.name!r} has dimension {config.embedding_dim}, not a multiple of 4: it cannot be column_wise"
        )
    return shards[0]
