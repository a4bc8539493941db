"""Sees backwards that run through a look-up. Finds models that run several of them, for example one for each of two losses.

TorchRec updates the tables in every backward. The prioritized exchange has only one update in a step, so it must know such
models before it starts. Its first steps are synchronous, and there the backwards are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedTensor


def watch_backwards(output: Any, on_second: Callable[[], None]) -> None:
    """Call ``on_second`` in each backward after the first one that runs through ``output`` and so updates the tables.

    All ranks find the same: every such backward exchanges gradients with all of them. A backward that stops at the rows, as
    ``torch.autograd.grad(loss, rows)`` does, updates nothing and is not counted.

    Args:
        output: what a sharded collection returned in a synchronous call. It may still be on its way.
        on_second: is called in the thread of the backward.
    """
    backwards: set[int] = set()

    def count() -> None:
        backwards.add(torch._C._current_graph_task_id())  # the features of one backward have the same number
        if len(backwards) > 1:
            on_second()

    on_backward(output, count)


def on_backward(output: Any, call: Callable[[], Any], before: Callable[[], Any] | None = None) -> None:
    """Call ``call`` in each backward that runs through ``output``, before it updates the tables. It may be called several times.

    Args:
        output: what a sharded collection returned. It may still be on its way.
        call: is called in the thread of the backward. An error that it raises ends the backward.
        before: is called when ``output`` arrives, if a backward can run through it.
    """

    def ignore_gradients(_: Any) -> None:
        call()

    def watch(arrived: Any) -> Any:
        nodes = {tensor.grad_fn for tensor in _tensors(arrived)} - {None}
        if nodes and before is not None:
            before()
        for node in nodes:
            assert node is not None
            node.register_prehook(ignore_gradients)  # a hook of the tensor would also see backwards that stop there
        return arrived

    output.callbacks.append(watch)


def _tensors(arrived: Any) -> list[Tensor]:
    """Bags, or the rows of each feature."""
    if isinstance(arrived, KeyedTensor):
        return [arrived.values()]
    return [rows.values() for rows in arrived.values()]
