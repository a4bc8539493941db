"""The update of rows after a sort of their gradients, for row-wise Adagrad on CUDA.

FBGEMM's update sorts the ids, finds those that are equal, and updates their rows. These are about 25 small kernels, one after the
other. Before them the gradients are brought into the order of the look-up, and divided by the number of ranks. Here a sort, a
gather of indices and two kernels (``adagrad_triton.py``) do all of this.

The next forward waits for the collision rows, so the time between the arrival of their gradients and their update is exposed.
But their ids are known before the backward. So :meth:`GroupedUpdate.group` sorts them while the backward computes.

The formula is FBGEMM's. The gradients and the squares of a row are added in another order, so results may differ by rounding.
FBGEMM updates bags, tables of the other optimizers, and tables that are not in the memory of the GPU. It updates all tables if
deterministic algorithms are required: otherwise the bits would depend on which exchange is faster.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import Tensor

from lightning_freescale.runtime.log import log_once

GROUPED_OPTIMIZER = EmbOptimType.EXACT_ROWWISE_ADAGRAD


class GroupedGradients(NamedTuple):
    """The gradients of each row side by side.

    Args:
        keys: ``[n]`` int32 or int64, ascending: the number of each gradient's row among all rows of the kernel.
        places: ``[n]`` int64, the place of each gradient in wire order.
    """

    keys: Tensor
    places: Tensor


class GroupedUpdate:
    """Updates rows of the tables of one kernel that does not pool.

    Args:
        kernel: FBGEMM's kernel. :meth:`is_possible` says whether its rows can be updated here.
    """

    def __init__(self, kernel: SplitTableBatchedEmbeddingBagsCodegen):
        self._kernel = kernel
        # A sort of int32 numbers takes half as many passes.
        self._key_type = torch.int32 if sum(spec[0] for spec in kernel.embedding_specs) < 2**31 else torch.int64
        self._options: Any = None  # those of the kernel for which ``_possible`` was found
        self._possible = False

    def is_possible(self) -> bool:
        """Whether the kernel has row-wise Adagrad without further options, and float32 tables in the memory of a GPU."""
        if self._options is not self._kernel.optimizer_args:
            self._options = self._kernel.optimizer_args
            reason = self._reason_against()
            self._possible = reason is None
            if reason is not None and not self._kernel.use_cpu:  # a CPU has FBGEMM's update alone
                log_once(f"prioritize: FBGEMM updates the rows of the tables, because {reason}")
        if self._possible and torch.are_deterministic_algorithms_enabled():
            log_once("prioritize: FBGEMM updates the rows of the tables, because deterministic algorithms are required")
            return False
        return self._possible

    def _reason_against(self) -> str | None:
        """Why the rows cannot be updated here; ``None`` if they can."""
        kernel, options = self._kernel, self._options
        if kernel.optimizer != GROUPED_OPTIMIZER:
            return f"the optimizer is {kernel.optimizer}"
        if getattr(kernel, "weight_decay_mode", None) in (WeightDecayMode.COUNTER, WeightDecayMode.COWCLIP):
            return f"the weight decay mode is {kernel.weight_decay_mode}"
        if options.gradient_clipping or options.weight_decay or getattr(options, "max_norm", 0.0):
            return "gradients are clipped or weights decay"
        if kernel._backward_hooks or kernel._backward_pre_hooks:
            return "the kernel has hooks for its backward"
        weights: Any = getattr(kernel, "weights_dev", None)
        sums: Any = getattr(kernel, "momentum1_dev", None)
        rows, widths = [spec[0] for spec in kernel.embedding_specs], {spec[1] for spec in kernel.embedding_specs}
        in_memory = weights is not None and sums is not None and weights.is_cuda and len(widths) == 1
        if not in_memory or weights.numel() != sum(rows) * min(widths) or sums.numel() != sum(rows):
            return "not all of them are in the memory of the GPU, with rows of one width"
        if weights.dtype != torch.float32 or sums.dtype != torch.float32:
            return f"the tables have the type {weights.dtype}"
        return None if importlib.util.find_spec("triton") is not None else "Triton is not installed"

    def group(self, keys: Tensor, wire_position: Tensor) -> GroupedGradients:
        """Sort the gradients by their rows.

        Args:
            keys: ``[n]`` int32 or int64 in lookup order: the number of each id's row among all rows of the kernel.
            wire_position: ``[n]`` int64, the place in wire order of each id.
        """
        ascending, order = torch.sort(keys.to(self._key_type), stable=True)
        return GroupedGradients(ascending, wire_position[order])

    def __call__(self, grouped: GroupedGradients, received: Tensor, divisor: int) -> None:
        """Update the rows with ``received``, the ``[n, D]`` gradients in wire order. Sums are divided by ``divisor``."""
        from lightning_freescale.embedding.adagrad_triton import update_rows  # Triton is on CUDA machines only

        kernel = self._kernel
        weights, sums = kernel.weights_dev.detach(), kernel.momentum1_dev
        rate, eps = kernel.get_learning_rate(), kernel.optimizer_args.eps
        update_rows(*grouped, received, weights, sums, divisor, rate, eps)
