"""Copies of tokens as rows, and sums of the rows of a token, on CUDA: two Triton kernels. Every sum has a fixed order."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.models.moe.dispatch import Arrangement

GATHER_ROWS = 8  # of a program


@triton.jit(do_not_specialize=["count"])
def _gather(
    x_ptr, copies_ptr, out_ptr, x_row, count, width, CHOICES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLS + tl.arange(0, COLS)
    copy = tl.load(copies_ptr + rows, mask=rows < count, other=-1)
    inside = cols[None, :] < width
    source = (copy // CHOICES).to(tl.int64)[:, None] * x_row + cols[None, :]
    x = tl.load(x_ptr + source, mask=(copy >= 0)[:, None] & inside, other=0.0)
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * width + cols[None, :], x, mask=(rows < count)[:, None] & inside)


@triton.jit(do_not_specialize=["count"])
def _combine(
    y_ptr, rows_ptr, gates_ptr, out_ptr, count, width,
    GATED: tl.constexpr, CHOICES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    tokens, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (tokens < count)[:, None] & (cols[None, :] < width)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for choice in tl.static_range(CHOICES):
        row = tl.load(rows_ptr + tokens * CHOICES + choice, mask=tokens < count, other=0).to(tl.int64)
        y = tl.load(y_ptr + row[:, None] * width + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if GATED:
            gate = tl.load(gates_ptr + tokens * CHOICES + choice, mask=tokens < count, other=0.0).to(tl.float32)
            y *= gate[:, None]
        total += y
    place = out_ptr + tokens.to(tl.int64)[:, None] * width + cols[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=mask)


def _columns(width: int) -> int:
    return min(512, triton.next_power_of_2(width))


def gather(x: Tensor, index: Arrangement) -> Tensor:
    """The copies of tokens ``x [T, D]`` as rows, ``[R, D]``; empty rows are 0."""
    out = torch.empty(len(index.copies), x.shape[1], dtype=x.dtype, device=x.device)
    if not len(out):  # there is nothing to launch
        return out
    cols = _columns(x.shape[1])
    grid = (triton.cdiv(len(out), GATHER_ROWS), triton.cdiv(x.shape[1], cols))
    _gather[grid](x, index.copies, out, x.stride(0), *out.shape, index.rows.shape[1], GATHER_ROWS, cols)
    return out


def combine(y: Tensor, index: Arrangement, gates: Tensor | None) -> Tensor:
    """The sum over the rows ``y [R, D]`` of each token, ``[T, D]``, weighted by ``gates [T, k]`` if they are given."""
    tokens, choices = index.rows.shape
    out = torch.empty(tokens, y.shape[1], dtype=y.dtype, device=y.device)
    if not tokens:
        return out
    cols = _columns(y.shape[1])
    grid = (triton.cdiv(tokens, GATHER_ROWS), triton.cdiv(y.shape[1], cols))
    some_gates = y if gates is None else gates  # the kernel needs some pointer
    _combine[grid](y, index.rows, some_gates, out, *out.shape, gates is not None, choices, GATHER_ROWS, cols)
    return out
