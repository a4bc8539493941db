"""Norms of rows on CUDA: one Triton kernel forward, one backward, in float32 whatever the types.

A program takes a tile of whole rows. In the backward of a layer norm a fixed number of programs walk over the tiles and keep
their shares of the gradients of weight and bias, which are added up afterwards: no atomics, so every sum has a fixed order. A
row's output and gradient are the same bits in any batch.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096  # of a tile
PROGRAMS = 512  # of backward, at most; not by the cores of a GPU, so that sums have the same order on all
WARPS = 4


@triton.jit
def _load(ptr, rows, stride, cols, count, D: tl.constexpr):
    """``[rows, cols]`` in float32, 0 beyond the last row and column."""
    mask = (rows[:, None] < count) & (cols[None, :] < D)
    return tl.load(ptr + rows[:, None].to(tl.int64) * stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, rows, stride, cols, count, D: tl.constexpr, value):
    mask = (rows[:, None] < count) & (cols[None, :] < D)
    tl.store(ptr + rows[:, None].to(tl.int64) * stride + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _standardised(x, cols, eps, D: tl.constexpr):
    """Rows of mean 0 and variance 1, and what they were divided by, inverted."""
    centred = tl.where(cols[None, :] < D, x - (tl.sum(x, 1) / D)[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / D + eps)
    return centred * inverse[:, None], inverse


@triton.jit
def _forward(
    x_ptr, gate_ptr, weight_ptr, bias_ptr, out_ptr, x_row, gate_row, count, eps,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    x, _ = _standardised(_load(x_ptr, rows, x_row, cols, count, D), cols, eps, D)
    out = x * weight[None, :] + bias[None, :]
    if GATED:
        out *= _load(gate_ptr, rows, gate_row, cols, count, D)
    _store(out_ptr, rows, D, cols, count, D, out)


@triton.jit
def _backward(
    x_ptr, gate_ptr, weight_ptr, bias_ptr, dout_ptr, dx_ptr, dgate_ptr, dweight_ptr, dbias_ptr,
    x_row, gate_row, dout_row, count, eps,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, COLS)
    weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    dweight, dbias = tl.zeros([COLS], tl.float32), tl.zeros([COLS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        x, inverse = _standardised(_load(x_ptr, rows, x_row, cols, count, D), cols, eps, D)
        dout = _load(dout_ptr, rows, dout_row, cols, count, D)
        if GATED:
            _store(dgate_ptr, rows, D, cols, count, D, dout * (x * weight[None, :] + bias[None, :]))
            dout *= _load(gate_ptr, rows, gate_row, cols, count, D)
        dweight += tl.sum(dout * x, 0)
        dbias += tl.sum(dout, 0)
        dout *= weight[None, :]
        dx = dout - (tl.sum(dout, 1) / D)[:, None] - x * (tl.sum(dout * x, 1) / D)[:, None]
        _store(dx_ptr, rows, D, cols, count, D, dx * inverse[:, None])
    tl.store(dweight_ptr + tl.program_id(0) * D + cols, dweight, mask=cols < D)
    tl.store(dbias_ptr + tl.program_id(0) * D + cols, dbias, mask=cols < D)


@triton.jit
def _unit_forward(
    x_ptr, out_ptr, x_row, count, eps, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    x = _load(x_ptr, rows, x_row, cols, count, D)
    length = tl.maximum(tl.sqrt(tl.sum(x * x, 1)), eps)
    _store(out_ptr, rows, D, cols, count, D, x / length[:, None])


@triton.jit
def _unit_backward(
    x_ptr, dout_ptr, dx_ptr, x_row, dout_row, count, eps, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    x, dout = _load(x_ptr, rows, x_row, cols, count, D), _load(dout_ptr, rows, dout_row, cols, count, D)
    length = tl.sqrt(tl.sum(x * x, 1))
    # What is not longer than eps was divided by eps, whatever its length.
    along = tl.where(length > eps, tl.sum(x * dout, 1) / (length * length), 0.0)
    dx = (dout - x * along[:, None]) / tl.maximum(length, eps)[:, None]
    _store(dx_ptr, rows, D, cols, count, D, dx)


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.eps = eps
        out = torch.empty(x.shape, device=x.device)
        if len(x):
            tile = _tile(x)
            _unit_forward[(triton.cdiv(len(x), tile["ROWS"]),)](x, out, x.stride(0), len(x), eps, **tile)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dout, dx = _unit_stride(grads[0]), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if len(x):
            tile = _tile(x)
            grid = (triton.cdiv(len(x), tile["ROWS"]),)
            _unit_backward[grid](x, dout, dx, x.stride(0), dout.stride(0), len(x), ctx.eps, **tile)
        return dx, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, gate, weight, bias)
        ctx.eps = eps
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        given = x if gate is None else gate
        if len(x):
            tile = _tile(x) | {"GATED": gate is not None}
            grid = (triton.cdiv(len(x), tile["ROWS"]),)
            _forward[grid](x, given, weight, bias, out, x.stride(0), given.stride(0), len(x), eps, **tile)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, bias = ctx.saved_tensors
        dout = _unit_stride(grads[0])
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dgate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=x.device)
        if not len(x):
            return dx, dgate, torch.zeros_like(weight), torch.zeros_like(bias), None, None
        tile = _tile(x) | {"GATED": gate is not None}
        programs = min(PROGRAMS, triton.cdiv(len(x), tile["ROWS"]))
        shares = torch.empty(2, programs, x.shape[1], device=x.device)
        given, dgiven = (x, dx) if gate is None else (gate, dgate)
        _backward[(programs,)](
            x, given, weight, bias, dout, dx, dgiven, shares[0], shares[1],
            x.stride(0), given.stride(0), dout.stride(0), len(x), ctx.eps, **tile,
        )  # fmt: skip
        dweight, dbias = shares.sum(1)
        return dx, dgate, dweight.to(weight.dtype), dbias.to(bias.dtype), None, None


def _tile(x: Tensor) -> dict[str, Any]:
    cols = triton.next_power_of_2(x.shape[1])
    return {"D": x.shape[1], "ROWS": max(1, ELEMENTS // cols), "COLS": cols, "num_warps": WARPS}


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def layer_norm(x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """``[N, D]`` of ``dtype``: the norm of ``x``, times ``gate`` if there is one. Rows may be views with gaps between them."""
    return _LayerNorm.apply(_unit_stride(x), None if gate is None else _unit_stride(gate), weight, bias, eps, dtype)


def unit_rows(x: Tensor, eps: float = 1e-12) -> Tensor:
    """``[N, D]`` float32: the rows of ``x`` over their lengths, or over ``eps`` where they are not longer."""
    return _UnitRows.apply(_unit_stride(x), eps)
