"""Jagged ids and embedding tables in plain PyTorch, for inference without TorchRec.

They have the methods of TorchRec's classes that a model needs in ``forward``, with the same arguments and results. A table has
the same name in the state dict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PlainJagged:
    """``values [sum(lengths), ...]`` of ``B`` samples with ``lengths [B]``."""

    def __init__(self, values: Tensor, lengths: Tensor):
        self._values, self._lengths = values, lengths

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths

    def offsets(self) -> Tensor:
        return F.pad(self._lengths.cumsum(0), (1, 0))


class PlainKeyedJagged:
    """Ids by key for ``B`` samples.

    Args:
        keys: the names.
        values: int64, all ids of the first key, then of the second, and so on.
        lengths: ``[len(keys) * B]``, the number of ids of each key and sample, in the order of ``values``.
        stride: ``B``; by default it follows from the number of lengths.
        length_per_key: the number of ids of each key; by default the sum of its lengths.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        stride: int | None = None,
        length_per_key: Sequence[int] | None = None,
    ):
        self._keys, self._values, self._lengths = list(keys), values, lengths
        self._stride = len(lengths) // max(1, len(self._keys)) if stride is None else stride
        by_key = lengths.view(len(self._keys), self._stride)
        parts = values.split(by_key.sum(dim=1).tolist() if length_per_key is None else list(length_per_key))
        self._parts = {key: PlainJagged(*pair) for key, *pair in zip(self._keys, parts, by_key, strict=True)}

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths

    def stride(self) -> int:
        return self._stride

    def __getitem__(self, key: str) -> PlainJagged:
        return self._parts[key]

    def to_dict(self) -> dict[str, PlainJagged]:
        return self._parts

    def to(self, device: torch.device, non_blocking: bool = False) -> PlainKeyedJagged:
        values, lengths = (part.to(device, non_blocking=non_blocking) for part in (self._values, self._lengths))
        return PlainKeyedJagged(self._keys, values, lengths, self._stride)


@dataclass
class PlainTableConfig:
    """A table of ``num_embeddings`` rows of width ``embedding_dim`` that serves the features ``feature_names``."""

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: list[str]
    init_fn: Callable[[Tensor], Any] | None = None


class PlainTables(nn.Module):
    """Tables of type ``nn.Embedding``. A call maps each feature to the jagged rows of its ids.

    Args:
        tables: objects with the attributes of :class:`PlainTableConfig`.
        device: where the tables are; the meta device allocates nothing.
    """

    def __init__(self, tables: Sequence[Any], device: torch.device | None = None) -> None:
        super().__init__()
        self._configs = list(tables)
        self.embeddings = nn.ModuleDict()
        for config in self._configs:
            table = nn.Embedding(config.num_embeddings, config.embedding_dim, device=device)
            if config.init_fn is not None:
                config.init_fn(table.weight)
            self.embeddings[config.name] = table

    def embedding_configs(self) -> list[Any]:
        return self._configs

    def forward(self, features: Any) -> dict[str, PlainJagged]:
        found = {}
        for config in self._configs:
            weight = self.embeddings[config.name].weight
            for name in config.feature_names:
                ids = features[name]
                found[name] = PlainJagged(F.embedding(ids.values(), weight), ids.lengths())  # type: ignore[arg-type]
        return found
