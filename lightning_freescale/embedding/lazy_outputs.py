"""Lets the output of a sharded ``EmbeddingCollection`` be used like the dictionary that an unsharded one returns.

TorchRec returns an object that waits for the rows when they are used first. It has the methods of a dictionary, but Python looks
for some of them on the class: without these, ``for feature in rows`` and ``"feature" in rows`` raise ``KeyError: 0``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchrec.distributed.types import LazyAwaitable


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
