"""Two Triton kernels update rows of tables by row-wise Adagrad. The gradients of a row must be neighbours in a sorted order.

The first kernel is for rows with many gradients, such as those of the most popular items. It divides the sorted order into spans,
and sums the gradients of the row that a span shares with the span before. The second kernel sums the other gradients of each row,
adds the sums of the spans, and updates the row. Every sum has a fixed order.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.runtime.direct_triton import direct

SPAN = 64  # gradients of a span
GRADIENTS_OF_SPAN = 16  # that a program of the first kernel reads at once
GRADIENTS_OF_ROW = 4  # that a program of the second one reads at once. Most rows have one; more would take registers.


@triton.jit
def _part(
    keys_ptr, places_ptr, gradients_ptr, start, end, row, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The sum and the number of the gradients of ``row`` among the ``BLOCK`` gradients from ``start`` on, before ``end``."""
    numbers = start + tl.arange(0, BLOCK)
    own = tl.load(keys_ptr + numbers, mask=numbers < end, other=-1) == row
    place = tl.load(places_ptr + numbers, mask=own, other=0)
    mask = own[:, None] & (columns < WIDTH)[None, :]
    part = tl.load(gradients_ptr + place[:, None] * WIDTH + columns[None, :], mask=mask, other=0).to(tl.float32)
    return tl.sum(part, 0), tl.sum(own.to(tl.int32), 0)


@direct
@triton.jit(do_not_specialize=["count"])
def _sum_spans(
    keys_ptr, places_ptr, gradients_ptr, sums_ptr, count,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One span for each program, from the second on: the sum of its first row, if the span before ends with the same row."""
    span = tl.program_id(0) + 1
    start = span * SPAN
    row = tl.load(keys_ptr + start)
    if row == tl.load(keys_ptr + start - 1):
        columns = tl.arange(0, COLUMNS)
        end = tl.minimum(start + SPAN, count)
        total = tl.zeros([COLUMNS], tl.float32)
        for first in tl.static_range(0, SPAN, BLOCK):
            part, _ = _part(keys_ptr, places_ptr, gradients_ptr, start + first, end, row, columns, WIDTH, BLOCK)
            total += part
        tl.store(sums_ptr + span.to(tl.int64) * WIDTH + columns, total, mask=columns < WIDTH)


@direct
@triton.jit(do_not_specialize=["count", "divisor"])
def _update(
    keys_ptr, places_ptr, gradients_ptr, spans_ptr, weights_ptr, squares_ptr, count, divisor, rate, eps,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each gradient. It updates a row if the gradient is the first one of the row."""
    first = tl.program_id(0)
    # A program waits for the memory twice: here, and for the row and its first gradient, which it reads together.
    row, place = tl.load(keys_ptr + first), tl.load(places_ptr + first)
    before = tl.load(keys_ptr + first - 1, mask=first > 0, other=-1)
    following = tl.load(keys_ptr + first + 1, mask=first + 1 < count, other=-1)
    if row != before:
        columns = tl.arange(0, COLUMNS)
        inside = columns < WIDTH
        own_weights = weights_ptr + row.to(tl.int64) * WIDTH + columns
        squares = tl.load(squares_ptr + row)
        weights = tl.load(own_weights, mask=inside, other=0)
        gradient = tl.load(gradients_ptr + place * WIDTH + columns, mask=inside, other=0).to(tl.float32)
        if row == following:
            span = first // SPAN + 1  # the next one
            end = tl.minimum(span * SPAN, count)
            start, found = first + 1, tl.full([], BLOCK, tl.int32)
            while found == BLOCK:  # after ``end`` it finds none
                part, found = _part(keys_ptr, places_ptr, gradients_ptr, start, end, row, columns, WIDTH, BLOCK)
                gradient += part
                start += BLOCK
            continues = tl.load(keys_ptr + end, mask=end < count, other=-1) == row
            found = tl.where(continues, BLOCK, 0)
            while found == BLOCK:
                spans = (span + tl.arange(0, BLOCK)).to(tl.int64)
                own = tl.load(keys_ptr + spans * SPAN, mask=spans * SPAN < count, other=-1) == row
                mask = own[:, None] & inside[None, :]
                sums = tl.load(spans_ptr + spans[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)
                gradient += tl.sum(sums, 0)
                found = tl.sum(own.to(tl.int32), 0)
                span += BLOCK
        gradient = tl.div_rn(gradient, tl.zeros_like(gradient) + divisor)
        squares += tl.div_rn(tl.sum(gradient * gradient, 0), tl.full([], WIDTH, tl.float32))
        tl.store(squares_ptr + row, squares)
        step = tl.div_rn(tl.full([], 1.0, tl.float32) * rate, tl.sqrt_rn(squares) + eps)
        tl.store(own_weights, weights - step * gradient, mask=inside)


def update_rows(
    keys: Tensor,
    places: Tensor,
    gradients: Tensor,
    weights: Tensor,
    squares: Tensor,
    divisor: int,
    rate: float,
    eps: float,
) -> None:
    """Update each row of ``keys`` once, with the sum of its gradients.

    Args:
        keys: ``[n]`` int32 or int64, ascending: the row of each gradient.
        places: ``[n]`` int64, the place of each gradient in ``gradients``.
        gradients: ``[n, D]``, contiguous.
        weights: ``[rows * D]`` float32.
        squares: ``[rows]`` float32, the state of the optimizer.
        divisor: the sum of the gradients of a row is divided by it.
        rate: the learning rate.
        eps: the ``eps`` of the optimizer.
    """
    count, width = gradients.shape
    if not count:
        return
    columns, spans = triton.next_power_of_2(width), -(-count // SPAN)
    sums = torch.empty(spans, width, device=gradients.device)
    if spans > 1:
        warps = min(max(columns // 64, 1), 8)
        constants = width, columns, SPAN, GRADIENTS_OF_SPAN
        _sum_spans[(spans - 1,)](keys, places, gradients, sums, count, *constants, num_warps=warps)
    warps = min(max(columns // 128, 1), 8)  # A thread reads 16 bytes at once.
    arguments = keys, places, gradients, sums, weights, squares, count, divisor, rate, eps
    _update[(count,)](*arguments, width, columns, SPAN, GRADIENTS_OF_ROW, num_warps=warps)
