"""``zero_collision``: an ``EmbeddingCollection`` whose ids are any 64-bit numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.embedding.zero_collision.fresh_rows import row_draw
from lightning_freescale.embedding.zero_collision.layout import POLICIES, Eviction, Layout, Policy
from lightning_freescale.embedding.zero_collision.module import ZeroCollisionModule
from lightning_freescale.runtime.errors import ConfigurationError

RESERVED_SHARE = 0.01  # of the slots of a bucket, for ids that find none


@dataclass(frozen=True)
class ZeroCollision:
    """How the ids of one table get rows.

    Args:
        buckets: number of buckets. It divides the rows of the table and is at least the number of ranks. Ids do not collide
            up to a load of 0.75 if a bucket has 1,024 slots or more.
        max_probe: number of slots that an id probes at most.
        evict: when an id loses its row. ``None``: never. ``"ttl"``: a new id takes the first row that is free or whose id has
            not been seen for ``ttl`` steps. ``"lru"``: a new id takes a free row, or else the one whose id was seen least
            recently, if that was more than ``ttl`` steps ago.
        ttl: time to live in training steps, at least 1. With ``"lru"`` it is 1 by default.
        insert: the features whose ids get rows. The other features of the table, such as sampled negatives, only look ids up
            and keep no id alive. By default all features insert.
        reserved: slots of each bucket that no id owns. Ids that find no row share them. One in a hundred by default.
        seed: seed of the first rows of ids.
        std: standard deviation of the first rows. By default they are drawn as the table is initialized.
    """

    buckets: int
    max_probe: int = 256
    evict: Policy = None
    ttl: int | None = None
    insert: Sequence[str] | None = None
    reserved: int | None = None
    seed: int = 0
    std: float | None = None

    def module(self, config: EmbeddingConfig, device: torch.device) -> ZeroCollisionModule:
        """The identities of the table with the given ``config``."""
        self._check(config)
        size = config.num_embeddings // self.buckets
        reserved = max(1, int(size * RESERVED_SHARE)) if self.reserved is None else self.reserved
        inserts = config.feature_names if self.insert is None else self.insert
        return ZeroCollisionModule(
            config.name,
            Layout(self.buckets, 0, self.buckets, size, reserved, self.max_probe),
            Eviction(self.evict, self.ttl or 1),
            row_draw(config, self.seed, self.std),
            frozenset(config.feature_names) - frozenset(inserts),
            device,
        )

    def _check(self, config: EmbeddingConfig) -> None:
        """Raise :class:`ConfigurationError` unless the options fit the table."""

        def refuse(option: str, reason: str) -> None:
            value = getattr(self, option)
            raise ConfigurationError(f"zero_collision: table {config.name!r}, {option}={value!r}: {reason}")

        if self.buckets < 1:
            refuse("buckets", "must be at least 1")
        if config.num_embeddings % self.buckets:
            near = self.buckets * max(1, round(config.num_embeddings / self.buckets))
            refuse("buckets", f"does not divide its {config.num_embeddings} rows; {near} rows would fit")
        size = config.num_embeddings // self.buckets
        if size < 2:
            refuse("buckets", f"leaves {size} slot in a bucket; use fewer buckets or more rows")
        if self.reserved is not None and not 0 < self.reserved < size:
            refuse("reserved", f"must be between 1 and {size - 1}, because a bucket has {size} slots")
        if self.max_probe < 1:
            refuse("max_probe", "must be at least 1")
        if self.evict not in POLICIES:
            refuse("evict", "is unknown; choose 'ttl', 'lru' or None")
        if self.evict == "ttl" and self.ttl is None:
            refuse("ttl", "evict='ttl' needs a time to live, in training steps")
        if self.ttl is not None and (self.evict is None or self.ttl < 1):
            refuse("ttl", "must be at least 1" if self.evict else "has no effect without evict")
        unknown = sorted(set(self.insert or ()) - set(config.feature_names))
        if unknown:
            refuse("insert", f"{unknown[0]!r} is no feature of the table; they are {', '.join(config.feature_names)}")
        if self.insert is not None and not self.insert:
            refuse("insert", "names no feature, so no id would ever get a row")


class ZeroCollisionCollection(ManagedCollisionEmbeddingCollection):
    """An ``EmbeddingCollection`` whose ids are any integers from 0 to 2^63 - 1. Make it with :func:`zero_collision`.

    Its output is that of the ``EmbeddingCollection``. The strategy shards it and trains it. Without a strategy it looks ids
    up, in evaluation or without gradients.
    """

    takes_any_id = True  # not only numbers of rows

    _embedding_module: EmbeddingCollection

    def forward(self, features: KeyedJaggedTensor, *_: Any, **__: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            raise ConfigurationError(
                "zero_collision: only the strategies 'freescale' and 'freescale_sync' train such tables, because their "
                "optimizer must start anew for every new id. Call eval(), or train with one of these strategies"
            )
        return super().forward(features)[0]

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return list(self._embedding_module.embedding_configs())

    @property
    def buckets(self) -> dict[str, int]:
        """Number of buckets of each table."""
        modules = self._managed_collision_collection._managed_collision_modules
        return {name: module.buckets() for name, module in modules.items()}


def zero_collision(collection: EmbeddingCollection, tables: Mapping[str, ZeroCollision]) -> ZeroCollisionCollection:
    """Let the ids of an ``EmbeddingCollection`` be any integers from 0 to 2^63 - 1, each with a row of its own.

    Args:
        collection: the tables. ``num_embeddings`` is the number of rows, not of ids.
        tables: how the ids of each table get rows, by the name of the table. Tables with ordinary ids belong into an
            ``EmbeddingCollection`` of their own.

    >>> table = EmbeddingConfig(name="item", num_embeddings=8192, embedding_dim=8, feature_names=["history"])
    >>> items = zero_collision(EmbeddingCollection(tables=[table]), {"item": ZeroCollision(buckets=8)})
    >>> items.buckets
    {'item': 8}
    """
    configs = list(collection.embedding_configs())
    names = [config.name for config in configs]
    for name in tables:
        if name not in names:
            raise ConfigurationError(f"zero_collision: no table named {name!r}; the tables are {', '.join(names)}")
    for config in configs:
        if config.name not in tables:
            raise ConfigurationError(
                f"zero_collision: table {config.name!r} of the collection has no entry. Add one, or put the table into an "
                "EmbeddingCollection of its own"
            )
    device = next(collection.parameters()).device
    modules = {config.name: tables[config.name].module(config, device) for config in configs}
    return ZeroCollisionCollection(
        collection, ManagedCollisionCollection(modules, collection.embedding_configs(), need_preprocess=False)
    )
