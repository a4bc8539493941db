"""Finds tensors and jagged tensors inside a batch of any type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def find_parts(batch: Any, kinds: type | tuple[type, ...]) -> Iterable[Any]:
    """Yield the objects of type ``kinds`` inside ``batch``, each object once, in the order of the batch's fields.

    Args:
        batch: any nesting of tuples, lists, mappings and plain objects such as dataclasses.
        kinds: the type, or types, to find. The search does not look inside an object that it yields.
    """
    seen: set[int] = set()
    stack = [batch]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, kinds):
            yield item
        elif item is None or isinstance(item, (Tensor, type)):  # first, because the next test takes long
            continue
        elif isinstance(item, Mapping):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, (list, tuple)):
            stack.extend(reversed(item))
        elif hasattr(item, "__dict__"):
            stack.extend(reversed(list(vars(item).values())))


def find_tensors(batch: Any) -> Iterable[Tensor]:
    """Yield all tensors of a batch, including those inside jagged tensors."""
    for part in find_parts(batch, (Tensor, KeyedJaggedTensor)):
        yield from (leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor))
