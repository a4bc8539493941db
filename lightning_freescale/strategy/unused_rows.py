"""Finds ranks whose loss does not depend on the rows of a collection, though that of another rank does.

The backward of a synchronous look-up sends gradients to all ranks and waits for theirs. If the loss of one rank leaves the rows
out, for example because its batch has no labels, that rank runs no such backward. The others would wait until the timeout, or
take its next transfer for the missing one. So the rank asks the others before it goes on. Prioritized look-ups have a check of
their own (:class:`~lightning_freescale.embedding.call_agreement.CallAgreement`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ShardedModule

from lightning_freescale.embedding.backward_count import on_backward
from lightning_freescale.embedding.call_agreement import LEAVE_OUT, Ask, but_not_on
from lightning_freescale.runtime.errors import FreeScaleError


class UnusedRows:
    """Hooks on the sharded collections of a model, for one training.

    Args:
        model: a model whose tables are sharded.
        rank: this rank.
        ask: asks all ranks a question, and returns those that do not ask the same in time.
        is_prioritized: whether the collection of this name has been called with priorities in this step.
    """

    def __init__(self, model: nn.Module, rank: int, ask: Ask, is_prioritized: Callable[[str], bool]):
        self._rank, self._ask, self._is_prioritized = rank, ask, is_prioritized
        self._names = {child: name for name, child in model.named_modules() if isinstance(child, ShardedModule)}
        self._handles = [child.register_forward_hook(self._after_lookup) for child in self._names]
        self._used: dict[str, bool] = {}  # the collections of this step: whether a backward has run through their rows
        self._left_out: set[str] = set()  # those that no rank used the last time
        self._checks = 0

    @torch.compiler.disable
    def _after_lookup(self, collection: Any, _: Any, output: Any) -> None:
        name = self._names[collection]
        if torch.is_grad_enabled() and not self._is_prioritized(name):
            on_backward(
                output, partial(self._used.__setitem__, name, True), partial(self._used.setdefault, name, False)
            )

    def check(self) -> None:
        """Call it after the last backward of a step, on all ranks. It raises an error if this rank alone has left rows out."""
        self._checks += 1
        for name, used in sorted(self._used.items()):
            if used:
                self._left_out.discard(name)
            elif name not in self._left_out:
                if others := self._ask(f"{name}/no gradients/{self._checks}"):
                    raise FreeScaleError(
                        f"rank {self._rank}: the loss does not depend on the rows of {name or 'the model'}, "
                        f"{but_not_on(others)}. The gradients of rows travel between all ranks, so the loss of every rank must "
                        f"depend on them. {LEAVE_OUT}"
                    )
                self._left_out.add(name)
        self._used.clear()

    def close(self) -> None:
        """Remove the hooks: the model may be used in another run."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
