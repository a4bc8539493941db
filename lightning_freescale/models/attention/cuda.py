"""HSTU attention on CUDA: the Hopper kernels where they run, otherwise the Triton kernels.

Both give the same bits for a history in any batch, but not the same bits as each other. All ranks must therefore select the same
kernel. They do, because the selection depends on the type of GPU, the data type, the width and the size of the tables alone.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_freescale.models.attention import hopper
from lightning_freescale.models.attention.buckets import bucket_edges, relative_times
from lightning_freescale.runtime.log import log_once

if TYPE_CHECKING:
    from lightning_freescale.models.attention.triton_attention import TritonPlan


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

    @cached_property
    def times(self) -> Tensor:
        """``[sum(L)]`` int32, seconds since the first event of the history. All are 0 without bias: nothing depends on them."""
        if self.bias:
            return relative_times(self.timestamps, self.offsets)
        return torch.zeros(len(self.timestamps), dtype=torch.int32, device=self.offsets.device)

    @cached_property
    def hopper(self) -> hopper.Plan:
        total = len(self.timestamps)
        if not self.bias:
            return hopper.plan(self.offsets, total)
        return hopper.plan(self.offsets, total, self.times, _edges(self.offsets.device))

    @cached_property
    def triton(self) -> TritonPlan:
        from lightning_freescale.models.attention import triton_attention  # Triton is installed on CUDA machines only

        return triton_attention.plan(self.offsets, self.times)

    @cached_property
    def zero_bias(self) -> Tensor:
        """A bias table with one entry, which is 0. The Triton kernels always read a table."""
        return torch.zeros(1, device=self.offsets.device)


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
    reason = why_not_hopper(q, k, v, biases)
    if reason is None:
        log_once("attention: the Hopper kernels run, because the GPU is a Hopper")
        return hopper.attention(q, k, v, plan.offsets, alpha, plan.hopper, biases)
    log_once(f"attention: the Triton kernels run and not the Hopper kernels, because {reason}")
    from lightning_freescale.models.attention import triton_attention

    return triton_attention.attention(q, k, v, *(biases or (plan.zero_bias, plan.zero_bias)), alpha, plan.triton)


def why_not_hopper(q: Tensor, k: Tensor, v: Tensor, biases: tuple[Tensor, Tensor] | None) -> str | None:
    """Why the Hopper kernels cannot be used for these inputs, or ``None`` if they can."""
    if not hopper.available(q.device):
        return "the GPU is not a Hopper"
    return hopper.supports(q, k, v, biases)
