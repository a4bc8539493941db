"""The products of the experts, each over the rows of its copies, and the passes between them; on CUDA by kernels.

Plain products are ``torch.nn.functional.grouped_mm`` on CUDA: a Triton kernel of its own was not faster. The first product on
Hopper GPUs is a Triton kernel, because it also computes the activation. On a CPU every expert has a product of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_freescale.models.moe.dispatch import Arrangement
from lightning_freescale.runtime.log import log_once

ALIGNMENT = 16  # bytes to which grouped_mm and the copy engine need rows to be aligned
GROUPED_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def gather(x: Tensor, index: Arrangement) -> Tensor:
    """The copies of tokens ``x [T, D]`` as rows, ``[R, D]``; empty rows are 0."""
    if x.is_cuda:
        from lightning_freescale.models.moe import rows_triton  # Triton is installed on CUDA machines only

        return rows_triton.gather(x, index)
    return x[index.copies // index.rows.shape[1]]  # a CPU has no empty rows


def combine(y: Tensor, index: Arrangement, gates: Tensor | None = None) -> Tensor:
    """The sum over the rows ``y [R, D]`` of each token, ``[T, D]``, weighted by ``gates [T, k]`` if they are given."""
    if y.is_cuda:
        from lightning_freescale.models.moe import rows_triton

        return rows_triton.combine(y, index, gates)
    total = torch.zeros(len(index.rows), y.shape[1], dtype=y.dtype)
    for choice, rows in enumerate(index.rows.unbind(1)):
        total += y[rows] if gates is None else y[rows] * gates[:, choice, None]
    return total


def multiply(x: Tensor, w: Tensor, index: Arrangement) -> Tensor:
    """``x w [R, N]`` of rows ``x [R, K]`` with ``w [E, K, N]``. On CUDA the rows after the last expert's are not written."""
    if _grouped(x, w):
        return F.grouped_mm(x, w, offs=index.ends)
    y = x.new_empty(len(x), w.shape[2])
    for expert, (first, last) in enumerate(_spans(index)):
        torch.mm(x[first:last], w[expert], out=y[first:last])
    return y


def weight_gradient(x: Tensor, dy: Tensor, index: Arrangement) -> Tensor:
    """``x^T dy [E, K, N]``, summed over the rows of each expert, of rows ``x [R, K]`` and ``dy [R, N]``."""
    if _grouped(x, dy):
        return F.grouped_mm(x.mT, dy, offs=index.ends)
    dw = x.new_empty(len(index.ends), x.shape[1], dy.shape[1])
    for expert, (first, last) in enumerate(_spans(index)):
        torch.mm(x[first:last].T, dy[first:last], out=dw[expert])
    return dw


def up(x: Tensor, w: Tensor, index: Arrangement) -> tuple[Tensor, Tensor]:
    """``ab [R, 2 H]`` and ``f = silu(a) * b [R, H]`` of rows ``x [R, D]`` with ``w [E, D, 2 H]``."""
    if _copy_engine(x, w):
        from lightning_freescale.models.moe import up_triton

        ab, f = up_triton.up(x, w, index, True)
        assert f is not None
        return ab, f
    ab = multiply(x, w, index)
    if ab.is_cuda:
        from lightning_freescale.models.moe import activation_triton

        return ab, activation_triton.activate(ab, index)
    a, b = ab.unflatten(1, (-1, 2)).unbind(2)
    return ab, F.silu(a) * b


def activation_gradients(
    df: Tensor, ab: Tensor, dab: Tensor, gates: Tensor, index: Arrangement
) -> tuple[Tensor, Tensor]:
    """The gradients of the activation.

    Args:
        df: ``[R, H]``, the gradient of the output of the experts, before its gate, times the transposed second weights. Its
            memory is used for the first result.
        ab: ``[R, 2 H]``, the result of the first product.
        dab: ``[R, 2 H]``, where the gradient of ``ab`` is written; it may be ``ab`` itself.
        gates: ``[T, k]``.
        index: the arrangement of the copies.

    Returns:
        ``f`` times its gate, and the gradient of the gate of each row ``[R]``.
    """
    if df.is_cuda:
        from lightning_freescale.models.moe import activation_triton

        return df, activation_triton.activate_backward(df, ab, dab, gates, index)
    a, b = ab.unflatten(1, (-1, 2)).unbind(2)
    gate = gates.flatten()[index.copies][:, None].to(df.dtype)
    sigmoid = a.sigmoid()
    active = a * sigmoid
    f = active * b
    dgates = (df * f).sum(1)
    df *= gate
    torch.stack([df * b * (sigmoid + active * (1 - sigmoid)), df * active], 2, out=dab.unflatten(1, (-1, 2)))
    return torch.mul(f, gate, out=df), dgates


def _spans(index: Arrangement) -> list[tuple[int, int]]:
    """First row and the row after the last one of each expert. On CUDA the host waits for the device."""
    ends = index.ends.tolist()
    return list(zip([0, *ends], ends, strict=False))


def _aligned(*arrays: Tensor) -> bool:
    return all(x.shape[-1] * x.element_size() % ALIGNMENT == 0 for x in arrays)


def _grouped(x: Tensor, other: Tensor) -> bool:
    """Whether ``grouped_mm`` is used."""
    if not x.is_cuda:
        return False
    fits = hasattr(F, "grouped_mm") and x.dtype in GROUPED_TYPES and _aligned(x, other, other.mT)
    if not fits:
        log_once(
            f"experts: one product for each expert, because grouped_mm does not support {x.dtype} with widths "
            f"{x.shape[-1]} and {other.shape[-1]}; the host waits for the device in every product"
        )
    return fits


def _copy_engine(x: Tensor, w: Tensor) -> bool:
    """Whether the kernel of the first product with the copy engine is used: Hopper, 16-bit numbers, aligned rows."""
    if not x.is_cuda or torch.version.hip or x.dtype not in (torch.bfloat16, torch.float16) or not _aligned(x, w):
        return False
    return torch.cuda.get_device_capability(x.device) == (9, 0)
