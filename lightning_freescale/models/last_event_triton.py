"""The outputs at the last event of each history on CUDA: one kernel adds them up and scales them to length 1."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.models.tiles import power_of_2


@triton.jit(do_not_specialize=["ends_ptr"])
def _last_unit_rows(x_ptr, branch_ptr, shift_ptr, ends_ptr, out_ptr, eps, D: tl.constexpr, COLS: tl.constexpr):
    cols = tl.arange(0, COLS)
    inside = cols < D
    row = tl.maximum(tl.load(ends_ptr + tl.program_id(0)).to(tl.int64) - 1, 0)  # the first history may be empty
    x = tl.load(x_ptr + row * D + cols, mask=inside, other=0.0).to(tl.float32)
    branch = tl.load(branch_ptr + row * D + cols, mask=inside, other=0.0).to(tl.float32)
    total = x + (branch + tl.load(shift_ptr + cols, mask=inside, other=0.0).to(tl.float32))
    total = total.to(x_ptr.dtype.element_ty).to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(total * total, 0)), eps)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * D + cols, total / length, mask=inside)


def last_unit_rows(x: Tensor, branch: Tensor, shift: Tensor, ends: Tensor, eps: float = 1e-12) -> Tensor:
    """The rows ``ends [B] - 1`` of ``x + branch + shift``, each divided by its length or by ``eps``: ``[B, D]`` float32.

    ``x`` and ``branch`` are ``[N, D]`` and contiguous, ``shift`` is ``[D]``. There is no gradient.
    """
    width = x.shape[1]
    out = torch.empty(ends.shape[0], width, device=x.device)
    if out.shape[0]:
        _last_unit_rows[(out.shape[0],)](x, branch, shift, ends.contiguous(), out, eps, width, power_of_2(width))
    return out
