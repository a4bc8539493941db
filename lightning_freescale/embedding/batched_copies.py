"""DDP that copies gradients into its buckets with few launches, where it would otherwise launch a kernel for every parameter.

Since release 2.12, PyTorch's DDP has the option ``batched_grad_copy`` for this. A bucket then costs two launches: one copies
all gradients, the other divides the bucket by the number of ranks. Until the bucket is complete, its gradients stay in memory.

With any release, a layer that knows where DDP sums its gradients can write them there (:mod:`..runtime.gradient_places`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.gradient_places import remember_places

BATCHES_COPIES = "batched_grad_copy" in inspect.signature(DistributedDataParallel.__init__).parameters
FIRST_BACKWARDS = 3  # DDP makes new buckets after the first backward.


class BatchedCopiesDDP(DistributedDataParallel):
    """Copies the gradients of a bucket at once, from PyTorch 2.12 on, and tells layers where it sums their gradients.

    With the option alone, DDP divides a gradient twice if ``backward`` was called with ``create_graph=True``: in its copy and
    with its bucket. It leaves the division to a communication hook, if there is one. DDP's own hook divides and sums as DDP
    without a hook does. It is registered late, so that a hook of the user comes first.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **({"batched_grad_copy": True} if BATCHES_COPIES else {}) | kwargs)
        self._needs_hook = True
        self._backwards_to_learn = FIRST_BACKWARDS if self.gradient_as_bucket_view else 0
        self._learning: Any = None  # the handle of a hook, while a backward is expected whose places are to be learnt

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        if not self._needs_hook and not self._comm_hooks:
            raise ConfigurationError(
                "ddp_comm_hook: DDP takes one hook for the life of a model, and this model has been trained without yours. Set "
                "ddp_comm_hook in the first training of the model"
            )
        super().register_comm_hook(state, hook)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            if self._needs_hook:  # A validation may come before the user registers a hook.
                self._needs_hook = False
                if not self._comm_hooks:
                    self._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
            if self._backwards_to_learn and self._learning is None and self.require_backward_grad_sync:
                self._learning = self._module_parameters[0].register_hook(self._expect_places)
        return super().forward(*inputs, **kwargs)

    def _expect_places(self, gradient: Tensor) -> None:
        """In the backward: learn the places when DDP has summed all gradients, which is in a callback at the end of the backward.

        DDP adds its callback after this one. So this one adds another one, which is then the last.
        """
        add_callback = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
        add_callback(lambda: add_callback(self._learn_places))

    def _learn_places(self) -> None:
        if self._module_parameters[0].grad is None:  # It was no backward, but torch.autograd.grad.
            return
        self._learning.remove()
        self._learning = None
        self._backwards_to_learn -= 1
        remember_places(self._module_parameters)
