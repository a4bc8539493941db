"""``Balancer``: load balancing as the strategy uses it.

The order of calls is ``attach`` for each train loader, ``watch``, then ``begin_step`` and the methods of ``compute_timer`` for
each step, then ``close``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_freescale.balance.compute_timer import ComputeTimer
from lightning_freescale.balance.cost import CostModel
from lightning_freescale.balance.errors import CannotBalance
from lightning_freescale.balance.exchange import ExchangeLoader
from lightning_freescale.balance.online_cost_fit import OnlineCostFit
from lightning_freescale.balance.planner import Planner, default_cost_model
from lightning_freescale.balance.sample_sizes import sample_sizes
from lightning_freescale.balance.sampler import GlobalBatchSampler, at_the_source
from lightning_freescale.runtime.log import log_once
from lightning_freescale.runtime.process_groups import leave, new_gloo_group

UNTIMED_STEPS = 3  # the first steps are slower, because they create kernels, buffers and connections


class Balancer:
    """Balances train loaders that are not balanced at the source, and can fit the cost model to measured step times.

    Args:
        balance: a mode, a planner, or ``"off"``, which moves no samples. Samplers that follow the strategy use it, too. It does
            not affect loaders that are balanced at the source by themselves; but those use a fitted cost model, too.
        timeout: a wait for another rank that takes longer is an error.
        every: steps between two updates of the cost model. With 0 the cost model does not change and no step is timed.
        prefetched: batches that the training prefetches beyond the current one.
    """

    def __init__(self, balance: str | Planner, *, timeout: timedelta, every: int = 0, prefetched: int = 0):
        self.planner, self._timeout, self._every = Planner.of(balance), timeout, every
        self._prefetched = prefetched
        self._balanced: list[GlobalBatchSampler | ExchangeLoader] = []  # one entry per balanced loader
        self._free_groups: list[dist.ProcessGroup] = []  # process groups of detached loaders
        self._state: Mapping[str, Any] | None = None  # of the cost fit, while there is none
        self._fitted: Planner | None = None  # the latest planner of the cost fit
        self._steps = 0
        self.cost_fit: OnlineCostFit | None = None
        self.compute_timer = ComputeTimer()

    def attach(
        self,
        loader: Any,
        *,
        cost_model: CostModel | None = None,
        check: Callable[[Any], None] | None = None,
        pin_memory: bool = False,
    ) -> Any:
        """Return the train loader to use instead of ``loader``. All ranks must call this together.

        Args:
            loader: yields the local batches of this rank.
            cost_model: the cost model of the neural network. A cost model from the user or a checkpoint replaces it.
            check: raises if a local batch cannot be trained on.
            pin_memory: put batches into page-locked memory.
        """
        if dist.get_world_size() == 1:
            return loader
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, GlobalBatchSampler) and sampler.follows_strategy:
            sampler.follow(self.planner)
            if self.planner is not None:
                log_once(at_the_source(self.planner))
        if isinstance(sampler, GlobalBatchSampler) and sampler.planner is not None:
            planner = _with_cost_model(sampler.planner, cost_model)
            sampler.planner = planner
            self._balanced.append(sampler)
        elif self.planner is not None:
            planner = _with_cost_model(self.planner, cost_model)
            log_once(
                f"balance={planner.mode!r}: the ranks exchange samples in host memory, before the step that uses them"
            )
            group = self._free_groups.pop(0) if self._free_groups else self._new_group()
            loader = ExchangeLoader(loader, group=group, planner=planner, check=check, pin_memory=pin_memory)
            self._balanced.append(loader)
        else:
            if self._every:
                log_once("fit_costs has no effect: the train loader is not balanced")
            return loader
        if self._every and self.cost_fit is None:
            self.cost_fit = OnlineCostFit(planner, group=self._new_group(), every=self._every)
            if self._state is not None:
                self.cost_fit.load_state_dict(self._state)
                self._fitted = self.cost_fit.planner
        if self._fitted is not None:
            _use_costs(self._balanced[-1], self._fitted)
        return loader

    def detach(self) -> None:
        """Detach all loaders before new ones are attached. The fitted costs and the process groups stay in use."""
        self._free_groups += [exchange.leave() for exchange in self.exchanges]
        self._forget()

    def _forget(self) -> None:
        """Forget the attached loaders. Another strategy may use them next."""
        for target in self._balanced:
            if isinstance(target, GlobalBatchSampler):
                target.follow(None)
        self._balanced.clear()

    def _new_group(self) -> dist.ProcessGroup:
        return new_gloo_group(self._timeout)

    # ---- steps -----------------------------------------------------------------------------------------------------
    def watch(self, model: torch.nn.Module, device: torch.device) -> None:
        """Prepare to time the steps of ``model`` on ``device``, if costs are fitted."""
        if self._every:
            self.compute_timer.watch(model, device)

    def sums(self, batch: Any) -> Any:
        """Return the :meth:`CostModel.sums` ``[4]`` of a batch in host memory, for :meth:`begin_step`.

        The result is ``None`` if no costs are fitted, or if the batch has no lengths.
        """
        if self.cost_fit is None:
            return None
        try:
            return self.cost_fit.planner.cost_model.sums(*sample_sizes(batch))
        except CannotBalance:
            return None

    def begin_step(self, sums: Any, batches: int) -> None:
        """Start to use newly fitted costs, and start the timer. All ranks call this before the forward of each step.

        Args:
            sums: the :meth:`sums` of the batch of this rank.
            batches: number of batches of this epoch, including the current one.
        """
        cost_fit = self.cost_fit
        if cost_fit is None:
            return
        for step_sums, seconds in self.compute_timer.finished_steps():
            if seconds > 0:
                cost_fit.observe(step_sums, seconds)
        self._steps += 1
        for sampler in self._balanced:
            if isinstance(sampler, GlobalBatchSampler):
                cost_fit.planned_ahead = max(cost_fit.planned_ahead, sampler.planned - batches)
        planner = cost_fit.maybe_update(self._steps)
        if planner is not None:
            if math.isnan(cost_fit.error):
                log_once("fit_costs: the share of each rank follows measured step times; the costs are not fitted yet")
            elif self._fitted is None:
                log_once(
                    f"fit_costs: samples are now balanced by costs fitted to measured step times: {planner.cost_model}, in "
                    f"seconds; the median error of a step is {cost_fit.error:.0%}"
                )
            self._fitted = planner
            for target in self._balanced:
                _use_costs(target, planner, self._first_batch(batches))
        if sums is not None and self._steps > UNTIMED_STEPS:
            self.compute_timer.start(sums)

    def _first_batch(self, batches: int) -> float:
        """Return the first batch of the epoch that a sampler plans with new costs. No rank has planned it yet."""
        if len(self._balanced) > 1:  # each loader has its own epoch, and ``batches`` counts only one of them
            if len(self.exchanges) < len(self._balanced):
                log_once(
                    "fit_costs: with several train loaders, those balanced at the source use new costs from their next "
                    "epoch on"
                )
            return math.inf
        assert self.cost_fit is not None
        # At the start of an epoch the prefetch depth still grows, so a rank may plan further ahead than it has so far.
        return batches + self.cost_fit.most_planned_ahead + self._prefetched

    @property
    def exchanges(self) -> list[ExchangeLoader]:
        """The attached loaders that exchange samples. Their ``stats`` tell what the exchange costs."""
        return [target for target in self._balanced if isinstance(target, ExchangeLoader)]

    # ---- checkpoints and the end of the training -------------------------------------------------------------------
    def state_dict(self) -> Mapping[str, Any] | None:
        """Return the fitted costs, equal on all ranks; ``None`` if there are none."""
        return self._state if self.cost_fit is None else self.cost_fit.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the fitted costs. Call this before the first batch, before or after :meth:`attach`."""
        if state is not None and not self._every:
            log_once("fit_costs=False: the fitted costs in the checkpoint are not used")
            return
        self._state = state
        if state is not None and self.cost_fit is not None:
            self.cost_fit.load_state_dict(state)
            self._fitted = self.cost_fit.planner
            for target in self._balanced:
                _use_costs(target, self._fitted)

    def close(self) -> None:
        """Stop all work in the background, and leave the process groups. :meth:`state_dict` still returns the fitted costs.

        A thread that waits for another rank keeps its process group.
        """
        self._state = self.state_dict()
        idle_groups = self._free_groups
        for exchange in self.exchanges:
            if exchange.close():
                idle_groups.append(exchange.group)
        if self.cost_fit is not None and self.cost_fit.close():
            idle_groups.append(self.cost_fit.group)
        for group in idle_groups:
            leave(group)
        self.compute_timer.close()
        self._forget()
        self._free_groups.clear()
        self.cost_fit = self._fitted = None
        self._steps = 0


def _with_cost_model(planner: Planner, cost_model: CostModel | None) -> Planner:
    """Return ``planner`` with ``cost_model`` instead of the default cost model. A cost model of the user stays."""
    is_default = planner.cost_model == default_cost_model()
    return replace(planner, cost_model=cost_model) if is_default and cost_model is not None else planner


def _use_costs(target: GlobalBatchSampler | ExchangeLoader, fitted: Planner, first: float | None = None) -> None:
    """Let ``target`` use the costs and the shares of ``fitted``. Its own mode and bounds stay.

    Args:
        target: a sampler, which uses the costs from batch ``first`` of its epoch on, or a loader that exchanges samples. The
            ranks of such a loader find the first batch by themselves.
        fitted: the planner of the cost fit.
        first: ``None`` if the sampler has not planned any batch yet.
    """
    assert target.planner is not None
    shares = fitted.shares if target.planner.mode == "variable" else None
    planner = replace(target.planner, cost_model=fitted.cost_model, shares=shares)
    if first is not None and isinstance(target, GlobalBatchSampler):
        target.use(planner, first)
    else:
        target.planner = planner
