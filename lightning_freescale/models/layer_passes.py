"""The two passes of a layer of HSTU on CUDA as plain functions: kernels in their order, without autograd.

A layer adds its result to its input. Here the next layer does that, as part of its norm, so a layer returns the two summands.
Beside the attention and the products, forward then passes over the rows three times: the sum and its norm; the SiLU of queries,
keys and values; the norm of the attention output times the SiLU of the gate, with dropout. Backward has one pass for each, and
that of the sum also rounds the gradient for the products of the layer before. The gradients of the four parts of the projection
are written side by side: nothing is concatenated. All arrays between the products have the type of autocast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_freescale.models import elementwise_triton
from lightning_freescale.models.attention import cuda, hopper
from lightning_freescale.models.elementwise_triton import SUM_PROGRAMS
from lightning_freescale.models.norm_triton import PROGRAMS, Drop, Join, Norm

NO_PLACES: Mapping[str, Tensor] = {}  # every array is allocated


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


class LayerWeights(NamedTuple):
    """The parameters of a layer. Those of the linear maps have the type of autocast."""

    norm_weight: Tensor
    norm_bias: Tensor
    w1: Tensor
    b1: Tensor
    position_bias: Tensor | None
    time_bias: Tensor | None
    attention_weight: Tensor
    attention_bias: Tensor
    w2: Tensor

    @property
    def biases(self) -> tuple[Tensor, Tensor] | None:
        """The tables of the relative bias, if there are any."""
        return None if self.position_bias is None or self.time_bias is None else (self.position_bias, self.time_bias)


class LayerBatch(NamedTuple):
    """What a layer needs of a batch beside the rows.

    Args:
        plan: the plan of the attention.
        drop: dropout of the gated attention output.
        arranged: the attention if its rows are not those of the layer: with personal tokens.
    """

    plan: cuda.CudaPlan
    drop: Drop | None
    arranged: Any = None


class KeptRows(NamedTuple):
    """What the forward pass keeps for the backward pass; ``N`` rows each. ``total`` is the input of the layer, added up."""

    total: Tensor
    normed: Tensor
    projected: Tensor
    active: Tensor
    attended: Tensor
    gated: Tensor


def forward_pass(
    before: tuple[Tensor, Tensor | None, Tensor | None],
    weights: LayerWeights,
    shape: LayerShape,
    batch: LayerBatch,
    places: Mapping[str, Tensor] = NO_PLACES,
) -> tuple[KeptRows, Tensor]:
    """What the layer keeps, and its branch ``[N, D]`` without the bias of the second linear map.

    Args:
        before: the summands of the input: ``x [N, D]``, and nothing or a branch ``[N, D]`` and a shift ``[D]``.
        places: contiguous arrays for the results, by the names of :class:`KeptRows` and ``"branch"``. Others are allocated.
    """
    x, branch, shift = before
    dtype, gates, arranged = shape.dtype, shape.split[0], batch.arranged
    join = None
    if branch is not None and shift is not None:
        total = places.get("total")
        join = Join(branch, shift, torch.empty_like(x) if total is None else total)
    norm = Norm(weights.norm_weight, weights.norm_bias, shape.norm_eps)
    normed = norm.forward(x, None, dtype, join, places.get("normed"))
    projected = torch.addmm(weights.b1, normed, weights.w1.T, out=places.get("projected"))
    gate, rest = projected[:, :gates], projected[:, gates:]
    state = None if arranged is None else arranged.take_state()
    active = elementwise_triton.silu(rest, places.get("active")) if state is None else state.silu(rest)
    qkv = shape.qkv(active)
    if arranged is not None:
        qkv = arranged.arrange(*qkv)
    attended = cuda.forward(*qkv, weights.biases, shape.alpha, batch.plan, places.get("attended")).flatten(1)
    if arranged is not None:
        attended = arranged.collect(attended)
    gated_norm = Norm(weights.attention_weight, weights.attention_bias, shape.attention_eps, True, batch.drop)
    gated = gated_norm.forward(attended, gate, dtype, out=places.get("gated"))
    kept = KeptRows(x if join is None else join.total, normed, projected, active, attended, gated)
    return kept, torch.mm(gated, weights.w2.T, out=places.get("branch"))


class LayerGradients(NamedTuple):
    """The results of the backward pass.

    Args:
        dnormed: ``[N, D]``, gradient of the output of the first norm.
        dprojected: ``[N, C]``, gradient of the projection.
        shares: shares of the gradients that are sums over the rows, see :func:`parameter_gradients`.
        dbiases: gradients of both tables of the relative bias.
    """

    dnormed: Tensor
    dprojected: Tensor
    shares: Tensor
    dbiases: tuple[Tensor | None, Tensor | None]


def share_shape(shape: LayerShape, columns: int, width: int) -> tuple[int, int]:
    """Shape of ``shares`` of a layer of ``width`` whose projection has so many ``columns``."""
    return max(PROGRAMS, SUM_PROGRAMS, hopper.SILU_BLOCKS), 2 * shape.split[0] + columns + 3 * width


def backward_pass(
    kept: KeptRows,
    weights: LayerWeights,
    shape: LayerShape,
    batch: LayerBatch,
    dbranch: Tensor,
    places: Mapping[str, Tensor] = NO_PLACES,
) -> LayerGradients:
    """The gradients down to the first norm, whose backward is :func:`norm_backward`.

    Args:
        dbranch: ``[N, D]``, gradient of the branch.
        places: contiguous arrays for the results, by the names of :class:`LayerGradients`. Others are allocated.
    """
    x, _, projected, active, attended, _ = kept
    gates, arranged = shape.split[0], batch.arranged
    # One sum over the programs at the end gives all gradients that are sums over the rows.
    shares = places.get("shares")
    if shares is None:
        shares = torch.empty(share_shape(shape, projected.shape[1], x.shape[1]), device=x.device)
    shares.zero_()
    gate_shares, rest_shares, _ = shares.split([3 * gates, projected.shape[1] - gates, 3 * x.shape[1]], 1)

    dprojected = places.get("dprojected")
    dprojected = torch.empty_like(projected) if dprojected is None else dprojected
    drest = dprojected[:, gates:]
    biases, qkv = weights.biases, shape.qkv(active)
    if arranged is not None:  # the copies of rows are made again, so that they need no memory between the passes
        qkv = arranged.arrange(*qkv)
    factor = cuda.gradient_factor(*qkv, biases, batch.plan)
    dattended = (
        Norm(weights.attention_weight, weights.attention_bias, shape.attention_eps, True, batch.drop)
        .backward(
            attended,
            projected[:, :gates],
            dbranch @ weights.w2,
            gate_shares,
            dgate=dprojected[:, :gates],
            factor=factor if arranged is None or factor is None else arranged.collect(factor),
        )
        .unflatten(1, (shape.heads, -1))
    )
    dqkv, silu = shape.qkv(drest), None
    if arranged is None and batch.plan.runs_hopper(*qkv, biases):
        v_shares, q_shares, k_shares = rest_shares.split(shape.split[1:], 1)
        silu = hopper.Silu(shape.qkv(projected[:, gates:]), (q_shares, k_shares, v_shares))
    if arranged is None:
        dbiases = cuda.backward(*qkv, biases, shape.alpha, batch.plan, dattended, dqkv, silu)
    else:
        dcopies = torch.empty_like(qkv[0]), torch.empty_like(qkv[1]), torch.empty_like(qkv[2])
        spread = arranged.collect_backward(dattended)
        dbiases = cuda.backward(*qkv, biases, shape.alpha, batch.plan, spread, dcopies)
        for part, copied in zip(dqkv, dcopies, strict=True):
            part.copy_(arranged.arrange_backward(copied))
    if silu is None:
        elementwise_triton.silu_backward_(projected[:, gates:], drest, rest_shares)
    return LayerGradients(torch.mm(dprojected, weights.w1, out=places.get("dnormed")), dprojected, shares, dbiases)


def norm_backward(
    found: LayerGradients,
    kept: KeptRows,
    weights: tuple[Tensor, Tensor],
    shape: LayerShape,
    dtotal: Tensor,
    joined: bool,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the input ``[N, D]``, and of the branch before, if the input was a sum and the branch has another type.

    It also writes the last columns of ``found.shares``.

    Args:
        weights: those of the first norm.
        dtotal: ``[N, D]``, gradient of the input by other ways than this layer.
        joined: whether the input was a sum.
        place: receives the gradient of the branch before.
    """
    x, dbefore = kept.total, None
    if joined and shape.dtype != x.dtype:
        dbefore = torch.empty(x.shape, dtype=shape.dtype, device=x.device) if place is None else place
    shares = found.shares[:, -3 * x.shape[1] :]
    norm = Norm(*weights, shape.norm_eps)
    return norm.backward(x, None, found.dnormed, shares, added=dtotal, rounded=dbefore), dbefore


def parameter_gradients(
    found: LayerGradients, kept: KeptRows, dbranch: Tensor, shape: LayerShape
) -> list[Tensor | None]:
    """The gradients of :class:`LayerWeights` in their order, and that of the shift."""
    gates, width = shape.split[0], kept.total.shape[1]
    dw1, dw2 = _weight_gradient(found.dprojected, kept.normed), _weight_gradient(dbranch, kept.gated)
    # The last third of the gate's shares and those of the rest are the bias of the whole projection.
    sizes = [gates, gates, found.dprojected.shape[1], width, width, width]
    dattention_weight, dattention_bias, db1, *dnorm, dshift = found.shares.sum(0).split(sizes)
    return [*dnorm, dw1, db1, *found.dbiases, dattention_weight, dattention_bias, dw2, dshift]


def _weight_gradient(grad: Tensor, rows: Tensor) -> Tensor:
    """``grad.T @ rows`` in float32, the type of the weights. A separate conversion would be one more launch, and would round."""
    if rows.dtype == torch.float32:
        return grad.T @ rows
    return torch.mm(grad.T, rows, out_dtype=torch.float32)
