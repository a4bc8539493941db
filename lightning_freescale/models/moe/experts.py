"""Experts of a feed-forward layer (MoEBlaze, arXiv 2601.05296) as one function that keeps little for its backward pass.

An expert is ``SwiGLU``: ``(silu(a) * b) w_out`` with ``a`` and ``b`` the even and the odd columns of ``x w_in``. The output of
a token is the sum over its experts, weighted by their gates. No token is dropped.

Kept for backward: the tokens, which are the input, the gates, the index structures, and ``a`` and ``b``. With ``save="x"``
backward computes ``a`` and ``b`` again. No array with a row for each copy of a token and the width of a token is kept: the
copies are gathered again, and the gradient of a gate needs no output of an expert, as ``dgate = (dout w_out^T) . f``.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_freescale.models.moe import products
from lightning_freescale.models.moe.dispatch import Arrangement, arrange_copies
from lightning_freescale.models.tiles import unit_stride

Save = Literal["ab", "x"]


def apply_experts(x: Tensor, gates: Tensor, chosen: Tensor, w_in: Tensor, w_out: Tensor, save: Save = "ab") -> Tensor:
    """The output of each token, ``[T, D]``, of the type of ``x``. It has the same bits in every run.

    Args:
        x: ``[T, D]`` tokens.
        gates: ``[T, k]`` weights of the experts of each token.
        chosen: ``[T, k]`` int64, the experts of each token, which differ.
        w_in: ``[E, D, 2 H]``; the columns ``2 j`` and ``2 j + 1`` give ``a`` and ``b`` of hidden unit ``j``.
        w_out: ``[E, H, D]``.
        save: what is kept for backward.
    """
    return _Experts.apply(unit_stride(x), gates.contiguous(), w_in, w_out, arrange_copies(chosen, len(w_in)), save)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, index: Arrangement, save: Save
    ) -> Tensor:
        ab = None
        if len(x):
            ab, f = products.up(products.gather(x, index), w_in.to(x.dtype), index)
            out = products.combine(products.multiply(f, w_out.to(x.dtype), index), index, gates)
        else:
            out = torch.zeros_like(x)
        ctx.save_for_backward(x, gates, w_in, w_out, *index, ab if save == "ab" else None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, gates, w_in, w_out, *fields, ab = ctx.saved_tensors
        index, owned = Arrangement(*fields), _released(ctx)
        if not len(x):
            return *(torch.zeros_like(part) for part in (x, gates, w_in, w_out)), None, None
        w_in_used, w_out_used = w_in.to(x.dtype), w_out.to(x.dtype)
        if ab is None:
            ab, owned = products.multiply(products.gather(x, index), w_in_used, index), True
        dy = products.gather(unit_stride(dout.to(x.dtype)), index)
        df = products.multiply(dy, w_out_used.mT, index)
        dab = ab if owned else torch.empty_like(ab)
        gated, dgates = products.activation_gradients(df, ab, dab, gates, index)
        dw_out = products.weight_gradient(gated, dy, index)
        del df, gated, dy, ab  # arrays are released as soon as possible: the peak of the memory is here
        dw_in = products.weight_gradient(products.gather(x, index), dab, index)
        dx = products.combine(products.multiply(dab, w_in_used.mT, index), index)
        dgates = dgates[index.rows].to(gates.dtype)
        return dx, dgates, dw_in.to(w_in.dtype), dw_out.to(w_out.dtype), None, None


def _released(ctx: Any) -> bool:
    """Release what was kept for backward, unless backward shall run again (``retain_graph``), and return whether it is released.

    Then nobody else needs ``a`` and ``b``, and their gradients take their memory.
    """
    release = getattr(ctx, "maybe_clear_saved_tensors", None)
    if release is None:
        return False
    release()
    try:
        return ctx.saved_tensors is None
    except RuntimeError:  # the tensors have been released
        return True
