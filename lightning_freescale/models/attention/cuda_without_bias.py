"""HSTU attention without bias on CUDA: the Hopper kernels where they run, otherwise the Triton kernels.

Both give the same bits for a history in any batch, but not the same bits as each other. All ranks must therefore select the same
kernel. They do, because the selection depends on the type of GPU, the data type and the width alone.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_freescale.models.attention import hopper
from lightning_freescale.runtime.log import log_once

if TYPE_CHECKING:
    from lightning_freescale.models.attention.triton_attention import TritonPlan


class BiasFreePlan:
    """What all layers share of one batch: the plan of whichever kernel they use, made at the first use.

    Args:
        offsets: ``[B + 1]`` integer, from 0 to ``total``.
        total: events of all histories, ``sum(L)``.
    """

    def __init__(self, offsets: Tensor, total: int) -> None:
        self.offsets, self.total = offsets, total

    @cached_property
    def hopper(self) -> hopper.Plan:
        return hopper.plan(self.offsets, self.total)

    @cached_property
    def triton(self) -> TritonPlan:
        from lightning_freescale.models.attention import triton_attention  # Triton is installed on CUDA machines only

        return triton_attention.plan(
            self.offsets, torch.zeros(self.total, dtype=torch.int32, device=self.offsets.device)
        )

    @cached_property
    def zero_bias(self) -> Tensor:
        """A bias table with one entry, which is 0. The Triton kernels always read a table."""
        return torch.zeros(1, device=self.offsets.device)


def attention(q: Tensor, k: Tensor, v: Tensor, alpha: float, plan: BiasFreePlan) -> Tensor:
    """:func:`~lightning_freescale.models.attention.hstu_attention` without bias, on CUDA tensors."""
    reason = why_not_hopper(q, k, v)
    if reason is None:
        log_once("attention: the Hopper kernels run, because attention has no bias and the GPU is a Hopper")
        return hopper.attention(q, k, v, plan.offsets, alpha, plan.hopper)
    log_once(f"attention: the Triton kernels run and not the Hopper kernels, because {reason}")
    from lightning_freescale.models.attention import triton_attention

    return triton_attention.attention(q, k, v, plan.zero_bias, plan.zero_bias, alpha, plan.triton)


def why_not_hopper(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the Hopper kernels cannot be used for these inputs, or ``None`` if they can."""
    if not hopper.available(q.device):
        return "the GPU is not a Hopper"
    return hopper.supports(q, k, v)
