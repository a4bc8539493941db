"""``ShardedModel``: a user's model after its tables were sharded, and what another Trainer needs to know about it.

A model is sharded once. The record stays on the module, so that a second ``fit`` or another Trainer uses the same
shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from lightning_freescale.embedding import plan
from lightning_freescale.embedding.shard import shard
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.log import log_once

_ATTRIBUTE = "_freescale"


@dataclass(frozen=True)
class ShardedModel:
    """What is known about a sharded model.

    Attributes:
        sharded: TorchRec's wrapper of the model.
        rows: number of rows of the table of each feature.
        rates: learning rate of each FBGEMM kernel before any scheduler changed it.
        frozen: names of the tables that had ``requires_grad=False``.
        has_tables: whether the model has any embedding collection.
        options: the options that the model was sharded with.
    """

    sharded: DistributedModelParallel
    rows: dict[str, int]
    rates: list[float]
    frozen: list[str]
    has_tables: bool
    options: dict[str, Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model is not sharded: process groups and DDP wrappers cannot be copied."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def shard_once(
    module: nn.Module,
    group: Callable[[], dist.ProcessGroup],
    device: torch.device,
    *,
    local_size: int,
    options: Mapping[str, Any],
    ddp_kwargs: Mapping[str, Any],
) -> ShardedModel:
    """Shard the tables of ``module``, unless an earlier run has done it. A collective.

    Args:
        group: returns the group of the ranks that share the tables. TorchRec's own exchanges use it.
        local_size: ranks on this host.
        options: ``sharding``, ``optimizer`` and ``dedup`` of :func:`~lightning_freescale.embedding.shard.shard`.
        ddp_kwargs: options of the data-parallel wrapper of the dense part.
    """
    done: ShardedModel | None = getattr(module, _ATTRIBUTE, None)
    if done is not None:
        _refuse_other_options(done.options, options)
        return done
    tables = plan.embedding_modules(module)
    if not tables:
        log_once("the model has no EmbeddingCollection and no EmbeddingBagCollection, so it trains as plain DDP")
    _refuse_tied_tables(module)
    rows, frozen = plan.rows_by_feature(module), _frozen_tables(module)
    sharded = shard(module, group(), device, local_size=local_size, ddp_kwargs=ddp_kwargs, **options)
    record = ShardedModel(
        sharded=sharded,
        rows=rows,
        rates=[parameters["lr"] for parameters in sharded.fused_optimizer.param_groups],
        frozen=frozen,
        has_tables=bool(tables),
        options=dict(options),
    )
    object.__setattr__(module, _ATTRIBUTE, record)  # nn.Module must not register it as a submodule.
    return record


def was_sharded_with_tables(module: nn.Module) -> bool:
    """Whether an earlier run has sharded tables of ``module``."""
    done: ShardedModel | None = getattr(module, _ATTRIBUTE, None)
    return done is not None and done.has_tables


def _refuse_other_options(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    for name, value in new.items():
        if value != old[name]:
            option = "embedding_optimizer" if name == "optimizer" else name
            raise ConfigurationError(
                f"{option}={value!r}: this model was sharded with {option}={old[name]!r} by an earlier Trainer, and a "
                "model is sharded once. Use the same option, or create the model anew and load its weights"
            )


def _table_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {
        f"{name}.{key}" if name else key: parameter
        for name, collection in plan.embedding_modules(module).items()
        for key, parameter in collection.named_parameters()
    }


def _refuse_tied_tables(module: nn.Module) -> None:
    """Refuse a parameter of another module that shares memory with a table. Sharding would separate the two."""
    tables = _table_parameters(module)
    by_memory = {parameter.data_ptr(): name for name, parameter in tables.items() if parameter.device.type != "meta"}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        table = by_memory.get(parameter.data_ptr()) if parameter.device.type != "meta" else None
        if table is not None and name not in tables and parameter.numel():
            raise ConfigurationError(
                f"{name} is tied to the table {table}: sharding would separate the two, and they would train apart. "
                "Compute the output with rows that are looked up in the table, as a sampled softmax does, or give the "
                "layer weights of its own"
            )


def _frozen_tables(module: nn.Module) -> list[str]:
    """Names of the tables with ``requires_grad=False``."""
    return [
        name.removesuffix(".weight").rpartition(".")[2]
        for name, parameter in _table_parameters(module).items()
        if not parameter.requires_grad
    ]
