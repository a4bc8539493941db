"""The sharding plan: which rank holds which part of which table, in TorchRec's terms."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, get_args

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection, ITEPEmbeddingCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from lightning_freescale.batch.jagged_checks import ANY_ID
from lightning_freescale.embedding.distinct_ids import Dedup, add_cpu_kernel
from lightning_freescale.embedding.mean_pooling import has_means
from lightning_freescale.embedding.table_optimizer import (
    DEFAULT_TABLE_OPTIMIZER,
    check_own_optimizers,
    fused_params,
    has_own_optimizer,
)
from lightning_freescale.embedding.wire import Wire, parse_wire, torchrec_codecs
from lightning_freescale.embedding.zero_collision.collection import ZeroCollisionCollection
from lightning_freescale.embedding.zero_collision.sharded import ZeroCollisionSharder, check_bucket_sharding
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.log import log_once

SHARDING_TYPES = ("row_wise", "table_wise", "column_wise")

CPU_TABLE_TYPES = (DataType.FP32, DataType.FP16)  # that FBGEMM's training kernels have on CPU

# With fewer rows on each rank, row-wise sharding is not worth an all-to-all: the table stays whole on one rank.
MIN_ROWS_PER_RANK = 16


Collection: TypeAlias = (
    EmbeddingCollection | EmbeddingBagCollection | ZeroCollisionCollection | FeatureProcessedEmbeddingBagCollection
)

_UNSUPPORTED: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    (
        (BaseManagedCollisionEmbeddingCollection,),
        "every rank would remap ids on its own. Use lightning_freescale.zero_collision(EmbeddingCollection(...), ...) instead",
    ),
    (
        (ITEPEmbeddingBagCollection, ITEPEmbeddingCollection),
        "it prunes rows only if TorchRec's own sharder has sharded it, and nothing here. Use the collection inside it, or "
        "lightning_freescale.zero_collision(EmbeddingCollection(...), ...), which evicts rows",
    ),
    (
        (FusedEmbeddingBagCollection, FusedEmbeddingCollection),
        "it holds its optimizer, and is not sharded. Use EmbeddingBagCollection or EmbeddingCollection, and the option "
        "embedding_optimizer of the strategy",
    ),
)


def _refuse_unsupported(name: str, child: nn.Module) -> None:
    """Raise :class:`ConfigurationError` for TorchRec's modules that would train wrongly."""
    if isinstance(child, ZeroCollisionCollection):
        return
    for kinds, reason in _UNSUPPORTED:
        if isinstance(child, kinds):
            raise ConfigurationError(f"{name or 'the model'} is a {type(child).__name__}: {reason}")


def embedding_modules(module: nn.Module) -> dict[str, Collection]:
    """The embedding collections that are sharded, by their qualified name in ``module``."""
    found: dict[str, Collection] = {}
    managed: list[str] = []  # prefixes of the names of what is inside a collection
    for name, child in module.named_modules():
        _refuse_unsupported(name, child)
        if isinstance(child, get_args(Collection)) and not name.startswith(tuple(managed)):
            found[name] = child
            if isinstance(child, (ZeroCollisionCollection, FeatureProcessedEmbeddingBagCollection)):
                managed.append(f"{name}." if name else "")
    return found


def table_configs(collection: Collection) -> list[BaseEmbeddingConfig]:
    """The configurations of the tables of one collection."""
    if isinstance(collection, FeatureProcessedEmbeddingBagCollection):
        return list(collection._embedding_bag_collection.embedding_bag_configs())
    if isinstance(collection, EmbeddingBagCollection):
        return list(collection.embedding_bag_configs())
    return list(collection.embedding_configs())


def is_of_a_table(key: str) -> bool:
    """Whether a key of a collection's state belongs to its tables. Feature processors are dense modules inside a collection."""
    return not key.startswith("_feature_processors.")


