"""Row-wise Adagrad of the rows of a table in one Triton kernel, for gradients whose rows are known before."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.runtime.direct_triton import direct

GRADIENTS = 16  # of a row that are read at once


@direct
@triton.jit(do_not_specialize=["count", "divisor"])
def _update(
    keys_ptr, places_ptr, gradients_ptr, weights_ptr, sums_ptr, count, divisor, rate, eps,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each gradient. It updates a row if the gradient is the first one of the row."""
    first = tl.program_id(0)
    row = tl.load(keys_ptr + first)
    before = tl.load(keys_ptr + first - 1, mask=first > 0, other=-1)
    if row != before:
        columns = tl.arange(0, COLUMNS)
        inside = columns < WIDTH
        gradient = tl.zeros([COLUMNS], tl.float32)
        start, found = first, tl.full([], BLOCK, tl.int32)
        while found == BLOCK:
            numbers = start + tl.arange(0, BLOCK)
            own = tl.load(keys_ptr + numbers, mask=numbers < count, other=-1) == row
            place = tl.load(places_ptr + numbers, mask=own, other=0)
            mask = own[:, None] & inside[None, :]
            part = tl.load(gradients_ptr + place[:, None] * WIDTH + columns[None, :], mask=mask, other=0).to(tl.float32)
            gradient += tl.sum(tl.div_rn(part, tl.full([BLOCK, COLUMNS], 1.0, tl.float32) * divisor), 0)
            found = tl.sum(own.to(tl.int32), 0)
            start += BLOCK
        squares = tl.load(sums_ptr + row) + tl.div_rn(tl.sum(gradient * gradient, 0), tl.full([], WIDTH, tl.float32))
        tl.store(sums_ptr + row, squares)
        weights = weights_ptr + row * WIDTH + columns
        step = tl.div_rn(tl.full([], 1.0, tl.float32) * rate, tl.sqrt_rn(squares) + eps)
        tl.store(weights, tl.load(weights, mask=inside, other=0) - step * gradient, mask=inside)


def update_rows(
    keys: Tensor,
    places: Tensor,
    gradients: Tensor,
    weights: Tensor,
    sums: Tensor,
    divisor: int,
    rate: float,
    eps: float,
) -> None:
    """Update each row of ``keys`` once, with the sum of its gradients.

    Args:
        keys: ``[n]`` int64, ascending: the row of each gradient.
        places: ``[n]`` int64, the place of each gradient in ``gradients``.
        gradients: ``[n, D]``, contiguous.
        weights: ``[rows * D]`` float32.
        sums: ``[rows]`` float32, the state of the optimizer.
        divisor: every gradient is divided by it.
        rate: the learning rate.
        eps: the ``eps`` of the optimizer.
    """
    count, width = gradients.shape
    if count:
        columns = triton.next_power_of_2(width)
        arguments = keys, places, gradients, weights, sums, count, divisor, rate, eps, width, columns, GRADIENTS
        _update[(count,)](*arguments, num_warps=min(max(columns // 64, 1), 8))
