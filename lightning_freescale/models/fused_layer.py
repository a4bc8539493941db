"""The layers of HSTU on CUDA as functions with their own backward pass, which pass over memory less often than their parts would.

A layer adds its result to its input. Here the next layer does that, as part of its norm, so a layer returns the two summands.
Beside the attention and the products, forward then passes over the rows three times: the sum and its norm; the SiLU of queries,
keys and values; the norm of the attention output times the SiLU of the gate, with dropout. Backward has one pass for each, and
that of the sum also rounds the gradient for the products of the layer before. The gradients of the four parts of the projection
are written side by side: nothing is concatenated. All arrays between the products have the type of autocast.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_freescale.models import elementwise_triton
from lightning_freescale.models.attention import cuda, hopper
from lightning_freescale.models.elementwise_triton import SUM_PROGRAMS
from lightning_freescale.models.last_event_triton import last_unit_rows
from lightning_freescale.models.late_gradients import postpone
from lightning_freescale.models.norm_triton import PROGRAMS, Drop, Join, Norm
from lightning_freescale.models.sequences import Attention
from lightning_freescale.models.tiles import unit_stride


class LayerShape(NamedTuple):
    """What a layer computes, beside its parameters."""

    heads: int
    split: list[int]  # columns of the projection: the gate, values, queries, keys
    norm_eps: float
    attention_eps: float
    alpha: float  # scale of the scores
    dtype: torch.dtype  # of the arrays between the products

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, ``[N, H, D]`` each, as views of the columns of ``x`` behind those of the gate."""
        parts, column = [], x.storage_offset()
        for columns in self.split[1:]:  # one operation for each part; to split and to unflatten are two
            width = columns // self.heads
            parts.append(x.as_strided((x.shape[0], self.heads, width), (x.stride(0), width, 1), column))
            column += columns
        v, q, k = parts
        return q, k, v


class Summands(NamedTuple):
    """The output of a layer that has not been added up: ``x + branch + shift``.

    Args:
        x: ``[N, D]``, the input of the layer.
        branch: ``[N, D]`` of the type of autocast, what the layer computed.
        shift: ``[D]``, bias of the last linear map of the layer.
    """

    x: Tensor
    branch: Tensor
    shift: Tensor

    def total(self) -> Tensor:
        """The sum, of the type of ``x``."""
        return _Sum.apply(*self)

    def last_unit_rows(self, ends: Tensor) -> Tensor:
        """The rows ``ends [B] - 1`` of the sum, each scaled to length 1: ``[B, D]`` float32, without a gradient."""
        return last_unit_rows(*self, ends)


