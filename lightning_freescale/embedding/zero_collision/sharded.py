"""A zero-collision collection after sharding: its tables are split over the ranks at buckets, by TorchRec's own sharder."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.mc_embedding import (
    ManagedCollisionEmbeddingCollectionSharder,
    ShardedManagedCollisionEmbeddingCollection,
)
from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder
from torchrec.distributed.sharding_plan import row_wise
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.embedding.table_optimizer import kernels_in
from lightning_freescale.embedding.zero_collision.collection import ZeroCollisionCollection
from lightning_freescale.embedding.zero_collision.module import ZeroCollisionModule
from lightning_freescale.embedding.zero_collision.owned_table import OwnedTable
from lightning_freescale.embedding.zero_collision.remap import Insertion
from lightning_freescale.runtime.errors import ConfigurationError


class TableInsertion(NamedTuple):
    """The insertion of a batch into one table."""

    table: OwnedTable
    insertion: Insertion


class ShardedZeroCollisionCollection(ShardedManagedCollisionEmbeddingCollection):
    """A :class:`ZeroCollisionCollection` after sharding. Each rank remaps the ids of the buckets that it owns.

    Attributes:
        tables: this rank's part of each table.
        timeline: counts the ids of recorded steps.
    """

    _embedding_module: ShardedEmbeddingCollection

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        modules = self._managed_collision_collection._managed_collision_modules
        self.tables = _owned_tables(self._embedding_module, modules)
        self.timeline = Timeline()
        # The probes of the monitor find the look-ups of a sharded module under these names.
        self._lookups, self._output_dists = self._embedding_module._lookups, self._embedding_module._output_dists

    @property
    def collection(self) -> ShardedEmbeddingCollection:
        """The tables, without their identities."""
        return self._embedding_module

    def remap(self, received: Sequence[KeyedJaggedTensor], insert: bool) -> tuple[KJTList, list[TableInsertion]]:
        """From the ids that this rank has received to slots of its own rows.

        Args:
            received: the ids of each sharding group, as ``input_dist`` delivers them.
            insert: whether they are the ids of a training step. Otherwise nothing changes.
        """
        insertions: list[TableInsertion] = []
        groups = zip(received, self._managed_collision_collection._sharding_tables, strict=True)
        remapped = [self._remap_group(features, names, insert, insertions) for features, names in groups]
        return KJTList(remapped), insertions

    def _remap_group(
        self, features: KeyedJaggedTensor, names: Sequence[str], insert: bool, insertions: list[TableInsertion]
    ) -> KeyedJaggedTensor:
        counts = iter(features.length_per_key())
        slots: list[Tensor] = []
        rest = features.values().to(torch.int64)
        for name in names:
            table = self.tables[name]
            of_features = [next(counts) for _ in table.features]
            ids, rest = rest.split([sum(of_features), len(rest) - sum(of_features)])
            found, insertion = table.remap(ids, of_features, insert)
            slots.append(found)
            if insertion is not None:
                insertions.append(TableInsertion(table, insertion))
        return KeyedJaggedTensor(
            features.keys(),
            torch.cat(slots),
            lengths=features.lengths(),
            stride=features.stride(),
            length_per_key=features.length_per_key(),
        )

    # ---- the synchronous step ---------------------------------------------------------------------------------------
    def compute(self, ctx: Any, dist_input: KJTList) -> list[Tensor]:
        """Remap, write the fresh rows, look up."""
        remapped, insertions = self.remap(list(dist_input), insert=self.training and torch.is_grad_enabled())
        for table, insertion in insertions:
            table.count(insertion, self.timeline)
            table.write_fresh(insertion)
        return self._embedding_module.compute(ctx, remapped)

    def output_dist(self, ctx: Any, output: list[Tensor]) -> Any:
        """The output of the ``EmbeddingCollection`` alone, without the slots."""
        return self._embedding_module.output_dist(ctx, output)


class ZeroCollisionSharder(ManagedCollisionEmbeddingCollectionSharder):
    """Shards :class:`ZeroCollisionCollection`.

    Args:
        fused_params: FBGEMM's arguments of the optimizer of the tables.
        options: options of the sharder of the ``EmbeddingCollection``.
    """

    def __init__(self, fused_params: Mapping[str, Any], options: Mapping[str, Any]):
        inner = EmbeddingCollectionSharder(fused_params=dict(fused_params), **options)
        super().__init__(inner, ManagedCollisionCollectionSharder())

    def shard(
        self,
        module: ZeroCollisionCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedZeroCollisionCollection:
        assert device is not None
        return ShardedZeroCollisionCollection(
            module, params, ec_sharder=self._e_sharder, mc_sharder=self._mc_sharder, env=env, device=device
        )

    @property
    def module_type(self) -> type[ZeroCollisionCollection]:
        return ZeroCollisionCollection

    @property
    def sharded_module_type(self) -> type[ShardedZeroCollisionCollection]:
        return ShardedZeroCollisionCollection


def check_bucket_sharding(table: str, buckets: int, wanted: str | None, world_size: int) -> str:
    """``"row_wise"``, or :class:`ConfigurationError` if the buckets of ``table`` cannot be spread over the ranks."""
    if wanted not in (None, "row_wise"):
        raise ConfigurationError(
            f"sharding: {wanted!r} for table {table!r}: a table with zero-collision ids is split at its buckets; use 'row_wise'"
        )
    if buckets < world_size:
        raise ConfigurationError(
            f"zero_collision: table {table!r}, buckets={buckets}: fewer than the {world_size} ranks, which need a bucket each"
        )
    if buckets % world_size and "num_buckets" not in inspect.signature(row_wise).parameters:
        raise ConfigurationError(
            f"zero_collision: table {table!r}, buckets={buckets}: must be a multiple of the {world_size} ranks with this "
            "release of TorchRec; later ones spread any number of buckets"
        )
    return "row_wise"


def _owned_tables(collection: ShardedEmbeddingCollection, modules: Mapping[str, nn.Module]) -> dict[str, OwnedTable]:
    tables = {}
    for lookup in collection._lookups:
        for config, kernel in zip(lookup.grouped_configs, kernels_in(lookup), strict=True):
            states = kernel.split_optimizer_states() or [()] * len(config.embedding_tables)
            weights = kernel.split_embedding_weights()
            for table, weight, state in zip(config.embedding_tables, weights, states, strict=True):
                identities = modules[table.name]
                assert isinstance(identities, ZeroCollisionModule)
                tables[table.name] = OwnedTable(
                    identities,
                    weight.detach(),
                    [part.detach() for part in state if part.numel() and part.shape[0] == table.local_rows],
                    list(table.feature_names),
                )
    return tables