def rows_by_feature(module: nn.Module) -> dict[str, int]:
    """Number of ids that each feature may have: the rows of its table, of the smallest one if it uses several tables.

    It is :data:`ANY_ID` for a table with zero-collision ids.
    """
    rows: dict[str, int] = {}
    for collection in embedding_modules(module).values():
        unlimited = isinstance(collection, ZeroCollisionCollection)
        for config in table_configs(collection):
            limit = ANY_ID if unlimited else config.num_embeddings
            for feature in config.feature_names:
                rows[feature] = min(limit, rows.get(feature, limit))
    return rows


def make_sharders(
    module: nn.Module,
    options: Mapping[str, Any] | None,
    device: torch.device,
    dedup: Dedup = False,
    wire: Wire = "float32",
) -> list[ModuleSharder]:
    """Sharders for both kinds of collection, with the fused optimizer that ``options`` (``embedding_optimizer``) asks for."""
    if dedup and device.type == "cpu":
        add_cpu_kernel()
    _refuse_types_without_kernel(module, device)
    if has_own_optimizer(embedding_modules(module).values()):
        check_own_optimizers(embedding_modules(module).values(), device)
        if options is not None:
            raise ConfigurationError(
                "embedding_optimizer: the tables have an optimizer already (apply_optimizer_in_backward); use one of the two"
            )
        params: dict[str, Any] = {}
    else:
        params = fused_params(options, device)
        if options is None:
            log_once(
                f"embedding_optimizer is not set: the tables are trained by {DEFAULT_TABLE_OPTIMIZER['optimizer']} inside "
                f"backward, with lr={DEFAULT_TABLE_OPTIMIZER['lr']} unless a parameter group of their own says otherwise. The "
                "model's own optimizers train its other parameters, and their settings, such as weight_decay, are not those of "
                "the tables"
            )
    kinds = dict.fromkeys([EmbeddingCollection, EmbeddingBagCollection, *map(type, embedding_modules(module).values())])
    sequences = {"use_index_dedup": bool(dedup), "qcomm_codecs_registry": torchrec_codecs(parse_wire(wire))}
    return [_make_sharder(kind, params, sequences, device) for kind in kinds]


def _refuse_types_without_kernel(module: nn.Module, device: torch.device) -> None:
    if device.type != "cpu":
        return
    for collection in embedding_modules(module).values():
        for config in table_configs(collection):
            if config.data_type not in CPU_TABLE_TYPES:
                raise ConfigurationError(
                    f"table {config.name!r} has data_type {config.data_type.name}: FBGEMM trains it on CUDA only; on a CPU "
                    f"choose one of {', '.join(kind.name for kind in CPU_TABLE_TYPES)}"
                )


def _make_sharder(
    kind: type[nn.Module], params: Mapping[str, Any], sequence_options: Mapping[str, Any], device: torch.device
) -> ModuleSharder:
    """The sharder of one type of collection. TorchRec finds sharders by the exact type, so a subclass needs its own."""
    if kind is ZeroCollisionCollection:
        return ZeroCollisionSharder(params, sequence_options)
    if kind is FeatureProcessedEmbeddingBagCollection:
        bags = EmbeddingBagCollectionSharder(fused_params=dict(params))
        return FeatureProcessedEmbeddingBagCollectionSharder(ebc_sharder=bags)
    base = EmbeddingCollection if issubclass(kind, EmbeddingCollection) else EmbeddingBagCollection
    if kind.forward is not base.forward:
        raise ConfigurationError(
            f"{kind.__name__} overrides the forward of {base.__name__}, which sharding would replace. Put your code into a "
            f"module that holds an {base.__name__}"
        )
    parent = EmbeddingCollectionSharder if base is EmbeddingCollection else EmbeddingBagCollectionSharder
    sharder = (
        parent
        if kind is base
        else type(f"{kind.__name__}Sharder", (parent,), {"module_type": property(lambda _: kind)})
    )
    return sharder(fused_params=dict(params), **(sequence_options if base is EmbeddingCollection else {}))


