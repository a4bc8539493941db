"""What the tables' fused optimizer remembers, per-row state and how many steps it has counted; and its learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule


def optimizer_tensors(sharded: DistributedModelParallel) -> dict[str, Any]:
    """Per-row optimizer state by name, as sharded tensors that share memory with the kernels.

    Only of tables this rank holds a part of: with table-wise sharding that may be none.
    """
    return {
        f"{table}.{name}": value
        for table, entry in sharded.fused_optimizer.state_dict()["state"].items()
        for name, value in entry.items()
        if hasattr(value, "local_shards")
    }


def kernels_of(module: nn.Module) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """FBGEMM's kernels of one sharded collection on this rank."""
    return [kernel for lookup in getattr(module, "_lookups", ()) for kernel in kernels_in(lookup)]


def kernels_in(lookup: nn.Module) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """The kernels of one of its lookups, one for each group of tables."""
    return [child for child in lookup.modules() if isinstance(child, SplitTableBatchedEmbeddingBagsCodegen)]


def _kernels(module: nn.Module) -> Iterator[tuple[str, SplitTableBatchedEmbeddingBagsCodegen]]:
    """All kernels on this rank, each with the qualified name of its collection."""
    for name, child in module.named_modules():
        if isinstance(child, ShardedModule):
            yield from ((name, kernel) for kernel in kernels_of(child))


def steps(module: nn.Module) -> dict[str, int]:
    """Steps counted by the kernels of each collection (Adam corrects its bias by them). Reads the host's copy: no sync."""
    counted: dict[str, int] = {}
    for name, kernel in _kernels(module):
        counted[name] = max(counted.get(name, 0), int(kernel.iter_cpu))
    return counted


def steps_of_all_ranks(module: nn.Module, gather: Callable[[Any], list[Any]]) -> dict[str, int]:
    """:func:`steps`, also of collections this rank holds no table of. A collective."""
    parts = gather(steps(module))
    return {name: max(part.get(name, 0) for part in parts) for part in parts for name in part}


def set_steps(module: nn.Module, counted: Mapping[str, int]) -> None:
    """Let the kernels go on counting from ``counted``. They count every lookup, those of validation too."""
    for name, kernel in _kernels(module):
        if name in counted:
            kernel.iter_cpu.fill_(counted[name])
            kernel.iter.fill_(counted[name])


def follow_learning_rate(fused: Any, base: Sequence[float], dense: torch.optim.Optimizer) -> None:
    """Give the tables the relative learning rate of ``dense``. FBGEMM reads the rate in forward.

    Args:
        fused: optimizer of the tables; ``base`` are the rates that its groups began with.
        dense: the model's first optimizer, which a scheduler may drive.
    """
    if not base:
        return
    group = dense.param_groups[0]
    initial = group.get("initial_lr", group["lr"])
    scale = group["lr"] / initial if initial else 1.0
    for own, rate in zip(fused.param_groups, base, strict=True):
        own["lr"] = rate * scale
    fused.step()  # hands the rate to the kernels, changes no weight
