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
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule

from lightning_freescale.embedding import plan
from lightning_freescale.embedding.aliases import one_name_each, redirect_replaced
from lightning_freescale.embedding.direct_use import watch_direct_use
from lightning_freescale.embedding.mapped_ids import check_in_calls, maps_ids
from lightning_freescale.embedding.shard import shard
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.log import log_once

_ATTRIBUTE = "_freescale"


@dataclass(frozen=True)
class ShardedModel:
    """What is known about a sharded model.

    Attributes:
        sharded: TorchRec's wrapper of the model; ``None`` if the model has no tables. Such a model is left as it is.
        rows: number of rows of the table of each feature; empty if the model declares ``maps_ids = True``.
        rates: learning rate of each FBGEMM kernel before any scheduler changed it.
        frozen: names of the tables that had ``requires_grad=False``.
        has_tables: whether the model has any embedding collection.
        options: the options that the model was sharded with.
    """

    sharded: DistributedModelParallel | None
    rows: dict[str, int]
    rates: list[float]
    frozen: list[str]
    has_tables: bool
    options: dict[str, Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a model without tables has not been set up. A model with tables refuses to be copied."""

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
        options: arguments of :func:`~lightning_freescale.embedding.shard.shard`, by name.
        ddp_kwargs: options of the data-parallel wrapper of the dense part.
    """
    done: ShardedModel | None = getattr(module, _ATTRIBUTE, None)
    if done is not None and done.has_tables:
        _refuse_other_options(done.options, options)
        return done
    record = ShardedModel(sharded=None, rows={}, rates=[], frozen=[], has_tables=False, options={})
    collections = plan.embedding_modules(module)
    _refuse_wrapped(module, bool(collections))
    if collections:
        with one_name_each(module, collections):
            _refuse_tied_tables(module)
            rows, frozen = plan.rows_by_feature(module), _frozen_tables(module)
            sharded = shard(module, group(), device, local_size=local_size, ddp_kwargs=ddp_kwargs, **options)
        redirect_replaced(collections, module)
        _refuse_copies(module)
        watch_direct_use(module, frozen)
        if maps_ids(module):
            check_in_calls(module, rows)
            rows = {}
        rates = [parameters["lr"] for parameters in sharded.fused_optimizer.param_groups]
        record = ShardedModel(
            sharded=sharded, rows=rows, rates=rates, frozen=frozen, has_tables=True, options=dict(options)
        )
    else:
        log_once("the model has no EmbeddingCollection and no EmbeddingBagCollection, so it trains as plain DDP")
    object.__setattr__(module, _ATTRIBUTE, record)  # nn.Module must not register it as a submodule.
    return record


def was_sharded_with_tables(module: nn.Module) -> bool:
    """Whether an earlier run has sharded tables of ``module``."""
    done: ShardedModel | None = getattr(module, _ATTRIBUTE, None)
    return done is not None and done.has_tables


def _refuse_other_options(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    for name, value in new.items():
        if value != old[name] and repr(value) != repr(old[name]):  # TorchRec's topology has no comparison of its own.
            option = "embedding_optimizer" if name == "optimizer" else name
            raise ConfigurationError(
                f"{option}={value!r}: this model was sharded with {option}={old[name]!r} by an earlier Trainer, and a "
                "model is sharded once. Use the same option, or create the model anew and load its weights"
            )


def _refuse_wrapped(module: nn.Module, has_collections: bool) -> None:
    """Refuse models that contain what the strategy itself wraps them in."""
    for name, child in module.named_modules():
        if isinstance(child, (DistributedModelParallel, ShardedModule)):
            raise ConfigurationError(
                f"{name} is a {type(child).__name__}, but the strategy shards the tables itself. Leave DistributedModelParallel "
                "out of the model. If an earlier Trainer has sharded it in another model, load its weights from a checkpoint"
            )
        if has_collections and isinstance(child, DistributedDataParallel):
            raise ConfigurationError(
                f"{name} is a DistributedDataParallel, but the strategy wraps the model itself, and both would write to the same "
                "gradients. Leave it out"
            )


def _refuse_copies(module: nn.Module) -> None:
    """Let ``copy.deepcopy``, ``pickle`` and ``torch.save`` of a model with sharded tables say what to do instead."""

    def refuse(*_: Any) -> None:
        raise ConfigurationError(
            "a model with sharded tables can be neither copied nor pickled, because each rank holds a part of the tables. "
            "Call trainer.save_checkpoint() on all ranks and load the file with load_from_checkpoint(); if the checkpoint "
            "is a folder, turn it into a file with `freescale export`"
        )

    for child in module.modules():
        if isinstance(child, ShardedModule):  # Both modules look these methods up on the object.
            vars(child).update(__deepcopy__=refuse, __reduce_ex__=refuse)


def _table_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {
        f"{name}.{key}" if name else key: parameter
        for name, collection in plan.embedding_modules(module).items()
        for key, parameter in collection.named_parameters()
        if plan.is_of_a_table(key)
    }


def _refuse_tied_tables(module: nn.Module) -> None:
    """Refuse a parameter that shares memory with a table of another module. Sharding would separate the two."""
    by_memory: dict[int, str] = {}
    for name, parameter in _table_parameters(module).items():
        if parameter.device.type != "meta" and parameter.numel():
            by_memory.setdefault(parameter.data_ptr(), name)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        table = by_memory.get(parameter.data_ptr()) if parameter.device.type != "meta" else None
        if table is not None and name != table and parameter.numel():
            raise ConfigurationError(
                f"{name} is tied to the table {table}: sharding would separate the two, and they would train apart. "
                "Compute the output with rows that are looked up in the table, as a sampled softmax does, or give the "
                "layer weights of its own"
            )


def _frozen_tables(module: nn.Module) -> list[str]:
    """Names of the parameters of the tables with ``requires_grad=False``."""
    return [name for name, parameter in _table_parameters(module).items() if not parameter.requires_grad]
