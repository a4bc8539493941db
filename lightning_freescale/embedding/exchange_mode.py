"""Decides how rows and gradients are exchanged: synchronously by TorchRec, or prioritized. And over which process groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection

from lightning_freescale import transport
from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.embedding.all_to_all import ExchangeGroups, RowKind
from lightning_freescale.embedding.call_agreement import Ask, CallAgreement
from lightning_freescale.embedding.mapped_ids import maps_ids
from lightning_freescale.embedding.mode_review import ModeReview
from lightning_freescale.embedding.mode_trial import ModeChoice, ModeTrial
from lightning_freescale.embedding.schedule import ExchangeSchedule
from lightning_freescale.embedding.support import (
    FEATURE_PROCESSORS,
    MAPPED_IDS,
    SINGLE_RANK,
    reason_against_prioritizing,
)
from lightning_freescale.embedding.table_watch import Gather
from lightning_freescale.embedding.zero_collision.sharded import ShardedZeroCollisionCollection
from lightning_freescale.runtime.log import log_once
from lightning_freescale.runtime.process_groups import is_open, leave
from lightning_freescale.runtime.streams import SideStream

Scheduled: TypeAlias = dict[
    str, ShardedEmbeddingCollection | ShardedEmbeddingBagCollection | ShardedZeroCollisionCollection
]

# Process groups of TorchRec's own exchanges, by backend and timeout. Sharded models keep using theirs after the Trainer that
# sharded them is gone, so these groups stay open for the life of the process, and all models share them.
_table_groups: dict[tuple[str, timedelta], Any] = {}
_failed_groups: set[tuple[str, timedelta]] = set()  # those in which a failed run may have left transfers


class ExchangeMode:
    """The exchange mode of a strategy.

    Call ``choose_transport`` once. Then call, for each fit, ``open``, ``before_step`` before every step, and ``close``.

    Args:
        prioritize: the strategy's ``prioritize``.
        wanted_transport: the strategy's ``transport``.
        timeout: a wait for another rank that takes longer is an error.
        before_update: called before prioritized steps update rows of one kind.

    Attributes:
        schedule: the schedule of prioritized steps; None if all steps are synchronous.
        choice: the result of ``prioritize="auto"``; None until the trial is complete.
    """

    def __init__(
        self,
        prioritize: bool | Literal["auto"],
        wanted_transport: Literal["auto", "nccl", "gloo", "host"],
        timeout: timedelta,
        before_update: Callable[[RowKind], None] | None = None,
    ):
        self._prioritize, self._wanted_transport, self._timeout = prioritize, wanted_transport, timeout
        self._before_update = before_update
        self.schedule: ExchangeSchedule | None = None
        self.choice: ModeChoice | None = None
        self._trial: ModeTrial | None = None
        self._review: ModeReview | None = None
        self._reopen: Callable[[int], None] | None = None  # makes a schedule like the first one, and measures again
        self._backend: str | None = None
        self._groups: ExchangeGroups | None = None
        self._all_scheduled = False  # whether the schedule has all modules with tables

    def choose_transport(self, device: torch.device, one_host: bool) -> None:
        """Choose the backend of all process groups of the tables."""
        if self._backend is None:
            overlapped = bool(self._prioritize)
            self._backend = transport.choose(
                self._wanted_transport, device, overlapped=overlapped, one_host=one_host
            ).backend

    def table_group(self) -> Any:
        """The process group of TorchRec's own exchanges: ids, and the rows and gradients of synchronous steps."""
        # Ids of later batches must not queue behind the AllReduce of this one. Transfers of gloo do not queue.
        prefetches = self._prioritize and self._backend != "gloo"
        if not prefetches and self._backend != transport.BACKEND_NAME:
            return dist.group.WORLD
        key = self._table_key
        if not is_open(_table_groups.get(key)):
            _table_groups[key] = self.new_group("low")
        return _table_groups[key]

    @property
    def _table_key(self) -> tuple[str, timedelta]:
        assert self._backend is not None
        return self._backend, self._timeout

    @staticmethod
    def forget_failed_groups(gather: Gather) -> None:
        """Let the next model that is sharded have new process groups, if a run has failed since the last call. A collective.

        A transfer that a failed run has left in a group would meet the first transfer of the next run.
        """
        for failed in gather(_failed_groups, what="the process groups of failed runs"):
            for key in failed:
                _table_groups.pop(key, None)
        _failed_groups.clear()

    def open(
        self,
        model: nn.Module,
        device: torch.device,
        gather: Gather,
        ask: Ask,
        copies: SideStream | None,
        timeline: Timeline,
    ) -> None:
        """Make a schedule for the sharded modules of ``model``, unless all steps are synchronous. All ranks must call it."""
        modules = _scheduled_modules(model)
        for module in modules.values():
            if isinstance(module, ShardedZeroCollisionCollection):
                module.timeline = timeline
        if not self._prioritize:
            return
        if maps_ids(model):
            log_once(f"prioritize: synchronous exchange, because {MAPPED_IDS}")
            return
        supported = _without_unsupported(modules)
        self._all_scheduled, modules = len(supported) == len(modules), supported
        if not modules:
            return
        if self._prioritize == "auto" and dist.get_world_size() == 1:
            log_once(f"prioritize='auto': synchronous exchange, because {SINGLE_RANK}")
            return

        schedules = itertools.count()

        def make_schedule(micro_batches: int = 1) -> None:
            if self._groups is None:
                self._groups = ExchangeGroups(self.new_group("high"), self.new_group("low", beside_compute=True))
            if self.schedule is None:
                number = next(schedules)  # each schedule counts its steps from 0, and answers stay in the store
                agreement = CallAgreement(gather, lambda question: ask(f"{number}/{question}"))
                self.schedule = ExchangeSchedule(modules, self._groups, copies, timeline, gather, agreement)
                if self._before_update is not None:
                    for module in self.schedule.modules:
                        module.exchange.gradients.before_update = self._before_update
            if self._prioritize == "auto":
                self._trial = ModeTrial(self.schedule, device, gather, micro_batches)

        make_schedule()
        if self._prioritize == "auto":
            self.choice, self._review, self._reopen = None, ModeReview(gather), make_schedule

    @property
    def updates_after_backward(self) -> bool:
        """Whether a step updates tables after its backward only, on the streams :attr:`table_streams`."""
        schedule = self.schedule
        return schedule is not None and self._all_scheduled and schedule.prioritized == schedule.names

    @property
    def table_streams(self) -> list[SideStream]:
        """The streams on which prioritized steps read and update tables."""
        return [] if self.schedule is None else [module.exchange.table_stream for module in self.schedule.modules]

    @property
    def holds_gradients(self) -> bool:
        """Whether a backward has computed gradients of rows, of which none has been applied."""
        return self.schedule is not None and self.schedule.holds_gradients

    @property
    def has_late_gradients(self) -> bool:
        """Whether gradients of the step before have not been applied."""
        modules = [] if self.schedule is None else self.schedule.modules
        return any(module.exchange.gradients.has_late for module in modules)

    def apply_late(self) -> list[SideStream]:
        """Apply the gradients of the step before that are still on their way. Return the streams on which this happens."""
        if self.schedule is not None:
            self.schedule.apply_late()
        return self.table_streams

    def await_late(self) -> None:
        """Make the current stream see the gradients of the step before that are still on their way."""
        self.apply_late()
        self.await_tables()

    def await_tables(self) -> None:
        """Make the current stream wait for what is queued on :attr:`table_streams`. Nothing is exchanged."""
        for stream in self.table_streams:
            stream.join()

    def new_group(self, priority: Literal["high", "low"], beside_compute: bool = False) -> Any:
        """A process group of all ranks on the chosen transport. All ranks must call it."""
        assert self._backend is not None
        return transport.new_group(self._backend, priority, self._timeout, beside_compute)

    def before_step(self, ids: int, micro_batches: int = 1) -> None:
        """While ``"auto"`` measures both modes: set the mode of the next step. Later: measure again if much has changed.

        Args:
            ids: number of ids of this rank's batch.
            micro_batches: of the optimizer step, of which the next step is one.
        """
        if self._review is None:
            return
        assert self._reopen is not None
        self._review.add_step(ids)
        if self._trial is None:
            if (change := self._review.change(self.schedule, micro_batches)) is None:
                return
            log_once(f"prioritize='auto': measures again, because {change}")
            self._reopen(micro_batches)
        elif self._trial.micro_batches != micro_batches:
            self._reopen(micro_batches)
        assert self._trial is not None
        choice = self._trial.before_step()
        if choice is None:
            return
        self.choice, self._trial = choice, None
        assert self.schedule is not None
        self._review.choice_made(self.schedule, micro_batches)
        if not choice.prioritized:  # synchronous steps need neither the schedule nor its process groups
            self._close_schedule()
            if self._backend == "gloo":  # A group of gloo has a thread that wakes a hundred times a second.
                self._leave_groups()

    def stop_clock(self) -> None:
        """Leave the time until :meth:`start_clock` out of the measurement of ``"auto"``: it is no part of a step."""
        if self._trial is not None:
            self._trial.stop_clock()

    def start_clock(self) -> None:
        if self._trial is not None:
            self._trial.start_clock()

    def close(self, failed: bool = False) -> None:
        """Apply all gradients, remove the schedule from the modules, and leave the process groups.

        Args:
            failed: whether this rank has failed. Nothing is exchanged then, because the other ranks may not answer. The
                groups stay open, because a transfer that never completes would block their end.
        """
        if not failed:
            self._close_schedule()
            self._leave_groups()
        else:
            self._abandon()
        self._trial = self._review = self._reopen = self.schedule = self._groups = None

    def _abandon(self) -> None:
        """Give the modules their own forward back after a failure, and exchange nothing."""
        if self._backend is not None:
            _failed_groups.add(self._table_key)
        for module in [] if self.schedule is None else self.schedule.modules:
            module.exchange.forget_ahead()
            module.exchange.module.__dict__.pop("forward", None)

    def _close_schedule(self) -> None:
        self._trial = None
        if self.schedule is not None:
            self.schedule.close()
            self.schedule = None

    def _leave_groups(self) -> None:
        for group in self._groups or ():
            leave(group)
        self._groups = None


def _without_unsupported(modules: Scheduled) -> Scheduled:
    """The modules whose exchange can be prioritized. The log names the others."""
    kept: Scheduled = {}
    for name, module in modules.items():
        collection = module.collection if isinstance(module, ShardedZeroCollisionCollection) else module
        reason = reason_against_prioritizing(collection)
        if reason is None:
            kept[name] = module
        else:
            log_once(f"prioritize: {name} is exchanged synchronously, because it {reason}")
    return kept


def _scheduled_modules(model: nn.Module) -> Scheduled:
    """The modules whose exchange may be prioritized, by name; not a collection inside another one.

    The log names collections with feature processors: they are always synchronous.
    """
    found: Scheduled = {}
    inside: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, ShardedZeroCollisionCollection):
            found[name] = module
            inside.append(f"{name}." if name else "")
        elif isinstance(module, ShardedFeatureProcessedEmbeddingBagCollection):
            inside.append(f"{name}." if name else "")
            log_once(f"prioritize: {name} is exchanged synchronously, because it has {FEATURE_PROCESSORS}")
        elif isinstance(module, (ShardedEmbeddingCollection, ShardedEmbeddingBagCollection)) and not name.startswith(
            tuple(inside)
        ):
            found[name] = module
    return found
