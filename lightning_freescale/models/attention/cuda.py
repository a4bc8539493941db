"""HSTU attention on CUDA: the Hopper kernels where they run, otherwise the Triton kernels.

Both give the same bits for a history in any batch, but not the same bits as each other. All ranks must therefore select the same
kernel. They do, because the selection depends on the type of GPU, the data type, the width and the size of the tables alone.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_freescale.models.attention import hopper
from lightning_freescale.models.attention.buckets import bucket_edges, relative_times
from lightning_freescale.runtime.log import log_once

if TYPE_CHECKING:
    from lightning_freescale.models.attention.triton_attention import TritonPlan

Biases = tuple[Tensor, Tensor]  # tables of the position and of the time


@cache
def _edges(device: torch.device) -> Tensor:
    return bucket_edges(hopper.BIAS_SLOTS).to(device)


class CudaPlan:
    """What all layers share of one batch: the plan of whichever kernel they use, made at the first use.

    Args:
        offsets: ``[B + 1]`` integer, from 0 to ``sum(L)``.
        timestamps: ``[sum(L)]`` int64, seconds.
        bias: whether the attention has the two biases. Without them the times are not used.
    """

    def __init__(self, offsets: Tensor, timestamps: Tensor, bias: bool) -> None:
        self.offsets, self.timestamps, self.bias = offsets, timestamps, bias
        self.rounded: dict[
            tuple[int, torch.dtype], Tensor
        ] = {}  # weights as another type, by ``id``; see fused_layer.py
        self.late: dict[int, Any] = {}  # postponed gradients of a layer, by ``id`` of a weight; see fused_layer.py
        self.graphs: Any = None  # CUDA graphs of the layers for this batch; see layer_graphs/
        self._selected: dict[tuple[torch.dtype, int, int], bool] = {}

    @cached_property
    def times(self) -> Tensor:
        """``[sum(L)]`` int32, seconds since the first event of the history. All are 0 without bias: nothing depends on them."""
        if self.bias:
            return relative_times(self.timestamps, self.offsets)
        return torch.zeros(len(self.timestamps), dtype=torch.int32, device=self.offsets.device)

    @cached_property
    def hopper(self) -> hopper.Plan:
        total, edges = self.timestamps.shape[0], _edges(self.offsets.device) if self.bias else None
        if not self.offsets.is_cuda:
            return hopper.plan(self.offsets, total, self.times if self.bias else None, edges)
        from lightning_freescale.models.attention.hopper_plan import HopperPlan  # Triton is on CUDA machines only

        times = self.timestamps.contiguous() if self.bias else None  # the kernels need offsets and times without gaps
        plan = HopperPlan(self.offsets.long().contiguous(), total, times, edges)
        plan.places = None if self.graphs is None else self.graphs.places
        return plan

    @cached_property
    def triton(self) -> TritonPlan:
        from lightning_freescale.models.attention import triton_attention  # Triton is installed on CUDA machines only

        return triton_attention.plan(self.offsets, self.times)

    def prepare(self, dtype: torch.dtype, qk_dim: int, v_dim: int, biases: Biases | None) -> None:
        """Make the plan of the kernels for heads of these widths now, and not at the first use."""
        if self.timestamps.shape[0] and self.selects_hopper(dtype, qk_dim, v_dim, biases):
            hopper.prepare(*self._heads(dtype, qk_dim, v_dim), biases, self.hopper)

    def selects_hopper(self, dtype: torch.dtype, qk_dim: int, v_dim: int, biases: Biases | None) -> bool:
        """:meth:`runs_hopper` for heads of these widths."""
        q, v = self._heads(dtype, qk_dim, v_dim)
        return self.runs_hopper(q, q, v, biases)

    def _heads(self, dtype: torch.dtype, qk_dim: int, v_dim: int) -> tuple[Tensor, Tensor]:
        """Queries and values of no event."""
        q, v = (torch.empty(0, 1, width, dtype=dtype, device=self.offsets.device) for width in (qk_dim, v_dim))
        return q, v

    def runs_hopper(self, q: Tensor, k: Tensor, v: Tensor, biases: Biases | None) -> bool:
        """The result of :func:`select_hopper`. It is found once for all layers of a batch."""
        key = q.dtype, q.shape[-1], v.shape[-1]
        if key not in self._selected:
            self._selected[key] = select_hopper(q, k, v, biases)
        return self._selected[key]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    alpha: float,
    plan: CudaPlan,
) -> Tensor:
    """:func:`~lightning_freescale.models.attention.hstu_attention` on CUDA tensors."""
    biases = None if position_bias is None or time_bias is None else (position_bias, time_bias)
    if plan.runs_hopper(q, k, v, biases):
        return hopper.attention(q, k, v, plan.offsets, alpha, plan.hopper, biases)
    from lightning_freescale.models.attention import triton_attention

    return triton_attention.attention(q, k, v, biases, alpha, plan.triton)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    biases: Biases | None,
    alpha: float,
    plan: CudaPlan,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`attention` without a gradient, for a function that computes its own. There must be events.

    The Hopper kernels write the result to ``out``, ``[sum(L), H * Dv]`` and contiguous, if it is given.
    """
    if plan.runs_hopper(q, k, v, biases):
        return hopper.forward(q, k, v, biases, alpha, plan.hopper, out)
    assert out is None, "out: the Triton kernels allocate their result"
    from lightning_freescale.models.attention import triton_attention

    triton_attention.check_types(q, k, v)
    return triton_attention.forward(q, k, v, biases, alpha, plan.triton)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    biases: Biases | None,
    alpha: float,
    plan: CudaPlan,
    dout: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    silu: hopper.Silu | None = None,
) -> Biases | tuple[None, None]:
    """The backward pass of :func:`forward`.

    Args:
        dout: ``[sum(L), H, Dv]``, gradient of the output, contiguous, multiplied by :func:`gradient_factor`.
        grads: arrays of the shapes of ``q, k, v`` that receive their gradients. The heads of a row lie side by side; the rows
            may lie apart, by a multiple of 8 elements.
        silu: if queries, keys and values are outputs of a SiLU, ``grads`` can be the gradients of its inputs. The Hopper kernels
            alone do that (:meth:`CudaPlan.runs_hopper`).

    Returns:
        The gradients of both biases, float32, if there are biases.
    """
    found: Biases | None
    if plan.runs_hopper(q, k, v, biases):
        found = hopper.backward(q, k, v, biases, alpha, plan.hopper, dout, grads, silu)
    else:
        assert silu is None, "silu: the Triton kernels compute the gradients of queries, keys and values only"
        from lightning_freescale.models.attention import triton_attention

        found = triton_attention.backward(q, k, v, biases, alpha, plan.triton, dout, grads)
    return (None, None) if biases is None or found is None else found


def gradient_factor(q: Tensor, k: Tensor, v: Tensor, biases: Biases | None, plan: CudaPlan) -> Tensor | None:
    """What :func:`backward` needs the rows of the output's gradient to be multiplied by: ``[sum(L)]`` float32, or nothing."""
    return plan.hopper.scale() if plan.runs_hopper(q, k, v, biases) else None


def select_hopper(q: Tensor, k: Tensor, v: Tensor, biases: Biases | None) -> bool:
    """Whether the Hopper kernels run. The first time it is logged which kernels run, and why."""
    reason = why_not_hopper(q, k, v, biases)
    if reason is None:
        log_once("attention: the Hopper kernels run, because the GPU is a Hopper")
    else:
        log_once(f"attention: the Triton kernels run and not the Hopper kernels, because {reason}")
    return reason is None


def why_not_hopper(q: Tensor, k: Tensor, v: Tensor, biases: Biases | None) -> str | None:
    """Why the Hopper kernels cannot be used for these inputs, or ``None`` if they can."""
    if not hopper.available(q.device):
        return "the GPU is not a Hopper"
    return hopper.supports(q, k, v, biases)
