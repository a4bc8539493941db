"""Finds tensors and jagged tensors inside a batch of any type."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

_LEAVES = frozenset({type(None), bool, int, float, str, bytes, Tensor})  # They hold no other parts.


def find_parts(batch: Any, kinds: type | tuple[type, ...]) -> Iterable[Any]:
    """Yield the objects of type ``kinds`` inside ``batch``, each object once, in the order of the batch's fields.

    Args:
        batch: any nesting of tuples, lists, mappings and plain objects such as dataclasses.
        kinds: the type, or types, to find. The search does not look inside an object that it yields.
    """
    exact = kinds if isinstance(kinds, tuple) else (kinds,)
    skipped = _LEAVES.difference(exact)
    seen: set[int] = set()
    stack = [batch]
    while stack:
        item = stack.pop()
        # The exact types come first, because the test for an abstract class such as KeyedJaggedTensor takes long.
        kind, key = type(item), id(item)
        if kind in skipped or key in seen:
            continue
        seen.add(key)
        if kind in exact or isinstance(item, kinds):
            yield item
            continue
        if isinstance(item, (Tensor, type)):
            continue
        if isinstance(item, (list, tuple)):
            held: Any = item
        elif isinstance(item, Mapping):
            held = item.values()
        else:
            held = attributes(item).values()
        stack += [part for part in held if type(part) not in skipped][::-1]


def attributes(item: Any) -> dict[str, Any]:
    """The attributes of an object by name, also those of a class with ``__slots__``."""
    slots = (name for kind in type(item).__mro__ for name in _names(kind.__dict__.get("__slots__", ())))
    return {name: getattr(item, name) for name in slots if hasattr(item, name)} | getattr(item, "__dict__", {})


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else (name for name in slots if not name.startswith("__"))


def find_tensors(batch: Any) -> Iterable[Tensor]:
    """Yield all tensors of a batch, including those inside jagged tensors."""
    for part in find_parts(batch, (Tensor, KeyedJaggedTensor)):
        if isinstance(part, Tensor):
            yield part
        else:
            yield from (leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor))


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a dense tensor in host memory, ``[n]``. They are a copy if the tensor is not contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy()


def checksum(tensor: Tensor) -> int:
    """A checksum of the bytes of a dense tensor in host memory, equal in all processes."""
    return zlib.crc32(bytes_of(tensor))
