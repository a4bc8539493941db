"""DDP that copies the gradients of a bucket in one launch, where it would otherwise launch a kernel for every parameter.

Since release 2.12, PyTorch's DDP has the option ``batched_grad_copy`` for this. A bucket then costs two launches: one copies
all gradients, the other divides the bucket by the number of ranks. Until the bucket is complete, its gradients stay in memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale.runtime.errors import ConfigurationError

BATCHES_COPIES = "batched_grad_copy" in inspect.signature(DistributedDataParallel.__init__).parameters


class BatchedCopiesDDP(DistributedDataParallel):
    """Copies the gradients of a bucket at once. With PyTorch 2.11, it is plain DDP.

    With the option alone, DDP divides a gradient twice if ``backward`` was called with ``create_graph=True``: in its copy and
    with its bucket. It leaves the division to a communication hook, if there is one. DDP's own hook divides and sums as DDP
    without a hook does. It is registered late, so that a hook of the user comes first.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **({"batched_grad_copy": True} if BATCHES_COPIES else {}) | kwargs)
        self._needs_hook = BATCHES_COPIES

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        if BATCHES_COPIES and not self._needs_hook and not self._comm_hooks:
            raise ConfigurationError(
                "ddp_comm_hook: DDP takes one hook for the life of a model, and this model has been trained without yours. Set "
                "ddp_comm_hook in the first training of the model"
            )
        super().register_comm_hook(state, hook)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._needs_hook and torch.is_grad_enabled():  # A validation may come before the user registers a hook.
            self._needs_hook = False
            if not self._comm_hooks:
                self._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        return super().forward(*inputs, **kwargs)
