"""Lets a sharded collection be used like the unsharded one that a model was written for.

- An unsharded ``EmbeddingCollection`` returns a dictionary. TorchRec's sharded one returns an object that waits for the rows when
  they are used first. It has the methods of a dictionary, but Python looks for some of them on the class: without these,
  ``for feature in rows`` and ``"feature" in rows`` raise ``KeyError: 0``.
- An unsharded collection has methods that tell its configuration. The sharded one has none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torchrec.distributed.types import LazyAwaitable

# Methods without arguments. Their answers never change.
CONFIGURATION = (
    "embedding_bag_configs",
    "embedding_configs",
    "embedding_dim",
    "embedding_names_by_table",
    "is_weighted",
    "need_indices",
)


def _iter(self: LazyAwaitable[Any]) -> Iterator[Any]:
    return iter(LazyAwaitable._wait_async(self))


def _contains(self: LazyAwaitable[Any], item: Any) -> bool:
    return item in LazyAwaitable._wait_async(self)


def _len(self: LazyAwaitable[Any]) -> int:
    return len(LazyAwaitable._wait_async(self))


def _bool(self: LazyAwaitable[Any]) -> bool:
    return True  # as before: a class with a length would wait here, and be false if the length is 0


def complete_lazy_outputs() -> None:
    """Add what is missing to TorchRec's class. A release that has it keeps its own."""
    for name, method in {"__iter__": _iter, "__contains__": _contains, "__len__": _len, "__bool__": _bool}.items():
        if name not in vars(LazyAwaitable):
            setattr(LazyAwaitable, name, method)


def keep_configuration(unsharded: nn.Module, sharded: nn.Module) -> None:
    """Give ``sharded`` the methods of ``unsharded`` that tell its configuration. They do not keep ``unsharded`` in memory."""
    for name in CONFIGURATION:
        if hasattr(unsharded, name) and not hasattr(sharded, name):
            vars(sharded)[name] = _Answer(getattr(unsharded, name)())


class _Answer:
    def __init__(self, value: Any):
        self._value = value

    def __call__(self) -> Any:
        return self._value
