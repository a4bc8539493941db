"""Dropout of :mod:`.dropout` on CUDA: one Triton kernel, for forward and backward. No mask is stored."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.models.dropout import threshold
from lightning_freescale.models.tiles import unit_stride

TILE_ELEMENTS = 4096


@triton.jit
def _mixed(x):
    """``dropout._mix_32``: a hash of unsigned 32-bit integers."""
    x = (x * 0x7FEB352D).to(tl.uint32)
    x = x ^ (x >> 15)
    return (x * 0x846CA68B).to(tl.uint32)


@triton.jit
def is_kept(keys_ptr, rows, cols, count, number, limit):
    """Which elements stay, ``[rows, cols]``: those whose random number is at least ``limit``."""
    keys = tl.load(keys_ptr + rows, mask=rows < count, other=0).to(tl.uint32, bitcast=True)
    channels = _mixed((number * 65536 + cols + 1).to(tl.uint32))
    return _mixed(keys[:, None] ^ channels[None, :]).to(tl.int32, bitcast=True) >= limit


@triton.jit
def _drop(
    x_ptr, keys_ptr, out_ptr, x_row, count, number, limit, scale,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One tile of rows: elements whose random number is below ``limit`` become 0, the others are multiplied by ``scale``."""
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    mask = (rows[:, None] < count) & (cols[None, :] < D)
    x = tl.load(x_ptr + rows[:, None].to(tl.int64) * x_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    kept = tl.where(is_kept(keys_ptr, rows, cols, count, number, limit), x * scale, 0.0)
    out = out_ptr + rows[:, None].to(tl.int64) * D + cols[None, :]
    tl.store(out, kept.to(out_ptr.dtype.element_ty), mask=mask)


class _Dropout(torch.autograd.Function):
    """:func:`drop` with its gradient, which is the same function of the gradient of the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, number: int, rate: float) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.number, ctx.rate = number, rate
        return _launch(x, keys, number, rate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (keys,) = ctx.saved_tensors
        return _launch(grads[0], keys, ctx.number, ctx.rate), None, None, None


def _launch(x: Tensor, keys: Tensor, number: int, rate: float) -> Tensor:
    x, out = unit_stride(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        cols = triton.next_power_of_2(x.shape[1])
        rows = max(1, TILE_ELEMENTS // cols)
        _drop[(triton.cdiv(len(x), rows),)](
            x, keys, out, x.stride(0), len(x), number, threshold(rate), 1 / (1 - rate), x.shape[1], rows, cols
        )
    return out


def drop(x: Tensor, keys: Tensor, number: int, rate: float) -> Tensor:
    """``x [N, D]`` with its dropped elements. Arguments as in :class:`~.dropout.SampleDropout`; ``keys`` is contiguous."""
    return _Dropout.apply(x, keys, number, rate)
