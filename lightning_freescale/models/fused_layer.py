"""The layers of HSTU on CUDA as functions with their own backward pass, which pass over memory less often than their parts would.

:mod:`.layer_passes` has the two passes of a layer. In a training the kernels of a pass start as one CUDA graph
(:mod:`.layer_graphs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_freescale.models import elementwise_triton
from lightning_freescale.models.attention import cuda
from lightning_freescale.models.elementwise_triton import SUM_PROGRAMS
from lightning_freescale.models.last_event_triton import last_unit_rows
from lightning_freescale.models.late_gradients import postpone
from lightning_freescale.models.layer_graphs.layer import LayerGraph
from lightning_freescale.models.layer_graphs.model import begin_batch
from lightning_freescale.models.layer_passes import (
    KeptRows,
    LayerBatch,
    LayerShape,
    LayerWeights,
    backward_pass,
    forward_pass,
    norm_backward,
    parameter_gradients,
)
from lightning_freescale.models.norm_triton import Drop
from lightning_freescale.models.sequences import Attention
from lightning_freescale.models.tiles import unit_stride


class Summands(NamedTuple):
    """The output of a layer that has not been added up: ``x + branch + shift``.

    Args:
        x: ``[N, D]``, the input of the layer.
        branch: ``[N, D]`` of the type of autocast, what the layer computed.
        shift: ``[D]``, bias of the last linear map of the layer.
        place: where the layer reads the gradient of the branch, if it has such a place.
    """

    x: Tensor
    branch: Tensor
    shift: Tensor
    place: Tensor | None = None

    def total(self) -> Tensor:
        """The sum, of the type of ``x``."""
        return _Sum.apply(*self)

    def last_unit_rows(self, ends: Tensor) -> Tensor:
        """The rows ``ends [B] - 1`` of the sum, each scaled to length 1: ``[B, D]`` float32, without a gradient."""
        return last_unit_rows(self.x, self.branch, self.shift, ends)


class _Sum(torch.autograd.Function):
    """:meth:`Summands.total` with its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, shift: Tensor, place: Tensor | None) -> Tensor:
        ctx.dtype, ctx.place = branch.dtype, place
        return elementwise_triton.add(x, branch, shift)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dout = unit_stride(grads[0])
        shares = torch.zeros(SUM_PROGRAMS, dout.shape[1], device=dout.device)
        return dout, elementwise_triton.round_and_sum(dout, ctx.dtype, shares, ctx.place), shares.sum(0), None