def choose_sharding(
    configs: Sequence[BaseEmbeddingConfig],
    sharding: Mapping[str, str] | str | None,
    world_size: int,
    buckets: Mapping[str, int] | None = None,
    split: Container[str] = (),
) -> dict[str, str]:
    """Sharding type of each table: the user's choice; otherwise row-wise, or table-wise if the table is too small to split.

    Args:
        buckets: number of buckets of each table with zero-collision ids. Such a table is row-wise, whatever its size.
        split: names of tables that are row-wise by default, whatever their size.
    """
    tables = {config.name: config for config in configs}
    wanted = dict.fromkeys(tables, sharding) if isinstance(sharding, str) else dict(sharding or {})
    if unknown := sorted(set(wanted) - set(tables)):
        raise ConfigurationError(f"sharding: no table named {unknown[0]!r}; the tables are {', '.join(sorted(tables))}")
    chosen = {}
    for name, config in tables.items():
        if buckets and name in buckets:
            chosen[name] = check_bucket_sharding(name, buckets[name], wanted.get(name), world_size)
            continue
        small = _is_small(config, world_size) and name not in split
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


def _is_small(config: BaseEmbeddingConfig, world_size: int) -> bool:
    return config.num_embeddings < MIN_ROWS_PER_RANK * world_size


def _split_with_means(collections: Iterable[Collection], world_size: int) -> set[str]:
    """Tables that must not stay whole, because another table of the collection is row-wise: see ``mean_pooling.py``."""
    configs = [table_configs(collection) for collection in collections]
    mixed = [part for part in configs if has_means(part) and not all(_is_small(config, world_size) for config in part)]
    return {config.name for part in mixed for config in part}


def make_plan(
    module: nn.Module,
    sharders: Sequence[ModuleSharder],
    sharding: Mapping[str, str] | str | None,
    *,
    device: torch.device,
    world_size: int,
    local_size: int,
) -> ShardingPlan:
    """TorchRec's plan for every collection of ``module``. All ranks compute the same plan, without communication.

    TorchRec's planner is not used: the sharding type of each table is given, and the planner has no row-wise sharding on CPU.
    Whole tables go, the largest first, to the rank whose whole tables have the fewest elements so far.
    """
    collections = embedding_modules(module)
    configs = [config for collection in collections.values() for config in table_configs(collection)]
    buckets = {
        name: number
        for collection in collections.values()
        if isinstance(collection, ZeroCollisionCollection)
        for name, number in collection.buckets.items()
    }
    split = _split_with_means(collections.values(), world_size)
    chosen = choose_sharding(configs, sharding, world_size, buckets, split)
    load = [0] * world_size  # elements of whole tables on each rank
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
                config.name: _placement(config, chosen[config.name], owner, world_size, buckets.get(config.name))
                for config in table_configs(collection)
            },
            sharder=sharder_of[type(collection)],
            local_size=local_size,
            world_size=world_size,
            device_type=device.type,
        )
    return ShardingPlan(plan=plan)


def _placement(
    config: BaseEmbeddingConfig, kind: str, owner: Mapping[str, int], world_size: int, buckets: int | None
) -> ParameterShardingGenerator:
    # Always the fused kernel: the default on CPU, "dense", sums the rows of a sequence.
    kernel = EmbeddingComputeKernel.FUSED.value
    if buckets is not None and buckets % world_size:
        return row_wise(compute_kernel=kernel, num_buckets=buckets)
    if kind == "row_wise":
        return row_wise(compute_kernel=kernel)
    if kind == "table_wise":
        return table_wise(rank=owner[config.name], compute_kernel=kernel)
    return column_wise(ranks=list(range(_column_shards(config, world_size))), compute_kernel=kernel)


def _column_shards(config: BaseEmbeddingConfig, world_size: int) -> int:
    """The largest number of ranks over which the columns divide evenly, in widths that FBGEMM can vectorize (multiples of 4)."""
    shards = [n for n in range(world_size, 0, -1) if config.embedding_dim % (4 * n) == 0]
    if not shards:
        raise ConfigurationError(
            f"sharding: table {config.name!r} has dimension {config.embedding_dim}, which is not a multiple of 4: "
            "it cannot be column_wise"
        )
    return shards[0]
