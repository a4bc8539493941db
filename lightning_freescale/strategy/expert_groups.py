"""The process group over which events travel to the ranks of their experts (``expert_parallel``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from lightning_freescale.runtime.log import log_once
from lightning_freescale.runtime.process_groups import leave


class ExpertGroup:
    """One group for the ``expert_exchange`` of all modules of a model, on the transport of the embedding exchange.

    Args:
        new_group: makes a process group. All ranks call it.
    """

    def __init__(self, new_group: Callable[[Literal["high", "low"]], Any]):
        self._new_group = new_group
        self._group: Any = None
        self._exchanges: list[Any] = []

    def open(self, model: nn.Module) -> None:
        """Give the modules of ``model`` the group, except those that have one. All ranks must call it."""
        found = (getattr(module, "expert_exchange", None) for module in model.modules())
        self._exchanges = [exchange for exchange in found if exchange is not None and exchange.group is None]
        if not self._exchanges or dist.get_world_size() == 1:
            return
        # The next product waits for these events, so they go before embedding rows that are needed later.
        self._group = self._new_group("high")
        for exchange in self._exchanges:
            exchange.group = self._group
        log_once(f"expert_parallel: events travel to their experts over {dist.get_backend(self._group)}")

    def close(self, failed: bool = False) -> None:
        """Take the group away. It stays open if this rank has failed: a transfer that never completes would block its end."""
        for exchange in self._exchanges:
            if exchange.group is self._group:
                exchange.group = None
        if self._group is not None and not failed:
            leave(self._group)
        self._group, self._exchanges = None, []
