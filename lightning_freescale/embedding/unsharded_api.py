"""Lets a sharded collection be used like the unsharded one that a model was written for.

- An unsharded ``EmbeddingCollection`` returns a dictionary. TorchRec's sharded one returns an object that waits for the rows when
  they are used first. It has the methods of a dictionary, but Python looks for some of them on the class: without these,
  ``for feature in rows`` and ``"feature" in rows`` raise ``KeyError: 0``.
- An unsharded collection has methods that tell its configuration. The sharded one has none of them.
- The features of the output have another order: see ``output_order.py``.
- Forward hooks of the unsharded collection would not be called. They move to the sharded one. Other hooks are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torchrec.distributed.types import LazyAwaitable

from lightning_freescale.embedding.output_order import restore_order
from lightning_freescale.embedding.plan import is_of_a_table
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.user_code import is_of_user

# Methods without arguments. Their answers never change.
CONFIGURATION = (
    "embedding_bag_configs",
    "embedding_configs",
    "embedding_dim",
    "embedding_names_by_table",
    "is_weighted",
    "need_indices",
)

_FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_ALL_HOOKS = (*_FORWARD_HOOKS, *_BACKWARD_HOOKS)
_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a parameter


def _iter(self: LazyAwaitable[Any]) -> Iterator[Any]:
    return iter(LazyAwaitable._wait_async(self))


def _contains(self: LazyAwaitable[Any], item: Any) -> bool:
    return item in LazyAwaitable._wait_async(self)


def _len(self: LazyAwaitable[Any]) -> int:
    return len(LazyAwaitable._wait_async(self))


def _bool(self: LazyAwaitable[Any]) -> bool:
    return True  # as before: a class with a length would wait here, and be false if the length is 0


def _complete_lazy_outputs() -> None:
    """Add what is missing to TorchRec's class. A release that has it keeps its own."""
    for name, method in {"__iter__": _iter, "__contains__": _contains, "__len__": _len, "__bool__": _bool}.items():
        if name not in vars(LazyAwaitable):
            setattr(LazyAwaitable, name, method)


def refuse_lost_hooks(collections: Mapping[str, nn.Module]) -> None:
    """Raise :class:`ConfigurationError` for hooks that would not be called after ``collections`` have been sharded."""
    for name, collection in collections.items():
        for key, parameter in collection.named_parameters():
            if is_of_a_table(key) and any(_of_user(getattr(parameter, hooks, None)) for hooks in _GRADIENT_HOOKS):
                raise ConfigurationError(
                    f"{name}.{key} has a hook for its gradient, which would not be called: the rows of a table are updated "
                    "without a gradient of its weights. Put the hook on the output of the collection"
                )
        lost = ["its backward"] if any(_of_user(vars(collection)[hooks]) for hooks in _BACKWARD_HOOKS) else []
        for key, child in collection.named_modules():
            if child is collection or not is_of_a_table(f"{key}."):
                continue
            if any(_of_user(vars(child)[hooks]) for hooks in _ALL_HOOKS):
                lost.append(key)
        if lost:
            raise ConfigurationError(
                f"{name} has a hook for {lost[0]}, which would not be called after the tables are sharded. Use a forward hook "
                f"of {name} itself"
            )


def _of_user(hooks: Mapping[int, Any] | None) -> bool:
    """Whether any of ``hooks`` is the user's own. A profiler of Lightning may have some, too."""
    return any(map(is_of_user, (hooks or {}).values()))


def resemble(module: nn.Module, unsharded: Mapping[str, nn.Module]) -> None:
    """Give the sharded collections in ``module`` the output and the hooks of ``unsharded``, and its methods without arguments.

    The unsharded collections do not stay in memory.
    """
    _complete_lazy_outputs()
    for key, collection in unsharded.items():
        sharded = module.get_submodule(key)
        for name in CONFIGURATION:
            if hasattr(collection, name) and not hasattr(sharded, name):
                vars(sharded)[name] = _Answer(getattr(collection, name)())
        for name in _FORWARD_HOOKS:
            hooks = vars(collection)[name]  # the same object, so that the handles of the user still remove hooks
            hooks.update(vars(sharded)[name])
            vars(sharded)[name], vars(collection)[name] = hooks, type(hooks)()
        restore_order(sharded, collection)


class _Answer:
    def __init__(self, value: Any):
        self._value = value

    def __call__(self) -> Any:
        return self._value
