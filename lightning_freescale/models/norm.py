"""Norms of rows, with what follows them in HSTU: the gate, and the type that the next product wants.

The device of the input says which implementation runs: PyTorch's own operations on a CPU, one Triton kernel each way on CUDA
(:mod:`.norm_triton`), where PyTorch's take several times as long as it takes to read and write the rows.
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
        ``[N, D]``; on CUDA of the type of autocast, where it is enabled, else of the type of ``x``.
    """
    return _on_cuda(norm, x, None) if x.is_cuda else norm(x)


def gated_layer_norm(norm: nn.LayerNorm, x: Tensor, gate: Tensor) -> Tensor:
    """``norm(x) * gate``, likewise.

    Args:
        x, gate: ``[N, D]``.
    """
    return _on_cuda(norm, x, gate) if x.is_cuda else norm(x) * gate


def unit_rows(x: Tensor) -> Tensor:
    """``[N, D]`` rows of ``x``, each scaled to length 1; float32. A row of zeros stays one."""
    if not x.is_cuda:
        return F.normalize(x.float(), dim=-1)
    from lightning_freescale.models import norm_triton

    return norm_triton.unit_rows(x)


def _on_cuda(norm: nn.LayerNorm, x: Tensor, gate: Tensor | None) -> Tensor:
    from lightning_freescale.models import norm_triton  # Triton exists on CUDA machines only

    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return norm_triton.layer_norm(x, gate, norm.weight, norm.bias, norm.eps, dtype)
