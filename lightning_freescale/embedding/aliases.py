"""Collections that a model refers to by several names, for example ``self.items = self.encoder.items``.

Sharding replaces the collection at one of these names. All others must refer to the sharded collection afterwards, also a plain
list, which ``nn.Module`` does not see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn


class _Reference(NamedTuple):
    """``parent.name``."""

    parent: nn.Module
    name: str

    @property
    def child(self) -> nn.Module | None:
        return self.parent._modules[self.name]

    def set(self, child: nn.Module | None) -> None:
        self.parent._modules[self.name] = child  # keeps the order of the children


@contextmanager
def one_name_each(module: nn.Module, collections: Mapping[str, nn.Module]) -> Iterator[None]:
    """Hide further names of ``collections``, and of modules that contain them, inside the ``with`` block.

    TorchRec, DDP and the search for tied weights then see each collection once. At the end, each hidden name refers to what its
    first name refers to.

    Args:
        collections: the collections by their first name in ``module``.
    """
    hidden = _further_references(module, {id(collection) for collection in collections.values()})
    for reference, _ in hidden:
        reference.set(nn.Identity())
    try:
        yield
    finally:
        for reference, first in hidden:
            reference.set(first.child)


def _further_references(module: nn.Module, collections: set[int]) -> list[tuple[_Reference, _Reference]]:
    """All references to collections, or to modules that contain one, after the first one; each with the first one."""
    first: dict[int, _Reference] = {}
    further = []

    def visit(
        parent: nn.Module,
    ) -> None:  # in the order of ``named_modules``, which names a module by its first reference
        for name, child in parent._modules.items():
            if child is None:
                continue
            reference = _Reference(parent, name)
            if id(child) not in first:
                first[id(child)] = reference
                visit(child)
            elif any(id(part) in collections for part in child.modules()):
                further.append((reference, first[id(child)]))

    visit(module)
    return further


def redirect_replaced(collections: Mapping[str, nn.Module], module: nn.Module) -> None:
    """Let collections that sharding has replaced lead to the sharded ones. A list or a function may still hold them.

    Their own tables are not trained any more. They are released.
    """
    for name, collection in collections.items():
        sharded = module.get_submodule(name)
        if sharded is collection:
            continue
        vars(collection)["forward"] = sharded
        for attribute in ("embeddings", "embedding_bags"):
            if attribute in collection._modules:
                collection._modules[attribute] = sharded._modules[attribute]
