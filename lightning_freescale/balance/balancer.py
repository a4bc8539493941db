"""``Balancer``: all that a strategy has to do with load balancing, in the order of a training.

attach -> (observe, advance) for every step -> close
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_freescale._log import say_once
from lightning_freescale.balance.cost import CostModel
from lightning_freescale.balance.exchange import ExchangeLoader
from lightning_freescale.balance.online import OnlineFit
from lightning_freescale.balance.pack import CannotBalance, sample_sizes
from lightning_freescale.balance.planner import Planner, rule_of_thumb
from lightning_freescale.data.sampler import GlobalBatchSampler


class Balancer:
    """Balances train loaders, unless they are balanced already, and learns from measured steps what samples cost.

    Args:
        balance: a mode, a planner, or ``"off"``: loaders are left as they are. Data balanced at the source are not touched
            by it, but their planner learns, too.
        timeout: after which a wait for another rank is an error.
        every: steps between two updates of the cost model.
    """

    def __init__(self, balance: str | Planner, *, timeout: timedelta, every: int = 50):
        self._planner, self._timeout, self._every = Planner.of(balance), timeout, every
        self._balanced: list[GlobalBatchSampler | ExchangeLoader] = []  # what plans with a planner
        self._state: Mapping[str, Any] | None = None
        self.online: OnlineFit | None = None

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
            say_once(f"balance={planner.mode!r}: samples are exchanged between ranks, on the host, ahead of their step")
            loader = ExchangeLoader(
                loader, group=self._new_group(), planner=planner, check=check, pin_memory=pin_memory
            )
            self._balanced.append(loader)
        else:
            return loader
        if self.online is None:
            self.online = OnlineFit(planner, group=self._new_group(), every=self._every)
            if self._state is not None:
                self._restore(self._state)
        return loader

    def _new_group(self) -> dist.ProcessGroup:
        return dist.new_group(backend="gloo", timeout=self._timeout)

    # ---- steps -----------------------------------------------------------------------------------------------------
    @staticmethod
    def sums(batch: Any) -> Any:
        """What :meth:`observe` takes of a batch on the host, ``[4]``; ``None`` if its samples have no length."""
        try:
            return CostModel.sums(*sample_sizes(batch))
        except CannotBalance:
            return None

    def observe(self, sums: Any, seconds: float) -> None:
        """A step of this rank took so long to compute, without waiting for others. May come some steps late."""
        if self.online is not None and sums is not None:
            self.online.observe(sums, seconds)

    def advance(self, step: int) -> None:
        """Before every step, on all ranks: put what was learnt into force."""
        if self.online is not None and (planner := self.online.maybe_update(step)) is not None:
            self._use(planner)

    def _use(self, planner: Planner) -> None:
        for target in self._balanced:
            assert target.planner is not None
            # Loaders may differ in mode and bounds; what samples cost is the same for all.
            shares = planner.shares if target.planner.mode == "variable" else None
            target.planner = replace(target.planner, cost_model=planner.cost_model, shares=shares)

    @property
    def exchanges(self) -> list[ExchangeLoader]:
        """Loaders that exchange samples; their ``stats`` say at what cost."""
        return [target for target in self._balanced if isinstance(target, ExchangeLoader)]

    # ---- checkpoints, the end --------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any] | None:
        """What was learnt, equal on all ranks; ``None`` if nothing is balanced."""
        return None if self.online is None else self.online.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Before or after :meth:`attach`, and before the first batch."""
        self._state = state
        if state is not None and self.online is not None:
            self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        assert self.online is not None
        self.online.load_state_dict(state)
        self._use(self.online.planner)

    def close(self) -> None:
        """Give up what is under way in the background."""
        for exchange in self.exchanges:
            exchange.close()
        if self.online is not None:
            self.online.close()
        self._balanced.clear()
        self.online = None


def _know_better(planner: Planner, cost_model: CostModel | None) -> Planner:
    """``planner`` with the model's own cost in place of the rule of thumb; a cost that the user chose stays."""
    guess = planner.cost_model == rule_of_thumb()
    return replace(planner, cost_model=cost_model) if guess and cost_model is not None else planner
