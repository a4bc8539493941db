"""Elementwise passes over rows on CUDA, one Triton kernel each, which compute in float32: SiLU, its derivative, a sum, rounding.

Two of them also sum their result over the rows, which is the gradient of a bias. Each of at most ``SUM_PROGRAMS`` programs for a
block of columns sums its own rows. The shares are summed afterwards: without atomics, so every sum has a fixed order.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.models.tiles import cdiv
from lightning_freescale.runtime.direct_triton import direct

COLUMNS = 512  # of a tile
TILE_ROWS = 4
SUM_PROGRAMS = 512  # it does not follow the number of SMs, so sums have the same order on every GPU


@triton.jit
def _place(ptr, rows, cols, stride):
    return ptr + rows[:, None].to(tl.int64) * stride + cols[None, :]


@direct
@triton.jit(do_not_specialize=["count"])
def _silu(x_ptr, out_ptr, x_row, out_row, count, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (rows[:, None] < count) & (cols[None, :] < width)
    x = tl.load(_place(x_ptr, rows, cols, x_row), mask=mask, other=0.0).to(tl.float32)
    tl.store(_place(out_ptr, rows, cols, out_row), (x * tl.sigmoid(x)).to(out_ptr.dtype.element_ty), mask=mask)


@direct
@triton.jit(do_not_specialize=["count"])
def _add(x_ptr, y_ptr, shift_ptr, out_ptr, count, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (rows[:, None] < count) & (cols[None, :] < width)
    x = tl.load(_place(x_ptr, rows, cols, width), mask=mask, other=0.0).to(tl.float32)
    y = tl.load(_place(y_ptr, rows, cols, width), mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + cols, mask=cols < width, other=0.0).to(tl.float32)
    total = x + (y + shift[None, :])
    tl.store(_place(out_ptr, rows, cols, width), total.to(out_ptr.dtype.element_ty), mask=mask)


@direct
@triton.jit(do_not_specialize=["count"])
def _summed(
    x_ptr, grad_ptr, out_ptr, shares_ptr, x_row, grad_row, out_row, share_row, count, width,
    SILU: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """out = grad, times silu'(x) if ``SILU``; and this program's share of its sum over the rows in ``shares_ptr``.

    ``shares_ptr`` is ``[programs, width]``, with ``share_row`` from one program to the next. ``out`` may be ``grad``.
    """
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], tl.float32)  # summed over its rows at the end: that needs other threads' values
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        mask = (rows[:, None] < count) & (cols[None, :] < width)
        grad = tl.load(_place(grad_ptr, rows, cols, grad_row), mask=mask, other=0.0).to(tl.float32)
        if SILU:
            x = tl.load(_place(x_ptr, rows, cols, x_row), mask=mask, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(x)
            grad *= sigmoid * (1.0 + x * (1.0 - sigmoid))
        tl.store(_place(out_ptr, rows, cols, out_row), grad.to(out_ptr.dtype.element_ty), mask=mask)
        total += grad
    tl.store(shares_ptr + tl.program_id(0) * share_row + cols, tl.sum(total, 0), mask=cols < width)


def silu(x: Tensor, out: Tensor | None = None) -> Tensor:
    """SiLU of ``x [N, D]``, whose rows may lie apart. The result is contiguous; ``out`` receives it if it is given."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    grid = (cdiv(x.shape[0], TILE_ROWS), cdiv(x.shape[1], COLUMNS))
    _silu[grid](x, out, x.stride(0), out.stride(0), x.shape[0], x.shape[1], TILE_ROWS, COLUMNS)
    return out


def add(x: Tensor, y: Tensor, shift: Tensor) -> Tensor:
    """``x + y + shift`` of contiguous arrays ``[N, D]`` and ``shift [D]``; of the type of ``x``."""
    out = torch.empty_like(x)
    grid = (cdiv(x.shape[0], TILE_ROWS), cdiv(x.shape[1], COLUMNS))
    _add[grid](x, y, shift, out, x.shape[0], x.shape[1], TILE_ROWS, COLUMNS)
    return out


def silu_backward_(x: Tensor, grad: Tensor, shares: Tensor) -> None:
    """Multiply ``grad [N, D]`` by the derivative of SiLU at ``x [N, D]`` in place. The rows of both may lie apart.

    ``shares`` is ``[SUM_PROGRAMS, D]`` float32, zeros. Its sum over the rows is afterwards the sum over the rows of ``grad``.
    """
    _launch_summed(x, grad, grad, shares)


def round_and_sum(grad: Tensor, dtype: torch.dtype, shares: Tensor, out: Tensor | None = None) -> Tensor:
    """``grad [N, D]`` as ``dtype``, contiguous; ``out`` receives it if it is given. ``shares`` as in :func:`silu_backward_`."""
    out = torch.empty(grad.shape, dtype=dtype, device=grad.device) if out is None else out
    _launch_summed(None, grad, out, shares)
    return out


def _launch_summed(x: Tensor | None, grad: Tensor, out: Tensor, shares: Tensor) -> None:
    some_x = grad if x is None else x  # the kernel needs some pointer
    strides = some_x.stride(0), grad.stride(0), out.stride(0), shares.stride(0)
    grid = (min(SUM_PROGRAMS, cdiv(grad.shape[0], TILE_ROWS)), cdiv(grad.shape[1], COLUMNS))
    _summed[grid](some_x, grad, out, shares, *strides, grad.shape[0], grad.shape[1], x is not None, TILE_ROWS, COLUMNS)