class _FusedLayer(torch.autograd.Function):
    """One layer. It takes the summands of its input and returns their sum and its own branch, without the bias ``b2``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        shift: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor,
        w1: Tensor,
        b1: Tensor,
        position_bias: Tensor | None,
        time_bias: Tensor | None,
        attention_weight: Tensor,
        attention_bias: Tensor,
        w2: Tensor,
        shape: LayerShape,
        batch: LayerBatch,
        rounded: list[Tensor | None],
        held: list[Any] | None,
        ticket: Tensor | None,
        graph: LayerGraph | None,
    ) -> tuple[Tensor, Tensor]:
        given = w1, b1, w2
        w1, b1, w2 = (x.to(shape.dtype) if y is None else y for x, y in zip(given, rounded, strict=True))
        norms, biases = (norm_weight, norm_bias), (position_bias, time_bias)
        weights = LayerWeights(*norms, w1, b1, *biases, attention_weight, attention_bias, w2)
        before = x, branch, shift
        ctx.shape, ctx.batch, ctx.joined, ctx.held = shape, batch, branch is not None, held
        ctx.graph, ctx.turn = graph, None
        if graph is not None and graph.runs():
            ctx.save_for_backward(norm_weight, norm_bias, *biases, attention_weight, attention_bias)
            ctx.parameters = *norms, *given[:2], *biases, attention_weight, attention_bias, given[2], shift
            ctx.turn, total, out = graph.run_forward(x, branch, batch.drop)
            return total, out
        kept, out = forward_pass(before, weights, shape, batch)
        ctx.save_for_backward(*weights, *kept)
        if graph is not None:
            graph.capture_forward(before, weights, shape, batch)
        return kept.total, out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shape: LayerShape = ctx.shape
        dtotal, dbranch, saved, graph = unit_stride(grads[0]), grads[1], ctx.saved_tensors, ctx.graph
        place, turn = None, ctx.turn
        if turn is not None:
            kept, found, dbranch, place = graph.run_backward(turn, dbranch)
        else:
            if graph is not None:
                graph.check_captured()
            count = len(LayerWeights._fields)
            weights, kept = LayerWeights(*saved[:count]), KeptRows(*saved[count:])
            found = backward_pass(kept, weights, shape, ctx.batch, dbranch)
            if graph is not None:
                graph.capture_backward(weights, shape, ctx.batch)
        dx, dbefore = norm_backward(found, kept, saved[:2], shape, dtotal, ctx.joined, place)

        def compute() -> list[Tensor | None]:
            if turn is not None and graph.parameters is not None:
                return graph.run_parameters(ctx.parameters)
            own = found
            if turn is not None:  # the tables of a graph are written again by the next batch
                own = found._replace(dbiases=tuple(x if x is None else x.clone() for x in found.dbiases))
            computed = parameter_gradients(own, kept, dbranch, shape)
            if turn is None and graph is not None:
                graph.capture_parameters(shape)
            return computed

        if ctx.held is None:
            *dparameters, dshift = compute()
        else:
            ctx.held[:] = [lambda: [x for x in compute()[:-1] if x is not None]]
            dparameters, dshift = [None] * len(LayerWeights._fields), None
        before = (dx if dbefore is None else dbefore, dshift) if ctx.joined else (None, None)
        ticket = None if ctx.held is None else dx.new_empty(0)
        return dx, *before, *dparameters, None, None, None, None, ticket, None


@torch.no_grad()
def round_weights(
    layers: Iterable[Any], plan: cuda.CudaPlan, dtype: torch.dtype, rounded: list[Tensor] | None = None
) -> None:
    """Convert the weights of all linear maps of ``layers`` to ``dtype`` in one launch, for :func:`fused_layer` of this batch.

    ``rounded`` receives them, three of each layer, if it is given. Then all weights must have another type than ``dtype``.
    """
    weights = [x for layer in layers for x in (layer.f1.weight, layer.f1.bias, layer.f2.weight) if x.dtype != dtype]
    if weights:
        if rounded is None:
            rounded = [torch.empty(x.shape, dtype=dtype, device=x.device) for x in weights]
        torch._foreach_copy_(rounded, weights)
        plan.rounded.update({(id(x), dtype): y for x, y in zip(weights, rounded, strict=True)})


def postpone_gradients(first: Any, plan: cuda.CudaPlan, then: Callable[[], None] | None = None) -> None:
    """Postpone the gradients of the parameters of the ``first`` layer in this batch, and call ``then`` after them.

    See :mod:`.late_gradients`. Nothing is postponed, and ``then`` is not called, if one of the parameters needs no gradient.
    """
    norm, f1, attention_norm = first.norm, first.f1, first.attention_norm
    biases = first.position_bias, first.time_bias
    weights = LayerWeights(
        *(norm.weight, norm.bias, f1.weight, f1.bias, *biases),
        *(attention_norm.weight, attention_norm.bias, first.f2.weight),
    )
    parameters = [x for x in weights if x is not None]
    if all(x.requires_grad for x in parameters):
        plan.late[id(f1.weight)] = postpone(parameters, then)


def plan_layers(
    layers: Sequence[Any], plan: cuda.CudaPlan, dtype: torch.dtype, drops: bool = False, graphs: bool = False
) -> None:
    """Compute what ``layers`` need of a batch in a training, beside their parameters and their input.

    Args:
        layers: all layers of a model.
        plan: the plan of the attention of the batch.
        dtype: type of the arrays between the products.
        drops: whether anything is dropped.
        graphs: run the layers as CUDA graphs where that is possible (:mod:`.layer_graphs`).
    """
    first = layers[0]
    _, v_columns, q_columns, _ = first.split
    widths, biases = (q_columns // first.heads, v_columns // first.heads), None
    if first.position_bias is not None:
        biases = first.position_bias, first.time_bias
    maps = _linear_maps(layers)
    if graphs and all(x.dtype == torch.float32 != dtype for weights in maps for x in weights):
        plan.graphs = begin_batch(layers, plan, dtype, drops) if plan.selects_hopper(dtype, *widths, biases) else None
    plan.prepare(dtype, *widths, biases)


def prepare_layers(
    layers: Sequence[Any],
    plan: cuda.CudaPlan,
    drops: bool = False,
    graphs: bool = False,
    planned: bool = False,
    then: Callable[[torch.dtype], None] | None = None,
) -> None:
    """Compute what ``layers`` need of a batch before their input exists. For inference it does nothing.

    Args:
        layers: all layers of a model.
        plan: the plan of the attention of the batch.
        drops: whether anything is dropped.
        graphs: run the layers as CUDA graphs where that is possible (:mod:`.layer_graphs`).
        planned: whether :func:`plan_layers` has been called.
        then: called at the end of the backward, with the type of the arrays between the products.
    """
    if not torch.is_grad_enabled():
        return
    first, rounded = layers[0], None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else first.f1.weight.dtype
    if not planned:
        plan_layers(layers, plan, dtype, drops, graphs)
    if plan.graphs is not None:
        rounded = plan.graphs.rounded(_linear_maps(layers), dtype)
    round_weights(layers, plan, dtype, rounded)
    postpone_gradients(first, plan, None if then is None else partial(then, dtype))


def _linear_maps(layers: Sequence[Any]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The parameters of each layer that have the type of autocast in its products."""
    return [(layer.f1.weight, layer.f1.bias, layer.f2.weight) for layer in layers]


