"""The embeddings of :mod:`.event_encoding` on CUDA: one kernel adds both, and one for each table sums the gradients of its rows.

PyTorch operations take about forty launches for this, more than a layer does. The sums have a fixed order: each program sums its
own events, without atomics, and the shares of the programs are summed afterwards.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.models.attention.buckets import TIME_LIMIT
from lightning_freescale.models.attention.triton_kernels import log_bucket
from lightning_freescale.models.tiles import cdiv, power_of_2, unit_stride
from lightning_freescale.runtime.direct_triton import direct

ENCODED_ELEMENTS = 4096  # of a tile
POSITION_ROWS, POSITION_PROGRAMS = 16, 512  # positions of a tile; programs, if there are enough histories
GAP_ROWS, GAP_PROGRAMS = 32, 128  # events of a tile; programs for a block of columns
SUM_COLUMNS = 64  # of a tile whose gradients are summed
_LIMIT = tl.constexpr(TIME_LIMIT)


@triton.jit
def _history_of(rows, offsets_ptr, samples, search):
    """The history of each event: the number of histories that end at the event or before it. Takes ``search`` halvings."""
    low, high = tl.zeros_like(rows), tl.zeros_like(rows) + samples
    for _ in range(search):
        middle = (low + high) // 2
        inside = low < high
        ends = tl.load(offsets_ptr + 1 + middle, mask=inside, other=0)
        low = tl.where(inside & (ends <= rows), middle + 1, low)
        high = tl.where(inside & (ends > rows), middle, high)
    return low


@triton.jit
def _since_first(time, first):
    """``buckets.relative_times``."""
    return tl.minimum(tl.maximum(time - first, -_LIMIT), _LIMIT - 1).to(tl.int32)


@direct
@triton.jit(
    do_not_specialize=[
        *("x_ptr", "offsets_ptr", "timestamps_ptr", "events_before_ptr", "time_before_ptr"),
        *("count", "samples", "search"),
    ]
)
def _encode(
    x_ptr, offsets_ptr, timestamps_ptr, events_before_ptr, time_before_ptr, position_ptr, gap_ptr, out_ptr, buckets_ptr,
    x_row, count, samples, search, positions, gaps, scale,
    BEFORE: tl.constexpr, POSITIONS: tl.constexpr, GAPS: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """out = x * scale + position embedding + gap embedding, for one tile of rows; and the bucket of each gap.

    With ``BEFORE``, the events of a history follow ``events_before_ptr[history]`` others, the last at ``time_before_ptr``.
    """
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    exists, column = rows < count, cols[None, :] < D
    mask = exists[:, None] & column
    out = (
        tl.load(x_ptr + rows[:, None].to(tl.int64) * x_row + cols[None, :], mask=mask, other=0.0).to(tl.float32) * scale
    )
    history = _history_of(rows, offsets_ptr, samples, search)
    start = tl.load(offsets_ptr + history, mask=exists, other=0).to(tl.int32)
    place = rows - start
    if BEFORE:
        skipped = tl.load(events_before_ptr + history, mask=exists, other=0).to(tl.int32)
        continues = (place == 0) & (skipped > 0)
        place += skipped
    if POSITIONS:
        place = tl.minimum(place, positions - 1)
        out += tl.load(position_ptr + place[:, None] * D + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if GAPS:
        first = tl.load(timestamps_ptr + start, mask=exists, other=0)
        now = tl.load(timestamps_ptr + rows, mask=exists, other=0)
        before = tl.load(timestamps_ptr + tl.maximum(rows - 1, start), mask=exists, other=0)
        gap = _since_first(now, first) - _since_first(before, first)
        if BEFORE:
            last = tl.load(time_before_ptr + history, mask=exists, other=0)
            gap = tl.where(continues, tl.minimum(tl.maximum(now - last, 0), _LIMIT).to(tl.int32), gap)
        bucket = log_bucket(gap, gaps)
        tl.store(buckets_ptr + rows, bucket, mask=exists)
        out += tl.load(gap_ptr + bucket[:, None] * D + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows[:, None].to(tl.int64) * D + cols[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@direct
@triton.jit(do_not_specialize=["offsets_ptr", "samples", "share"])
def _position_shares(
    grad_ptr, offsets_ptr, shares_ptr, grad_row, samples, share, positions,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The sum of the gradients of each position over ``share`` histories. The last position has all later events."""
    first = tl.program_id(0) * ROWS
    place, cols = first + tl.arange(0, ROWS), tl.program_id(1) * COLS + tl.arange(0, COLS)
    column = cols[None, :] < D
    total = tl.zeros([ROWS, COLS], tl.float32)
    for sample in range(tl.program_id(2) * share, tl.minimum((tl.program_id(2) + 1) * share, samples)):
        start = tl.load(offsets_ptr + sample).to(tl.int64)
        length = tl.load(offsets_ptr + sample + 1).to(tl.int64) - start
        if first < length:
            mask = ((place < length) & (place < positions))[:, None] & column
            rows = (start + place)[:, None] * grad_row
            total += tl.load(grad_ptr + rows + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            if first + ROWS >= positions:
                for later in range(positions, length):
                    row = tl.load(grad_ptr + (start + later) * grad_row + cols, mask=cols < D, other=0.0).to(tl.float32)
                    total += tl.where((place == positions - 1)[:, None], row[None, :], 0.0)
    out = shares_ptr + (tl.program_id(2).to(tl.int64) * positions + place[:, None]) * D + cols[None, :]
    tl.store(out, total, mask=(place < positions)[:, None] & column)


@direct
@triton.jit(do_not_specialize=["count"])
def _gap_shares(
    grad_ptr, buckets_ptr, shares_ptr, grad_row, count, gaps,
    D: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The sum of the gradients of each bucket over the tiles of this program, as a product with a matrix of ones and zeros."""
    slots, cols = tl.arange(0, SLOTS), tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros([SLOTS, COLS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        bucket = tl.load(buckets_ptr + rows, mask=rows < count, other=-1)
        mask = (rows < count)[:, None] & (cols[None, :] < D)
        grad = tl.load(grad_ptr + rows[:, None].to(tl.int64) * grad_row + cols[None, :], mask=mask, other=0.0)
        chosen = (slots[:, None] == bucket[None, :]).to(tl.float32)
        total += tl.dot(chosen, grad.to(tl.float32), input_precision="ieee")
    out = shares_ptr + (tl.program_id(0) * gaps + slots[:, None]) * D + cols[None, :]
    tl.store(out, total, mask=(slots < gaps)[:, None] & (cols[None, :] < D))


class _Encode(torch.autograd.Function):
    """:func:`encode` with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        offsets: Tensor,
        timestamps: Tensor,
        position: Tensor | None,
        gap: Tensor | None,
        scale: float,
        before: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        ctx.scale, ctx.dtype = scale, x.dtype
        tables = [table for table in (position, gap) if table is not None]
        dtype = torch.promote_types(x.dtype, tables[0].dtype)
        x, (count, width), samples = unit_stride(x), x.shape, offsets.shape[0] - 1
        out = torch.empty(count, width, dtype=dtype, device=x.device)
        buckets = torch.empty(count if gap is not None else 0, dtype=torch.int32, device=x.device)
        if count:
            cols = power_of_2(width)
            rows = max(1, ENCODED_ELEMENTS // cols)
            _encode[(cdiv(count, rows),)](
                *(
                    x,
                    offsets,
                    timestamps,
                    *(before or (offsets, timestamps)),
                    *(tables[0] if table is None else table for table in (position, gap)),
                ),
                *(out, buckets, x.stride(0), count, samples, samples.bit_length()),
                *(0 if position is None else position.shape[0], 0 if gap is None else gap.shape[0], scale),
                *(before is not None, position is not None, gap is not None, width, rows, cols),
            )
        ctx.save_for_backward(offsets, buckets, position, gap)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        offsets, buckets, position, gap = ctx.saved_tensors
        grad = unit_stride(grads[0])
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (grad if ctx.scale == 1 else grad * ctx.scale).to(ctx.dtype)
        dposition = _position_gradient(grad, offsets, position) if ctx.needs_input_grad[3] else None
        dgap = _gap_gradient(grad, buckets, gap) if ctx.needs_input_grad[4] else None
        return dx, None, None, dposition, dgap, None, None


def _position_gradient(grad: Tensor, offsets: Tensor, table: Tensor) -> Tensor:
    (positions, width), samples = table.shape, offsets.shape[0] - 1
    if not grad.shape[0]:
        return torch.zeros_like(table)
    cols = min(SUM_COLUMNS, power_of_2(width))
    tiles = cdiv(positions, POSITION_ROWS), cdiv(width, cols)
    splits = min(samples, max(1, POSITION_PROGRAMS // (tiles[0] * tiles[1])))
    shares = torch.empty(splits, positions, width, device=grad.device)
    _position_shares[(*tiles, splits)](
        grad, offsets, shares, grad.stride(0), samples, cdiv(samples, splits), positions, width, POSITION_ROWS, cols
    )
    return (shares[0] if splits == 1 else shares.sum(0)).to(table.dtype)


def _gap_gradient(grad: Tensor, buckets: Tensor, table: Tensor) -> Tensor:
    (gaps, width), count = table.shape, grad.shape[0]
    if not count:
        return torch.zeros_like(table)
    cols = max(16, min(SUM_COLUMNS, power_of_2(width)))  # 16: the smallest product of matrices
    programs = min(GAP_PROGRAMS, cdiv(count, GAP_ROWS))
    shares = torch.empty(programs, gaps, width, device=grad.device)
    _gap_shares[(programs, cdiv(width, cols))](
        grad, buckets, shares, grad.stride(0), count, gaps, width, max(16, power_of_2(gaps)), GAP_ROWS, cols
    )
    return shares.sum(0).to(table.dtype)


def encode(
    x: Tensor,
    offsets: Tensor,
    timestamps: Tensor,
    position: Tensor | None,
    gap: Tensor | None,
    scale: float,
    before: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """``x [N, D] * scale`` plus the rows of the tables ``position [P, D]`` and ``gap [T, D]``, of which one may be missing.

    Other arguments as in :meth:`.event_encoding.EventEncoding.forward`. With ``before`` there is no gradient.
    """
    assert before is None or not torch.is_grad_enabled()
    before = None if before is None else (before[0].contiguous(), before[1].contiguous())
    offsets, timestamps = offsets.contiguous(), timestamps.contiguous()  # The kernels take them without strides.
    return _Encode.apply(x, offsets, timestamps, position, gap, scale, before)
