"""Gradients of a layer's parameters that are computed after the gradient of the embeddings.

The exchange of embeddings waits for the gradient of the rows, which is the last result of a backward. The gradients of the
parameters are needed later, by the optimizer. So the first layer hands on the gradient of its input first, and computes the
gradients of its parameters while the rows travel. The values do not change.

Of all nodes that are ready, autograd runs the one that was created last. :func:`postpone` makes a node for the parameters, which
must exist before the embeddings are looked up. The node then runs when the gradient of the rows has been handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]


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
    def forward(ctx: Any, held: list[Callable[[], Gradients]], *parameters: Tensor) -> Tensor:
        ctx.held = held
        return torch.empty(0, device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        return None, *ctx.held.pop()()


def postpone(parameters: Sequence[Tensor]) -> LateGradients:
    """Postpone the gradients of ``parameters``, all of which need one. Call it before the embeddings are looked up."""
    held: list[Callable[[], Gradients]] = []
    return LateGradients(_LateGradients.apply(held, *parameters), held)
