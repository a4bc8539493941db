"""A zero-collision collection after sharding: its tables are split over the ranks at buckets, by TorchRec's own sharder."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
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
from lightning_freescale.embedding.zero_collision.distinct_requests import request_distinct_ids
from lightning_freescale.embedding.zero_collision.module import ZeroCollisionModule
from lightning_freescale.embedding.zero_collision.owned_table import OwnedTable
from lightning_freescale.embedding.zero_collision.remap import Insertion
from lightning_freescale.runtime.errors import ConfigurationError


class TableInsertion(NamedTuple):
    """The insertion of a batch into one table."""

    table: OwnedTable
    insertion: Insertion


class TableFeatures(NamedTuple):
    """A table, and which features of its sharding group are its own. Masks leave the counts of ids on the device."""

    table: OwnedTable
    mine: Tensor | None  # [T] booleans: the features of the table; None if all are
    inserting: Tensor | None  # [T] booleans: those of them that insert; None if all of the table do

    @property
    def needs_features(self) -> bool:
        return self.mine is not None or self.inserting is not None

    def masks(self, feature: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """``mine`` and ``inserting`` for ids of the features ``feature [n]``: ``[n]`` booleans, or None."""
        if feature is None:
            return None, None
        return tuple(None if flags is None else flags[feature] for flags in (self.mine, self.inserting))  # type: ignore[return-value]


class ShardedZeroCollisionCollection(ShardedManagedCollisionEmbeddingCollection):
    """A :class:`ZeroCollisionCollection` after sharding. Each rank remaps the ids of the buckets that it owns.

    Attributes:
        tables: this rank's part of each table.
        timeline: counts the ids of recorded steps.
    """

    takes_any_id = True  # not only numbers of rows

    _embedding_module: ShardedEmbeddingCollection

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        modules = self._managed_collision_collection._managed_collision_modules
        self.tables = _owned_tables(self._embedding_module, modules)
        self._tables_of_group = [
            _table_features([self.tables[name] for name in names], self._device)
            for names in self._managed_collision_collection._sharding_tables
        ]
        groups = [_request_groups([table.table for table in tables]) for tables in self._tables_of_group]
        self._managed_collision_collection._dedup_indices = partial(request_distinct_ids, groups=groups)  # type: ignore[method-assign]
        self.timeline = Timeline()
        # The probes of the monitor find the look-ups of a sharded module under these names.
        self._lookups, self._output_dists = self._embedding_module._lookups, self._embedding_module._output_dists

    @property
    def collection(self) -> ShardedEmbeddingCollection:
        """The tables, without their identities."""
        return self._embedding_module

    # What ``dedup="auto"`` looks at and sets, as on a collection without zero-collision ids.
    @property
    def _embedding_configs(self) -> list[Any]:
        return self.collection._embedding_configs

    @property
    def _use_index_dedup(self) -> bool:
        return self._managed_collision_collection._use_index_dedup

    @_use_index_dedup.setter
    def _use_index_dedup(self, value: bool) -> None:
        self._managed_collision_collection._use_index_dedup = value

    def remap(self, received: Sequence[KeyedJaggedTensor], insert: bool) -> tuple[KJTList, list[TableInsertion]]:
        """From the ids that this rank has received to slots of its own rows.

        Args:
            received: the ids of each sharding group, as ``input_dist`` delivers them.
            insert: whether they are the ids of a training step. Otherwise nothing changes.
        """
        insertions: list[TableInsertion] = []
        groups = zip(received, self._tables_of_group, strict=True)
        remapped = [self._remap_group(features, tables, insert, insertions) for features, tables in groups]
        return KJTList(remapped), insertions

    def _remap_group(
        self,
        features: KeyedJaggedTensor,
        tables: Sequence[TableFeatures],
        insert: bool,
        insertions: list[TableInsertion],
    ) -> KeyedJaggedTensor:
        ids = features.values().to(torch.int64)
        feature = _feature_of_ids(features) if any(table.needs_features for table in tables) else None
        slots: Tensor | None = None
        for table in tables:
            mine, inserting = table.masks(feature)
            found, insertion = table.table.remap(ids, mine, inserting, insert)
            slots = found if slots is None or mine is None else torch.where(mine, found, slots)
            if insertion is not None:
                insertions.append(TableInsertion(table.table, insertion))
        assert slots is not None
        return KeyedJaggedTensor(
            features.keys(),
            slots,
            lengths=features.lengths(),
            stride=features.stride(),
            length_per_key=features.length_per_key_or_none(),  # to compute it would make the host wait for the ids
        )

    def slots_by_table(self, groups: Sequence[KeyedJaggedTensor]) -> dict[nn.Module, Tensor]:
        """The slots of each table, by its identities. Tables may share a feature, so its name does not tell the table."""
        found: dict[nn.Module, Tensor] = {}
        for features, tables in zip(groups, self._tables_of_group, strict=True):
            parts = features.split([len(part.table.features) for part in tables])
            found |= {part.table.identities: slots.values() for part, slots in zip(tables, parts, strict=True)}
        return found

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


def _table_features(tables: Sequence[OwnedTable], device: torch.device) -> list[TableFeatures]:
    """Which features of a sharding group belong to which of its ``tables``. The features are in the order of the tables."""
    found = []
    for table in tables:
        read_only = table.identities.read_only
        mine = [other is table for other in tables for _ in other.features]
        inserting = [other is table and name not in read_only for other in tables for name in other.features]
        found.append(
            TableFeatures(
                table,
                None if len(tables) == 1 else torch.tensor(mine, device=device),
                None if inserting == mine else torch.tensor(inserting, device=device),
            )
        )
    return found


def _request_groups(tables: Sequence[OwnedTable]) -> list[int]:
    """For each feature of a sharding group, a number: equal for features of one table that all insert, or all only look up."""
    groups: dict[tuple[int, bool], int] = {}
    return [
        groups.setdefault((number, name in table.identities.read_only), len(groups))
        for number, table in enumerate(tables)
        for name in table.features
    ]


def _feature_of_ids(features: KeyedJaggedTensor) -> Tensor:
    """The index of the feature of each id, ``[n]`` int64. The host does not wait for the device."""
    lengths, ids = features.lengths(), features.values().numel()
    of_sample = torch.arange(lengths.numel(), device=lengths.device) // max(1, features.stride())
    return of_sample.repeat_interleave(lengths.to(torch.int64), output_size=ids)
