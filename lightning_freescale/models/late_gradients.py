"""Gradients of a layer's parameters that are computed after the gradient of the embeddings.

The exchange of embeddings waits for the gradient of the rows, which is the last result of a backward. The gradients of the
parameters are needed later, by the optimizer. So the first layer hands on the gradient of its input first, and computes the
gradients of its parameters while the rows travel. The values do not change.

Of all nodes that are ready, autograd runs the one that was created last. :func:`postpone` makes a node for the parameters, which
must exist before the embeddings are looked up. The node then runs when the gradient of the rows has been handed over. A further
node may follow, for work that no gradient depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]
# Whether the backward that runs has ``retain_graph=True``. A release of torch without this function never says so.
_keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: False)


class LateGradients(NamedTuple):
    """The postponed gradients of one layer in one batch.

    Args:
        ticket: ``[0]``. The layer takes it as an input, so that autograd runs the node after the backward of the layer.
        held: what computes the gradients of the parameters, from the backward of the layer until the node runs.
    """

    ticket: Tensor
    held: list[Callable[[], Gradients]]


class _LateGradients(torch.autograd.Function):
    """Its backward computes the gradients that the layer has postponed."""

    @staticmethod
    def forward(ctx: Any, held: list[Callable[[], Gradients]], followed: Tensor | None, *parameters: Tensor) -> Tensor:
        ctx.held, ctx.is_followed = held, followed is not None
        return torch.empty(0, device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        return None, grads[0] if ctx.is_followed else None, *ctx.held.pop()()


class _Afterwards(torch.autograd.Function):
    """Its backward calls a function, unless the graph is kept: then a further backward of the same batch may follow."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        if not _keeps_graph():
            ctx.call()
        return None, None


def postpone(parameters: Sequence[Tensor], then: Callable[[], None] | None = None) -> LateGradients:
    """Postpone the gradients of ``parameters``, all of which need one. Call it before the embeddings are looked up.

    ``then`` is called in the backward when autograd has accumulated them. DDP has then begun to sum them. It is not called in a
    backward with ``retain_graph=True``.
    """
    held: list[Callable[[], Gradients]] = []
    followed = None
    if then is not None:  # a leaf that needs a gradient, so that autograd calls the backward
        followed = _Afterwards.apply(torch.empty(0, device=parameters[0].device, requires_grad=True), then)
    return LateGradients(_LateGradients.apply(held, followed, *parameters), held)
