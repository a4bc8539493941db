"""Numbers of rows that repeat from batch to batch.

cuBLAS chooses a kernel for every new shape of a matrix product. On the host this takes several times as long as a launch: on one
machine 120 to 150 us and not 16 to 24 us (``python -m benchmarks.matrix_products``). The batches of jagged histories hardly ever
have the same number of events, so every product of every layer would pay for it in every step. Therefore HSTU adds rows of zeros
on CUDA, 0.6 % of a large batch on average, until the number of rows is one of few. cuBLAS keeps its choices for them.

The added rows are further histories: no event attends to them, and their outputs are dropped, so they change no other row and add
zeros to the gradients. Empty histories follow, so that the number of histories does not depend on the number of added rows, and
the launches of batches with as many samples and rows are alike (:mod:`.layer_graphs`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SIZES = 64  # numbers of rows between one power of two and the next
ADDED_LENGTH = 64  # events of an added history, and the least difference of two numbers of rows


def even(rows: int) -> int:
    """The least number of rows that is used and is at least ``rows``.

    >>> even(0), even(65), even(10_000), even(100_000)
    (0, 128, 10112, 100352)
    """
    step = _step(rows)
    return -(-rows // step) * step


def _step(rows: int) -> int:
    """Difference of two numbers of rows that are used, near ``rows``."""
    return max(ADDED_LENGTH, (1 << max(rows - 1, 0).bit_length()) // (2 * SIZES))


def add_rows(offsets: Tensor, timestamps: Tensor) -> tuple[Tensor, Tensor]:
    """Add histories until the number of rows is one of :func:`even`.

    Args:
        offsets: ``[B + 1]`` integer, the histories.
        timestamps: ``[N]``, a time for each row. Added rows have the time 0.
    """
    rows = len(timestamps)
    more = even(rows) - rows
    return add_histories(offsets, rows, rows + more), F.pad(timestamps, (0, more)) if more else timestamps


def pad_keys(keys: Tensor, total: int) -> Tensor:
    """``keys [N]`` of :func:`~.dropout.row_keys` for ``total`` rows. Added rows have the key 0."""
    return keys if len(keys) == total else F.pad(keys, (0, total - len(keys)))


def add_histories(offsets: Tensor, rows: int, total: int) -> Tensor:
    """``offsets [B + 1]``, which end at ``rows``, with further histories of at most 64 events up to ``total``.

    The number of further histories follows from ``total`` alone. The last ones may be empty.
    """
    count = _step(total) // ADDED_LENGTH
    ends = torch.arange(rows + ADDED_LENGTH, rows + (count + 1) * ADDED_LENGTH, ADDED_LENGTH, device=offsets.device)
    return torch.cat([offsets, ends.clamp(max=total).to(offsets.dtype)])


class _PadRows(torch.autograd.Function):
    """Adds rows of zeros as ``F.pad`` does. It does not fill the rows that it copies, and copies nothing in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: int, place: Tensor | None) -> Tensor:
        ctx.rows = len(x)
        out = x.new_empty(total, x.shape[1]) if place is None else place.detach()
        out[ctx.rows :].zero_()
        out[: ctx.rows].copy_(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][: ctx.rows], None, None


def pad_rows(x: Tensor, total: int | None, place: Tensor | None = None) -> Tensor:
    """``x [N, D]`` with rows of zeros up to ``total`` rows, if that is given. Then ``place`` receives it, if there is one."""
    if total is None or total == len(x):
        return x
    return _PadRows.apply(x, total, place if place is not None and place.dtype == x.dtype else None)