class _Sum(torch.autograd.Function):
    """:meth:`Summands.total` with its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, shift: Tensor) -> Tensor:
        ctx.dtype = branch.dtype
        return elementwise_triton.add(x, branch, shift)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dout = unit_stride(grads[0])
        shares = torch.zeros(SUM_PROGRAMS, dout.shape[1], device=dout.device)
        return dout, elementwise_triton.round_and_sum(dout, ctx.dtype, shares), shares.sum(0)


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
        plan: cuda.CudaPlan,
        drop: Drop | None,
        arranged: Any,
        rounded: list[Tensor | None],
        held: list[Any] | None,
        ticket: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        dtype, gates = shape.dtype, shape.split[0]
        w1, b1, w2 = (x.to(dtype) if y is None else y for x, y in zip((w1, b1, w2), rounded, strict=True))
        join = None if branch is None or shift is None else Join(branch, shift, torch.empty_like(x))
        normed = Norm(norm_weight, norm_bias, shape.norm_eps).forward(x, None, dtype, join)
        x = x if join is None else join.total
        projected = F.linear(normed, w1, b1)
        gate, rest = projected[:, :gates], projected[:, gates:]
        state = None if arranged is None else arranged.take_state()
        active = elementwise_triton.silu(rest) if state is None else state.silu(rest)
        biases = None if position_bias is None or time_bias is None else (position_bias, time_bias)
        qkv = shape.qkv(active)
        if arranged is not None:
            qkv = arranged.arrange(*qkv)
        attended = cuda.forward(*qkv, biases, shape.alpha, plan).flatten(1)
        if arranged is not None:
            attended = arranged.collect(attended)
        gated_norm = Norm(attention_weight, attention_bias, shape.attention_eps, True, drop)
        gated = gated_norm.forward(attended, gate, dtype)
        norms = norm_weight, norm_bias, attention_weight, attention_bias
        ctx.save_for_backward(x, normed, projected, active, attended, gated, w1, w2, *norms, position_bias, time_bias)
        ctx.shape, ctx.plan, ctx.drop, ctx.arranged, ctx.joined = shape, plan, drop, arranged, join is not None
        ctx.held = held
        return x, gated @ w2.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, normed, projected, active, attended, gated, w1, w2, *tables = ctx.saved_tensors
        norm_weight, norm_bias, attention_weight, attention_bias, position_bias, time_bias = tables
        shape: LayerShape = ctx.shape
        (gates, *_), dtotal, dbranch = shape.split, unit_stride(grads[0]), grads[1]
        # One sum over the programs at the end gives all gradients that are sums over the rows.
        columns = [3 * gates, projected.shape[1] - gates, 3 * x.shape[1]]
        shares = torch.zeros(max(PROGRAMS, SUM_PROGRAMS, hopper.SILU_BLOCKS), sum(columns), device=x.device)
        gate_shares, rest_shares, norm_shares = shares.split(columns, 1)

        dprojected = torch.empty_like(projected)
        drest = dprojected[:, gates:]
        biases = None if position_bias is None else (position_bias, time_bias)
        qkv, arranged = shape.qkv(active), ctx.arranged
        if arranged is not None:  # the copies of rows are made again, so that they need no memory between the passes
            qkv = arranged.arrange(*qkv)
        factor = cuda.gradient_factor(*qkv, biases, ctx.plan)
        dattended = (
            Norm(attention_weight, attention_bias, shape.attention_eps, True, ctx.drop)
            .backward(
                attended,
                projected[:, :gates],
                dbranch @ w2,
                gate_shares,
                dgate=dprojected[:, :gates],
                factor=factor if arranged is None or factor is None else arranged.collect(factor),
            )
            .unflatten(1, (shape.heads, -1))
        )
        dqkv, silu = shape.qkv(drest), None
        if arranged is None and ctx.plan.runs_hopper(*qkv, biases):
            v_shares, q_shares, k_shares = rest_shares.split(shape.split[1:], 1)
            silu = hopper.Silu(shape.qkv(projected[:, gates:]), (q_shares, k_shares, v_shares))
        if arranged is None:
            dbiases = cuda.backward(*qkv, biases, shape.alpha, ctx.plan, dattended, dqkv, silu)
        else:
            dcopies = torch.empty_like(qkv[0]), torch.empty_like(qkv[1]), torch.empty_like(qkv[2])
            dbiases = cuda.backward(*qkv, biases, shape.alpha, ctx.plan, arranged.collect_backward(dattended), dcopies)
            for part, copied in zip(dqkv, dcopies, strict=True):
                part.copy_(arranged.arrange_backward(copied))
        if silu is None:
            elementwise_triton.silu_backward_(projected[:, gates:], drest, rest_shares)
        norm, dbefore = Norm(norm_weight, norm_bias, shape.norm_eps), None
        if ctx.joined and shape.dtype != x.dtype:
            dbefore = torch.empty(x.shape, dtype=shape.dtype, device=x.device)
        dx = norm.backward(x, None, dprojected @ w1, norm_shares, added=dtotal, rounded=dbefore)
        # The last third of the gate's shares and those of the rest are the bias of the whole projection.
        sizes = [gates, gates, projected.shape[1], *(x.shape[1] for _ in range(3))]
        compute = functools.partial(_parameter_gradients, dprojected, normed, dbranch, gated, shares, sizes)
        if ctx.held is None:
            *dparameters, dshift = compute()
        else:
            ctx.held[:] = [lambda: compute()[:-1]]
            dparameters, dshift = [None] * 7, None
        before = (dx if dbefore is None else dbefore, dshift) if ctx.joined else (None, None)
        ticket = None if ctx.held is None else x.new_empty(0)
        return dx, *before, *dparameters[:4], *dbiases, *dparameters[4:], None, None, None, None, None, None, ticket


@torch.no_grad()
def round_weights(layers: Iterable[Any], plan: cuda.CudaPlan, dtype: torch.dtype) -> None:
    """Convert the weights of all linear maps of ``layers`` to ``dtype`` in one launch, for :func:`fused_layer` of this batch."""
    weights = [x for layer in layers for x in (layer.f1.weight, layer.f1.bias, layer.f2.weight) if x.dtype != dtype]
    if weights:
        rounded = [torch.empty(x.shape, dtype=dtype, device=x.device) for x in weights]
        torch._foreach_copy_(rounded, weights)
        plan.rounded.update({(id(x), dtype): y for x, y in zip(weights, rounded, strict=True)})


def _weight_gradient(grad: Tensor, rows: Tensor) -> Tensor:
    """``grad.T @ rows`` in float32, the type of the weights. A separate conversion would be one more launch, and would round."""
    if rows.dtype == torch.float32:
        return grad.T @ rows
    return torch.mm(grad.T, rows, out_dtype=torch.float32)


def _parameter_gradients(
    dprojected: Tensor, normed: Tensor, dbranch: Tensor, gated: Tensor, shares: Tensor, sizes: list[int]
) -> list[Any]:
    """The gradients of seven parameters, in the order of :func:`postpone_gradients`, and that of the shift."""
    dw1, dw2 = _weight_gradient(dprojected, normed), _weight_gradient(dbranch, gated)
    dattention_weight, dattention_bias, db1, *dnorm, dshift = shares.sum(0).split(sizes)
    return [*dnorm, dw1, db1, dattention_weight, dattention_bias, dw2, dshift]


def postpone_gradients(first: Any, plan: cuda.CudaPlan) -> None:
    """Postpone the gradients of the parameters of the ``first`` layer in this batch (:mod:`.late_gradients`).

    The biases of position and time are not among them. Nothing is postponed if one of the parameters needs no gradient.
    """
    parts = first.norm, first.f1, first.attention_norm
    parameters = [*(x for part in parts for x in (part.weight, part.bias)), first.f2.weight]
    if all(x.requires_grad for x in parameters):
        plan.late[id(first.f1.weight)] = postpone(parameters)


def prepare_layers(layers: Sequence[Any], plan: cuda.CudaPlan) -> None:
    """Compute what ``layers`` need of a batch before their input exists. For inference it does nothing."""
    if not torch.is_grad_enabled():
        return
    first = layers[0]
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else first.f1.weight.dtype
    round_weights(layers, plan, dtype)
    postpone_gradients(first, plan)
    _, v_columns, q_columns, _ = first.split
    biases = None if first.position_bias is None else (first.position_bias, first.time_bias)
    plan.prepare(dtype, q_columns // first.heads, v_columns // first.heads, biases)


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
    before = x if isinstance(x, Summands) else (x.contiguous(), None, None)
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
    total, branch = _FusedLayer.apply(*before, *parameters, shape, plan, drop, arranged, rounded, held, ticket)
    return Summands(total, branch, f2.bias)
