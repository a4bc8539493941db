"""The activation of the experts on CUDA, ``f = silu(a) * b``, and its gradients: Triton kernels that compute in float32.

``a`` and ``b`` of a hidden unit lie side by side, in the columns ``2 j`` and ``2 j + 1``.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.models.moe.dispatch import Arrangement

UNITS = 512  # hidden units of a tile
UNIT_ROWS = 1  # of a program; more were slower


@triton.jit
def swiglu_gradients(a, b, df, gate):
    """The gated activation, its share of the gradient of the gate, and the gradients of ``a`` and ``b``."""
    sigmoid = tl.sigmoid(a)
    active = a * sigmoid
    gated = df * gate
    return active * b * gate, df * active * b, gated * b * (sigmoid + active * (1.0 - sigmoid)), gated * active


@triton.jit
def _activate(ab_ptr, f_ptr, ends_ptr, experts, hidden, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLS + tl.arange(0, COLS)
    both = tl.program_id(1) * COLS * 2 + tl.arange(0, 2 * COLS)
    used = (rows < tl.load(ends_ptr + experts - 1))[:, None]
    place = rows.to(tl.int64)[:, None] * hidden
    ab = tl.load(ab_ptr + place * 2 + both[None, :], mask=used & (both < 2 * hidden)[None, :], other=0.0).to(tl.float32)
    a, b = tl.split(tl.reshape(ab, [ROWS, COLS, 2]))
    f = (a * tl.sigmoid(a) * b).to(f_ptr.dtype.element_ty)
    tl.store(f_ptr + place + cols[None, :], f, mask=used & (cols < hidden)[None, :])


@triton.jit
def _activate_backward(
    ab_ptr, df_ptr, dab_ptr, copies_ptr, gates_ptr, dgates_ptr, ends_ptr, experts, hidden,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """``df`` becomes the gated activation. A program sums the gradients of its gates over all hidden units."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = (rows < tl.load(ends_ptr + experts - 1))[:, None]
    copy = tl.load(copies_ptr + rows)
    gate = tl.load(gates_ptr + copy, mask=copy >= 0, other=0.0).to(tl.float32)[:, None]
    long_rows = rows.to(tl.int64)[:, None]
    share = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, hidden, COLS):
        cols, both = start + tl.arange(0, COLS), start * 2 + tl.arange(0, 2 * COLS)
        inside, inside_both = used & (cols < hidden)[None, :], used & (both < 2 * hidden)[None, :]
        ab = tl.load(ab_ptr + long_rows * 2 * hidden + both[None, :], mask=inside_both, other=0.0).to(tl.float32)
        df = tl.load(df_ptr + long_rows * hidden + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(ab, [ROWS, COLS, 2]))
        f, dgate, da, db = swiglu_gradients(a, b, df, gate)
        share += dgate
        dab = tl.reshape(tl.join(da, db), [ROWS, 2 * COLS]).to(dab_ptr.dtype.element_ty)
        tl.store(dab_ptr + long_rows * 2 * hidden + both[None, :], dab, mask=inside_both)
        tl.store(df_ptr + long_rows * hidden + cols[None, :], f.to(df_ptr.dtype.element_ty), mask=inside)
    tl.store(dgates_ptr + rows, tl.sum(share, 1))


def activate(ab: Tensor, index: Arrangement) -> Tensor:
    """``f [R, H]`` of ``ab [R, 2 H]``. Rows after the last expert's are not written."""
    f = ab.new_empty(len(ab), ab.shape[1] // 2)
    units = min(UNITS, triton.next_power_of_2(f.shape[1]))
    grid = (len(f) // UNIT_ROWS, triton.cdiv(f.shape[1], units))
    _activate[grid](ab, f, index.ends, len(index.ends), f.shape[1], UNIT_ROWS, units)
    return f


def activate_backward(df: Tensor, ab: Tensor, dab: Tensor, gates: Tensor, index: Arrangement) -> Tensor:
    """Write the gradient of ``ab [R, 2 H]`` to ``dab``, and the gated ``f`` to the gradient of ``f``, ``df [R, H]``.

    ``dab`` may be ``ab`` itself. Returns the gradient of the gate of each row, ``[R]`` float32.
    """
    dgates = torch.empty(len(ab), device=ab.device)
    units = min(UNITS, triton.next_power_of_2(df.shape[1]))
    pointers = ab, df, dab, index.copies, gates, dgates, index.ends
    _activate_backward[(len(df) // UNIT_ROWS,)](*pointers, len(index.ends), df.shape[1], UNIT_ROWS, units)
    return dgates