def fused_layer(
    x: Tensor | Summands,
    norm: nn.LayerNorm,
    f1: nn.Linear,
    biases: tuple[Tensor | None, Tensor | None],
    attention_norm: nn.LayerNorm,
    f2: nn.Linear,
    heads: int,
    split: list[int],
    plan: cuda.CudaPlan,
    drop: Drop | None,
    arranged: Attention | None = None,
) -> Summands:
    """The output of a layer.

    Args:
        x: ``[N, D]``, not empty, or the output of the layer before.
        norm: norm of the input.
        f1: projection to the gate, values, queries and keys, whose columns are ``split``.
        biases: tables of the relative bias of position and time, or twice nothing.
        attention_norm: norm of the attention output.
        f2: projection of the gated attention output.
        heads: attention heads.
        split: columns of the gate, the values, the queries and the keys.
        plan: result of :func:`~lightning_freescale.models.attention.plan_attention`.
        drop: dropout of the gated attention output.
        arranged: the attention if its rows are not those of ``x``: with personal tokens. There is a backward pass if it has
            ``differentiable_when_fused``.
    """
    before = (x.x, x.branch, x.shift) if isinstance(x, Summands) else (x.contiguous(), None, None)
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else before[0].dtype
    alpha = (split[2] // heads) ** -0.5
    shape = LayerShape(heads, split, norm.eps, attention_norm.eps, alpha, dtype)
    parameters = (
        *(norm.weight, norm.bias, f1.weight, f1.bias, *biases),
        *(attention_norm.weight, attention_norm.bias, f2.weight),
    )
    rounded = [plan.rounded.get((id(weight), dtype)) for weight in (f1.weight, f1.bias, f2.weight)]
    late = plan.late.pop(id(f1.weight), None)  # A layer that runs twice has a gradient of its own each time.
    assert late is None or not isinstance(x, Summands), "the gradient of the summands cannot be postponed"
    ticket, held = (None, None) if late is None else late
    graph = None
    if plan.graphs is not None and arranged is None and torch.is_grad_enabled():
        weights = LayerWeights(*parameters)
        w1, b1, w2 = (x if y is None else y for x, y in zip((weights.w1, weights.b1, weights.w2), rounded, strict=True))
        graph = plan.graphs.take(f1.weight, before, weights._replace(w1=w1, b1=b1, w2=w2), shape, drop)
    batch = LayerBatch(plan, drop, arranged)
    total, branch = _FusedLayer.apply(*before, *parameters, shape, batch, rounded, held, ticket, graph)
    return Summands(total, branch, f2.bias, None if graph is None else graph.place())
