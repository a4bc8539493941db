"""Layer norm, layer norm with a gate, and scaling of rows to length 1, as HSTU needs them.

On a CPU they are PyTorch's own operations. On CUDA each is one Triton kernel forward and one backward (:mod:`.norm_triton`):
PyTorch's operations take several times as long as reading and writing the rows does. On CUDA the result already has the type
that the next matrix product needs under autocast.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """``norm(x)``.

    Args:
        x: ``[N, D]``.

    Returns:
        ``[N, D]``. On CUDA it has the type of autocast if autocast is enabled, else the type of ``x``.
    """
    return _on_cuda(norm, x, None) if x.is_cuda else norm(x)


def gated_layer_norm(norm: nn.LayerNorm, x: Tensor, gate: Tensor) -> Tensor:
    """``norm(x) * gate``.

    Args:
        x: ``[N, D]``.
        gate: ``[N, D]``.

    Returns:
        ``[N, D]``. On CUDA it has the type of autocast if autocast is enabled, else the type of ``x``.
    """
    return _on_cuda(norm, x, gate) if x.is_cuda else norm(x) * gate


def unit_rows(x: Tensor, rows: int | None = None) -> Tensor:
    """The first ``rows`` rows of ``x [N, D]``, by default all, each scaled to length 1; float32. Zeros stay zeros."""
    if not x.is_cuda:
        return F.normalize(x[:rows].float(), dim=-1)
    from lightning_freescale.models import norm_triton  # Triton is installed on CUDA machines only

    return norm_triton.unit_rows(x, rows)


def _on_cuda(norm: nn.LayerNorm, x: Tensor, gate: Tensor | None) -> Tensor:
    from lightning_freescale.models import norm_triton  # Triton is installed on CUDA machines only

    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return norm_triton.layer_norm(x, gate, norm.weight, norm.bias, norm.eps, dtype)
