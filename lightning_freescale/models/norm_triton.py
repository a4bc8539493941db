"""Norms of rows on CUDA: one Triton kernel forward and one backward. They compute in float32 for inputs of any type.

A program takes a tile of whole rows. In the backward pass of a layer norm, each of at most ``PROGRAMS`` programs walks over
several tiles and accumulates its share of the gradients of weight and bias. The shares are summed afterwards: without atomics,
so every sum has a fixed order. The output and the gradient of a row have the same bits in any batch.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.models.tiles import unit_stride

ELEMENTS = 4096  # elements of a tile
PROGRAMS = (
    512  # most programs in backward; it does not follow the number of SMs, so sums have the same order on every GPU
)
WARPS = 4


@triton.jit
def _load(ptr, rows, stride, cols, count, D: tl.constexpr):
    """``[rows, cols]`` in float32; 0 past the last row and the last column."""
    mask = (rows[:, None] < count) & (cols[None, :] < D)
    return tl.load(ptr + rows[:, None].to(tl.int64) * stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, rows, stride, cols, count, D: tl.constexpr, value):
    """Write ``value [rows, cols]``, except past the last row and the last column."""
    mask = (rows[:, None] < count) & (cols[None, :] < D)
    tl.store(ptr + rows[:, None].to(tl.int64) * stride + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _standardized(x, cols, eps, D: tl.constexpr):
    """Rows of mean 0 and variance 1, and the factor ``1 / sqrt(variance + eps)`` of each row."""
    centered = tl.where(cols[None, :] < D, x - (tl.sum(x, 1) / D)[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centered * centered, 1) / D + eps)
    return centered * inverse[:, None], inverse


@triton.jit
def _forward(
    x_ptr, gate_ptr, weight_ptr, bias_ptr, out_ptr, x_row, gate_row, count, eps,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Layer norm of one tile of rows, times the gate if ``GATED``."""
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    x, _ = _standardized(_load(x_ptr, rows, x_row, cols, count, D), cols, eps, D)
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
    """Gradients of ``x`` and the gate, and this program's share of those of weight and bias."""
    cols = tl.arange(0, COLS)
    weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    dweight, dbias = tl.zeros([COLS], tl.float32), tl.zeros([COLS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        x, inverse = _standardized(_load(x_ptr, rows, x_row, cols, count, D), cols, eps, D)
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
    """One tile of rows, scaled to length 1."""
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    x = _load(x_ptr, rows, x_row, cols, count, D)
    length = tl.maximum(tl.sqrt(tl.sum(x * x, 1)), eps)
    _store(out_ptr, rows, D, cols, count, D, x / length[:, None])


@triton.jit
def _unit_backward(
    x_ptr, dout_ptr, dx_ptr, x_row, dout_row, count, eps, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Gradient of one tile of rows."""
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    x, dout = _load(x_ptr, rows, x_row, cols, count, D), _load(dout_ptr, rows, dout_row, cols, count, D)
    length = tl.sqrt(tl.sum(x * x, 1))
    # Forward divided a row that is not longer than eps by the constant eps: its length has no gradient.
    along = tl.where(length > eps, tl.sum(x * dout, 1) / (length * length), 0.0)
    dx = (dout - x * along[:, None]) / tl.maximum(length, eps)[:, None]
    _store(dx_ptr, rows, D, cols, count, D, dx)


class _UnitRows(torch.autograd.Function):
    """:func:`unit_rows` with its gradient."""

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
        dout, dx = unit_stride(grads[0]), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if len(x):
            tile = _tile(x)
            grid = (triton.cdiv(len(x), tile["ROWS"]),)
            _unit_backward[grid](x, dout, dx, x.stride(0), dout.stride(0), len(x), ctx.eps, **tile)
        return dx, None


class _LayerNorm(torch.autograd.Function):
    """:func:`layer_norm` with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, gate, weight, bias)
        ctx.eps = eps
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        gate_or_x = x if gate is None else gate  # the kernel needs some pointer
        if len(x):
            tile = _tile(x) | {"GATED": gate is not None}
            grid = (triton.cdiv(len(x), tile["ROWS"]),)
            _forward[grid](x, gate_or_x, weight, bias, out, x.stride(0), gate_or_x.stride(0), len(x), eps, **tile)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, bias = ctx.saved_tensors
        dout = unit_stride(grads[0])
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dgate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=x.device)
        if not len(x):
            return dx, dgate, torch.zeros_like(weight), torch.zeros_like(bias), None, None
        tile = _tile(x) | {"GATED": gate is not None}
        programs = min(PROGRAMS, triton.cdiv(len(x), tile["ROWS"]))
        shares = torch.empty(2, programs, x.shape[1], device=x.device)
        gate_or_x, dgate_or_dx = (x, dx) if gate is None else (gate, dgate)
        _backward[(programs,)](
            x, gate_or_x, weight, bias, dout, dx, dgate_or_dx, shares[0], shares[1],
            x.stride(0), gate_or_x.stride(0), dout.stride(0), len(x), ctx.eps, **tile,
        )  # fmt: skip
        dweight, dbias = shares.sum(1)
        return dx, dgate, dweight.to(weight.dtype), dbias.to(bias.dtype), None, None


def _tile(x: Tensor) -> dict[str, Any]:
    """Constants of a kernel for ``x [N, D]``: the shape of a tile and the number of warps."""
    cols = triton.next_power_of_2(x.shape[1])
    return {"D": x.shape[1], "ROWS": max(1, ELEMENTS // cols), "COLS": cols, "num_warps": WARPS}


def layer_norm(x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """The layer norm of ``x [N, D]``, times ``gate [N, D]`` if it is given. Returns ``[N, D]`` of type ``dtype``.

    ``x`` and ``gate`` may be views with gaps between their rows.
    """
    return _LayerNorm.apply(unit_stride(x), None if gate is None else unit_stride(gate), weight, bias, eps, dtype)


def unit_rows(x: Tensor, eps: float = 1e-12) -> Tensor:
    """The rows of ``x [N, D]``, each divided by its length or by ``eps``, whichever is larger. Returns ``[N, D]`` float32."""
    return _UnitRows.apply(unit_stride(x), eps)
