"""Lets a sharded collection return its features in the order of the unsharded one.

TorchRec orders the output of a sharded collection by sharding type and by groups of equal tables. A model that uses all features
at once, for example ``bags.values()`` in a DLRM, would learn its dense weights for that order. It would be wrong for a checkpoint
that is loaded without sharding, or on a number of ranks for which the tables are sharded in another way.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedTensor

from lightning_freescale.embedding.plan import Collection, table_configs

_COLLECTIONS = (ShardedEmbeddingCollection, ShardedEmbeddingBagCollection)


def restore_order(sharded: nn.Module, unsharded: Collection) -> None:
    """Let ``sharded`` return its features in the order of ``unsharded``. It does nothing if the two orders are equal."""
    wanted = _names(unsharded)
    if _sharded_names(sharded) == wanted:
        return

    @torch.compiler.disable
    def reorder(module: nn.Module, args: Any, output: Any) -> None:
        output.callbacks.append(lambda arrived: in_order(arrived, wanted))

    sharded.register_forward_hook(reorder, prepend=True)  # before hooks of the user, which may use the output


def in_order(output: Any, names: list[str]) -> Any:
    """``output`` with its features in the order of ``names``.

    Args:
        output: bags as a ``KeyedTensor``, or rows by feature.
        names: all features of ``output``.
    """
    if not isinstance(output, KeyedTensor):
        return {name: output[name] for name in names}
    keys, dim = output.keys(), output.key_dim()
    parts = dict(zip(keys, output.values().split(output.length_per_key(), dim), strict=True))
    lengths = dict(zip(keys, output.length_per_key(), strict=True))
    values = torch.cat([parts[name] for name in names], dim)
    return KeyedTensor(names, [lengths[name] for name in names], values, dim)


def _names(unsharded: Collection) -> list[str]:
    """The features of the output of an unsharded collection: those of the first table, then those of the second one, ..."""
    return list(chain.from_iterable(get_embedding_names_by_table(table_configs(unsharded))))


def _sharded_names(sharded: Any) -> list[str]:
    """The features of the output of a sharded collection, in TorchRec's order."""
    parts = [part for part in sharded.modules() if isinstance(part, _COLLECTIONS)]  # itself, or the one inside it
    if isinstance(parts[0], ShardedEmbeddingBagCollection):
        return list(parts[0]._embedding_names)
    return list(chain.from_iterable(parts[0]._embedding_names_per_sharding))
