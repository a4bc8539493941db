"""Finds user code that uses the weights of a sharded table as a tensor, for example to score all items.

TorchRec keeps ``collection.embeddings["item"].weight``, but after sharding it is the part of the table that this rank holds. A
gradient that flows into it is lost, because the tables are updated with the gradients of looked-up rows only. Without a word, the
model would learn something else.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.log import log_once

INSTEAD = (
    "Look up the rows that are needed, as in 'An output layer over a table' of docs/your_own_model.md, or keep a small table "
    "that the model needs as a whole in an nn.Embedding, which every rank holds"
)


def watch_direct_use(module: nn.Module, frozen: Collection[str] = ()) -> None:
    """Refuse gradients that flow into the weights of sharded tables, and warn when user code reads a part of a table.

    Args:
        module: a model whose tables are sharded.
        frozen: names of the parameters of tables that are not trained. They need no gradient.
    """
    kernels: dict[int, Tensor] = {}  # by identity: the rows of all tables of a kernel
    trained: dict[int, dict[str, TableBatchedEmbeddingSlice]] = defaultdict(dict)
    for name, child in module.named_modules():
        if isinstance(child, ShardedEmbeddingCollection):
            parts, attribute, configs = child.embeddings, "embeddings", child._embedding_configs
        elif isinstance(child, ShardedEmbeddingBagCollection):
            parts, attribute, configs = child.embedding_bags, "embedding_bags", child._embedding_bag_configs
        else:
            continue
        shapes = {config.name: (config.num_embeddings, config.embedding_dim) for config in configs}
        for table, part in parts.items():
            if not hasattr(part.weight, "_in_backward_optimizers"):
                continue  # A data-parallel table is whole, and DDP sums its gradients.
            where = f"{name}.{attribute}[{table!r}].weight"
            if isinstance(part.weight, TableBatchedEmbeddingSlice):
                weights = part.weight._original_tensor
                kernels[id(weights)] = weights
                if f"{name}.{attribute}.{table}.weight".lstrip(".") not in frozen:
                    trained[id(weights)][where] = part.weight
            part.__class__ = _TablePart
            part.where, part.whole_shape = where, shapes[table]
    for key, weights in kernels.items():
        if weights.requires_grad and weights.is_leaf:
            weights.register_post_accumulate_grad_hook(_RefuseGradients(trained[key]))


class _RefuseGradients:
    """A hook of the weights of a kernel. FBGEMM itself computes no gradient of them, because it updates the rows.

    Args:
        tables: the parts of trained tables that the kernel holds, by their names for messages.
    """

    def __init__(self, tables: dict[str, TableBatchedEmbeddingSlice]):
        self._tables = tables

    def __call__(self, weights: Tensor) -> None:
        found = [where for where, part in self._tables.items() if part.grad is not None and torch.any(part.grad)]
        weights.grad = None  # Some models add zero times the sum of all parameters. That loses nothing.
        if found:
            raise ConfigurationError(
                f"{', '.join(found)}: the loss depends on all rows of this table, and not only on those that were looked up. "
                f"This gradient would be lost, because the table is sharded and only looked-up rows are updated. {INSTEAD}. For "
                "a penalty, there is weight_decay in embedding_optimizer"
            )


class _TablePart(nn.Module):
    """The module that holds the ``weight`` of a table. It warns when user code reads a part of a table.

    Neither TorchRec nor the methods of ``nn.Module`` that list parameters read the attribute.
    """

    where: str
    whole_shape: tuple[int, int]

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if name == "weight" and value.shape != self.whole_shape:
            log_once(
                f"{self.where}: after sharding, this is not the table of shape {list(self.whole_shape)}, but the part that this "
                f"rank holds, of shape {list(value.shape)}. {INSTEAD}",
                logging.WARNING,
                every_rank=True,
            )
        return value

    @property
    def num_embeddings(self) -> int:
        """The rows of the whole table, as of the unsharded module."""
        return self.whole_shape[0]

    @property
    def embedding_dim(self) -> int:
        return self.whole_shape[1]

    def forward(self, *_: Any, **__: Any) -> None:
        raise ConfigurationError(
            f"{self.where}: a sharded table cannot be called by itself. Call its collection with a KeyedJaggedTensor"
        )
