"""Finds tensors and jagged tensors inside a batch of any type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def parts(batch: Any, kinds: type | tuple[type, ...]) -> Iterable[Any]:
    """The objects of ``kinds`` inside a batch made of tuples, lists, mappings and plain objects such as dataclasses."""
    seen: set[int] = set()
    stack = [batch]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, kinds):
            yield item
        elif isinstance(item, Mapping):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, (list, tuple)):
            stack.extend(reversed(item))
        elif hasattr(item, "__dict__") and not isinstance(item, (Tensor, type)):
            stack.extend(reversed(list(vars(item).values())))


def tensors(batch: Any) -> Iterable[Tensor]:
    """All tensors of a batch, those inside jagged tensors too."""
    for part in parts(batch, (Tensor, KeyedJaggedTensor)):
        yield from (leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor))
