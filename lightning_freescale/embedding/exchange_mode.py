"""Which path rows and gradients take: TorchRec's own exchange, or the schedule of the prioritized one. And over which groups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection

from lightning_freescale import transport
from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.embedding.mode_trial import Chooser, Verdict
from lightning_freescale.embedding.schedule import Schedule
from lightning_freescale.embedding.stages import Groups
from lightning_freescale.runtime.log import log_once
from lightning_freescale.runtime.streams import SideStream


class Paths:
    """``choose_transport -> open -> choose`` before every step ``-> close``; open and close once for each fit.

    Args:
        prioritize, wanted: the strategy's ``prioritize`` and ``transport``.
        timeout: after which a wait for another rank is an error.
    """

    def __init__(
        self,
        prioritize: bool | Literal["auto"],
        wanted: Literal["auto", "nccl", "gloo", "host"],
        timeout: timedelta,
    ):
        self._prioritize, self._wanted, self._timeout = prioritize, wanted, timeout
        self.schedule: Schedule | None = None  # while steps are prioritized, or tried so
        self.verdict: Verdict | None = None  # of prioritize="auto", once it is known
        self._chooser: Chooser | None = None
        self._backend: str | None = None
        self._groups: Groups | None = None

    def choose_transport(self, device: torch.device, one_host: bool) -> None:
        if self._backend is None:
            overlapped = bool(self._prioritize)
            choice = transport.choose(self._wanted, device, overlapped=overlapped, one_host=one_host)
            self._backend = choice.backend

    def table_group(self) -> Any:
        """Where TorchRec's own exchanges run: ids, and the rows and gradients of steps that are not prioritized."""
        ahead = self._prioritize and self._backend != "gloo"  # whose transfers do not wait in line
        if ahead or self._backend == transport.BACKEND_NAME:
            return self._new_group("low")  # ids of later batches do not queue behind this one's AllReduce
        return dist.group.WORLD

    def open(
        self,
        model: nn.Module,
        device: torch.device,
        gather: Callable[[Any], list[Any]],
        copies: SideStream | None,
        timeline: Timeline,
    ) -> None:
        """Put the sharded modules of ``model`` on a schedule, if their exchange may be prioritized. A collective."""
        modules = {
            name: module for name, module in model.named_modules() if isinstance(module, ShardedEmbeddingCollection)
        }
        if not self._prioritize or not modules:
            return
        if self._prioritize == "auto" and dist.get_world_size() == 1:
            log_once("prioritize='auto': synchronous, for one rank has nobody to exchange with")
            return
        if self._groups is None:
            self._groups = Groups(self._new_group("high"), self._new_group("low"))
        self.schedule = Schedule(modules, self._groups, copies, timeline)
        if self._prioritize == "auto":
            self.verdict, self._chooser = None, Chooser(self.schedule, device, gather)

    def _new_group(self, priority: Literal["high", "low"]) -> Any:
        assert self._backend is not None
        return transport.new_group(self._backend, priority, self._timeout)

    def choose(self) -> None:
        """Before a step: which path it takes, as long as ``"auto"`` tries both."""
        if self._chooser is None:
            return
        self.verdict = self._chooser.before_step()
        if self.verdict is None:
            return
        self._chooser = None
        if not self.verdict.prioritized:  # a synchronous step has no use for what it takes
            self.close()
            self._leave_groups()

    def close(self) -> None:
        self._chooser = None
        if self.schedule is not None:
            self.schedule.close()
            self.schedule = None

    def _leave_groups(self) -> None:
        """Of gloo: even if nobody uses a group, a thread of its own wakes a hundred times a second."""
        if self._groups is not None and self._backend == "gloo":
            for group in self._groups:
                dist.destroy_process_group(group)
            self._groups = None
