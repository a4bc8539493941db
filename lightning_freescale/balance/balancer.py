"""``Balancer``: all that a strategy has to do with load balancing, in the order of a training.

attach -> (begin_step, ..., end_step) for every step -> close
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_freescale.balance.cost import CostModel
from lightning_freescale.balance.exchange import ExchangeLoader
from lightning_freescale.balance.online import OnlineFit
from lightning_freescale.balance.pack import CannotBalance, sample_sizes
from lightning_freescale.balance.planner import Planner, rule_of_thumb
from lightning_freescale.balance.sampler import GlobalBatchSampler
from lightning_freescale.balance.stopwatch import Stopwatch
from lightning_freescale.runtime.log import log_once

WARM_UP = 3  # steps that are not timed: kernels, buffers and connections are made in them


class Balancer:
    """Balances train loaders, unless they are balanced already, and can learn from timed steps what samples cost.

    Args:
        balance: a mode, a planner, or ``"off"``: loaders are left as they are. Data balanced at the source are not touched
            by it, but their planner learns, too.
        timeout: after which a wait for another rank is an error.
        every: steps between two updates of the cost model; 0: it stays as it is, and no step is timed.
        prefetched: batches that the training fetches ahead of the current one.
    """

    def __init__(self, balance: str | Planner, *, timeout: timedelta, every: int = 0, prefetched: int = 0):
        self._planner, self._timeout, self._every = Planner.of(balance), timeout, every
        self._prefetched = prefetched
        self._balanced: list[GlobalBatchSampler | ExchangeLoader] = []  # what plans with a planner
        self._free: list[dist.ProcessGroup] = []  # of exchanges that are over
        self._state: Mapping[str, Any] | None = None
        self._learnt: Planner | None = None  # nothing yet
        self._steps = 0
        self.online: OnlineFit | None = None
        self.stopwatch = Stopwatch()

    def attach(
        self,
        loader: Any,
        *,
        cost_model: CostModel | None = None,
        check: Callable[[Any], None] | None = None,
        pin_memory: bool = False,
    ) -> Any:
        """The train loader to use in place of ``loader``. A collective.

        Args:
            loader: of local batches.
            cost_model: of the model in training, where neither the user nor a checkpoint knows better.
            check: raises if a local batch cannot be trained on.
            pin_memory: put batches into page-locked memory.
        """
        if dist.get_world_size() == 1:
            return loader
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, GlobalBatchSampler) and sampler.planner is not None:
            planner = _know_better(sampler.planner, cost_model)
            sampler.planner = planner
            self._balanced.append(sampler)
        elif self._planner is not None:
            planner = _know_better(self._planner, cost_model)
            log_once(f"balance={planner.mode!r}: samples are exchanged between ranks, on the host, ahead of their step")
            group = self._free.pop(0) if self._free else self._new_group()
            loader = ExchangeLoader(loader, group=group, planner=planner, check=check, pin_memory=pin_memory)
            self._balanced.append(loader)
        else:
            if self._every:
                log_once("fit_costs: nothing is balanced, so nothing is fitted")
            return loader
        if self._every and self.online is None:
            self.online = OnlineFit(planner, group=self._new_group(), every=self._every)
            if self._state is not None:
                self.online.load_state_dict(self._state)
                self._learnt = self.online.planner
        if self._learnt is not None:
            _plan_with(self._balanced[-1], self._learnt)
        return loader

    def detach(self) -> None:
        """Give up all loaders, for they are loaded anew: what was learnt stays, and process groups are used again."""
        self._free += [exchange.leave() for exchange in self.exchanges]
        self._balanced.clear()

    def _new_group(self) -> dist.ProcessGroup:
        return dist.new_group(backend="gloo", timeout=self._timeout)

    # ---- steps -----------------------------------------------------------------------------------------------------
    def watch(self, model: torch.nn.Module, device: torch.device) -> None:
        """Be ready to time the steps of ``model``, if costs are fitted."""
        if self._every:
            self.stopwatch.watch(model, device)

    def sums(self, batch: Any) -> Any:
        """What :meth:`begin_step` takes of a batch on the host, ``[4]``; ``None`` if that is of no use."""
        if self.online is None:
            return None
        try:
            return CostModel.sums(*sample_sizes(batch))
        except CannotBalance:
            return None

    def begin_step(self, sums: Any, batches: int) -> None:
        """Before forward, on all ranks: put what was learnt into force, and start the stopwatch.

        Args:
            sums: of this rank's batch, see :meth:`sums`.
            batches: of this epoch up to the current one.
        """
        online = self.online
        if online is None:
            return
        for seen, seconds in self.stopwatch.take():
            if seconds > 0:
                online.observe(seen, seconds)
        self._steps += 1
        for sampler in self._balanced:
            if isinstance(sampler, GlobalBatchSampler):
                online.ahead = max(online.ahead, sampler.drawn - batches)
        planner = online.maybe_update(self._steps)
        if planner is not None:
            if self._learnt is None:
                log_once(f"fit_costs: samples are dealt by {planner.cost_model}, in seconds; error {online.error:.0%}")
            self._learnt = planner
            for target in self._balanced:
                _plan_with(target, planner, self._first(batches))
        if sums is not None and self._steps > WARM_UP:
            self.stopwatch.start(sums)

    def _first(self, batches: int) -> float:
        """The batch of the epoch that new costs are for, where samples are dealt at the source."""
        if len(self._balanced) > 1:  # each is in an epoch of its own, and ``batches`` are of one of them
            if len(self.exchanges) < len(self._balanced):
                log_once(
                    "fit_costs: with several loaders, those balanced at the source take new costs at their next epoch"
                )
            return math.inf
        assert self.online is not None
        return (
            batches + self.online.most_ahead + self._prefetched
        )  # none is planned yet; look-ahead grows as an epoch begins

    @property
    def exchanges(self) -> list[ExchangeLoader]:
        """Loaders that exchange samples; their ``stats`` say at what cost."""
        return [target for target in self._balanced if isinstance(target, ExchangeLoader)]

    # ---- checkpoints, the end --------------------------------------------------------------------------------------
    def state_dict(self) -> Mapping[str, Any] | None:
        """What was learnt, equal on all ranks; ``None`` if nothing is."""
        return self._state if self.online is None else self.online.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Before or after :meth:`attach`, and before the first batch."""
        if state is not None and not self._every:
            log_once("fit_costs=False: the costs that the checkpoint has learnt are not used")
            return
        self._state = state
        if state is not None and self.online is not None:
            self.online.load_state_dict(state)
            self._learnt = self.online.planner
            for target in self._balanced:
                _plan_with(target, self._learnt)

    def close(self) -> None:
        """Give up what is under way in the background. What was learnt stays."""
        self._state = self.state_dict()
        for exchange in self.exchanges:
            exchange.close()
        if self.online is not None:
            self.online.close()
        self.stopwatch.close()
        self._balanced.clear()
        self._free.clear()
        self.online = self._learnt = None
        self._steps = 0


def _know_better(planner: Planner, cost_model: CostModel | None) -> Planner:
    """``planner`` with the model's own cost in place of the rule of thumb; a cost that the user chose stays."""
    guess = planner.cost_model == rule_of_thumb()
    return replace(planner, cost_model=cost_model) if guess and cost_model is not None else planner


def _plan_with(target: GlobalBatchSampler | ExchangeLoader, learnt: Planner, first: float | None = None) -> None:
    """Let ``target`` plan by what was ``learnt``: from batch ``first`` of its epoch on, at once if nothing is planned yet.

    Loaders may differ in mode and bounds; what samples cost is the same for all.
    """
    assert target.planner is not None
    shares = learnt.shares if target.planner.mode == "variable" else None
    planner = replace(target.planner, cost_model=learnt.cost_model, shares=shares)
    if first is not None and isinstance(target, GlobalBatchSampler):
        target.use(planner, first)
    else:
        target.planner = planner  # of an exchange, the ranks settle among them from which batch on
