"""Keeps the order of features that a sharded collection was first called with.

TorchRec works out once, at the first call, where the features of a collection are in its input. A later input with the
same keys in another order would read wrong rows without an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.runtime.errors import InputError
from lightning_freescale.runtime.log import log_once


class KeyOrder:
    """A forward pre-hook of one sharded collection: puts the features of every later call into the first order.

    Args:
        name: the name of the collection in the model.
    """

    def __init__(self, name: str):
        self._name = name
        self._keys: list[str] | None = None

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        features = args[0] if args else kwargs.get("features")
        if not isinstance(features, KeyedJaggedTensor) or features.keys() == self._keys:
            return None
        if self._keys is None:
            _refuse_missing(features, module, self._name)
            self._keys = list(features.keys())
            return None
        ordered = in_order(features, self._keys, self._name)
        return ((ordered, *args[1:]), kwargs) if args else (args, {**kwargs, "features": ordered})


def _refuse_missing(features: KeyedJaggedTensor, collection: nn.Module, name: str) -> None:
    """Raise :class:`InputError` if ``features`` lack one that a table of ``collection`` needs."""
    configs: Any = getattr(collection, "_embedding_configs", None) or getattr(collection, "_embedding_bag_configs", ())
    needed, found = [feature for config in configs for feature in config.feature_names], list(features.keys())
    if missing := [feature for feature in needed if feature not in found]:
        raise InputError(
            f"{name}: the input has no feature {missing[0]!r}; its tables need {', '.join(needed)}, this input has "
            f"{', '.join(found)}. A feature without ids has lengths of 0"
        )


def in_order(features: KeyedJaggedTensor, keys: list[str], name: str) -> KeyedJaggedTensor:
    """``features`` with exactly ``keys``, in this order. Raises :class:`InputError` if a key is missing."""
    found = list(features.keys())
    if missing := [key for key in keys if key not in found]:
        raise InputError(
            f"{name}: the input has no feature {missing[0]!r}; its first input had {', '.join(keys)}, this one has "
            f"{', '.join(found)}"
        )
    log_once(f"{name}: a batch has its features in another order than the first one; they are put into that order")
    return features.permute([found.index(key) for key in keys])


def keep_key_order(collections: Iterable[tuple[str, nn.Module]]) -> None:
    """Let every collection accept its features in any order."""
    for name, collection in collections:
        collection.register_forward_pre_hook(KeyOrder(name), with_kwargs=True)
