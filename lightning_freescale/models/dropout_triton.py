"""Dropout of :mod:`.dropout` on CUDA: one Triton kernel for forward and backward, and one for the random numbers of the rows.

No mask is stored.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.models.dropout import threshold
from lightning_freescale.models.tiles import cdiv, power_of_2, unit_stride
from lightning_freescale.runtime.direct_triton import direct

TILE_ELEMENTS = 4096
KEY_BLOCK = 1024  # ids of a sample that are read at a time


@triton.jit
def _mixed_64(x):
    """``dropout._mix``: a hash of unsigned 64-bit integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _sum_of_ids(ids_ptr, start, end, BLOCK: tl.constexpr):
    """The sum over the ids of a sample of their hashes, modulo 2^64."""
    total = tl.zeros([BLOCK], tl.uint64)
    for first in range(start, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + place, mask=place < end, other=0).to(tl.int64).to(tl.uint64, bitcast=True)
        total += tl.where(place < end, _mixed_64(ids * 0x9E3779B97F4A7C15), 0)
    return tl.sum(total.to(tl.int64, bitcast=True)).to(tl.uint64, bitcast=True)


@direct
@triton.jit(do_not_specialize=["history_ptr", "history_offsets_ptr", "negatives_ptr", "negative_offsets_ptr", "step"])
def _row_keys(
    history_ptr, history_offsets_ptr, negatives_ptr, negative_offsets_ptr, out_ptr, step,
    NEGATIVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The keys of the events of one sample."""
    sample = tl.program_id(0)
    start, end = tl.load(history_offsets_ptr + sample), tl.load(history_offsets_ptr + sample + 1)
    key = step.to(tl.int64).to(tl.uint64, bitcast=True)
    key = _mixed_64(key * 0x9E3779B97F4A7C15 + _sum_of_ids(history_ptr, start, end, BLOCK))
    if NEGATIVES:
        negative_start = tl.load(negative_offsets_ptr + sample)
        negative_end = tl.load(negative_offsets_ptr + sample + 1)
        key = _mixed_64(key * 0x9E3779B97F4A7C15 + _sum_of_ids(negatives_ptr, negative_start, negative_end, BLOCK))
    for first in range(start, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        position = (place - start + 1).to(tl.uint64)
        tl.store(out_ptr + place, _mixed_64(key + position * 0x9E3779B97F4A7C15).to(tl.int32), mask=place < end)


def row_keys(history: tuple[Tensor, Tensor], negatives: tuple[Tensor, Tensor] | None, step: int) -> Tensor:
    """:func:`.dropout.row_keys`, from the ids and the offsets of the histories, and of the negatives if there are any."""
    ids, offsets = history
    out = torch.empty(ids.shape[0], dtype=torch.int32, device=ids.device)
    samples = offsets.shape[0] - 1
    if samples:
        drawn, drawn_offsets = history if negatives is None else negatives
        _row_keys[(samples,)](ids, offsets, drawn, drawn_offsets, out, step, negatives is not None, KEY_BLOCK)
    return out


@triton.jit
def _mixed(x):
    """``dropout._mix_32``: a hash of unsigned 32-bit integers."""
    x = (x * 0x7FEB352D).to(tl.uint32)
    x = x ^ (x >> 15)
    return (x * 0x846CA68B).to(tl.uint32)


@triton.jit
def is_kept(keys, cols, number, limit):
    """Which elements stay: those whose random number is at least ``limit``. ``keys`` and ``cols`` are broadcast."""
    channels = _mixed((number * 65536 + cols + 1).to(tl.uint32))
    return _mixed(keys.to(tl.uint32, bitcast=True) ^ channels).to(tl.int32, bitcast=True) >= limit


@direct
@triton.jit(do_not_specialize=["count"])
def _drop(
    x_ptr, keys_ptr, out_ptr, x_row, count, number, limit, scale,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One tile of rows: elements whose random number is below ``limit`` become 0, the others are multiplied by ``scale``."""
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    mask = (rows[:, None] < count) & (cols[None, :] < D)
    x = tl.load(x_ptr + rows[:, None].to(tl.int64) * x_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    keys = tl.load(keys_ptr + rows, mask=rows < count, other=0)
    kept = tl.where(is_kept(keys[:, None], cols[None, :], number, limit), x * scale, 0.0)
    out = out_ptr + rows[:, None].to(tl.int64) * D + cols[None, :]
    tl.store(out, kept.to(out_ptr.dtype.element_ty), mask=mask)


class _Dropout(torch.autograd.Function):
    """:func:`drop` with its gradient, which is the same function of the gradient of the output."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        keys: Tensor,
        number: int,
        rate: float,
        scale: float,
        total: int,
        place: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.options = number, rate, scale
        ctx.rows = x.shape[0]
        return _launch(x, keys, number, rate, scale, total, None if place is None else place.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (keys,) = ctx.saved_tensors
        number, rate, scale = ctx.options
        return _launch(grads[0][: ctx.rows], keys, number, rate, scale, ctx.rows), *[None] * 6


def _launch(
    x: Tensor, keys: Tensor, number: int, rate: float, scale: float, total: int, out: Tensor | None = None
) -> Tensor:
    x = unit_stride(x)
    if out is None:
        out = torch.empty(total, x.shape[1], dtype=x.dtype, device=x.device)
    if total > x.shape[0]:
        out[x.shape[0] :].zero_()
    if x.shape[0]:
        cols = power_of_2(x.shape[1])
        rows = max(1, TILE_ELEMENTS // cols)
        _drop[(cdiv(x.shape[0], rows),)](
            x, keys, out, x.stride(0), x.shape[0], number, threshold(rate), scale / (1 - rate), x.shape[1], rows, cols
        )
    return out


def drop(
    x: Tensor,
    keys: Tensor,
    number: int,
    rate: float,
    scale: float = 1.0,
    total: int | None = None,
    place: Tensor | None = None,
) -> Tensor:
    """``x [N, D]`` times ``scale`` with its dropped elements.

    Other arguments as in :class:`~.dropout.SampleDropout`; ``keys`` is contiguous.
    """
    place = place if place is not None and place.dtype == x.dtype else None
    return _Dropout.apply(x, keys, number, rate, scale, x.shape[0] if total is None else total, place)
