"""``TableLearningRates``: the learning rate of the tables follows the user's optimizers and schedulers.

FBGEMM updates the tables inside backward, with a learning rate of its own. It must change when the user's schedulers
change theirs. The rate of a table is::

    base * (current rate of its group) / (configured rate of its group)

The group of a table is the parameter group that the user put the table into, or the first group of the first
optimizer. The base is the ``lr`` of ``embedding_optimizer``. If that option names none, a group that holds tables alone
gives its own rate, and 0.02 is the default.

The configured rate of a group is the one with which the user made the optimizer. ``OneCycleLR`` and ``CyclicLR`` replace it
when they are made. Their configured rate is ``max_lr``, so the base is the highest rate of the tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR
from torchrec.distributed.model_parallel import DistributedModelParallel

from lightning_freescale.runtime import lightning_compat as compat
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.log import log_once


class _Rule(NamedTuple):
    """How the rate of one FBGEMM kernel follows from the user's optimizers."""

    kernel: dict[str, Any]  # The parameter group of the kernel in the fused optimizer.
    tables: str
    base: float
    optimizer: Optimizer | None  # The optimizer that the kernel follows; ``None``: the rate is constant.
    group: int = 0
    configured: float = 0.0

    def rate(self) -> float:
        if self.optimizer is None:
            return self.base
        return self.base * self.optimizer.param_groups[self.group]["lr"] / self.configured


class TableLearningRates:
    """The learning rates of all tables of one sharded model.

    Args:
        sharded: the sharded model. Its fused optimizer holds one parameter group for each FBGEMM kernel.
        bases: the rate that each of these groups had when the model was sharded.
        explicit: whether the user named a rate for the tables.
        frozen: names of the parameters of tables with ``requires_grad=False``. They keep their weights.
    """

    def __init__(
        self, sharded: DistributedModelParallel, bases: Sequence[float], *, explicit: bool, frozen: Sequence[str] = ()
    ):
        self._fused = sharded.fused_optimizer
        self._bases = {id(group): base for group, base in zip(self._fused.param_groups, bases, strict=True)}
        self._explicit, self._frozen = explicit, frozenset(frozen)
        self._rules: list[_Rule] = []
        self._schedulers: Sequence[Any] = ()

    def follow(self, module: nn.Module, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        """Note which group of ``optimizers`` each table follows. Call it before tables are taken out of the groups.

        Args:
            module: the sharded model.
            optimizers: the user's optimizers.
            schedulers: the user's schedulers of these optimizers.
        """
        self._schedulers = schedulers
        parameters = dict(module.named_parameters())
        names = {id(shards): name for name, shards in self._fused.params.items()}
        self._rules = []
        for kernel in self._fused.param_groups:
            held = [name for name in (names.get(id(shards)) for shards in kernel["params"]) if name in parameters]
            self._rules.append(self._rule(kernel, {name: parameters[name] for name in held}, optimizers))

    def _rule(
        self, kernel: dict[str, Any], tables: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
    ) -> _Rule:
        names, base = ", ".join(map(_table_of, tables)), self._bases[id(kernel)]
        frozen = [name for name in tables if name in self._frozen]
        if frozen:
            if len(frozen) < len(tables):
                raise ConfigurationError(
                    f"table {_table_of(frozen[0])!r} has requires_grad=False, but {names} share one FBGEMM kernel, which updates "
                    "all of them. Put the frozen table into an EmbeddingCollection of its own"
                )
            return _Rule(kernel, names, 0.0, None)
        places = {name: _find(parameter, optimizers) for name, parameter in tables.items()}
        found = {place for place in places.values() if place is not None}
        if len(found) > 1:
            raise ConfigurationError(
                f"tables {names} are in different parameter groups, but they share one FBGEMM kernel, which has one "
                "learning rate. Put them into one group, or into separate EmbeddingCollections"
            )
        if not found:
            first = next(((0, 0) for optimizer in optimizers[:1] if optimizer.param_groups), None)
            if first is None:
                return _Rule(kernel, names, base, None)
            found = {first}
        which, index = found.pop()
        group = optimizers[which].param_groups[index]
        configured = _configured_rate(optimizers[which], index, self._schedulers)
        if not configured:
            raise ConfigurationError(
                f"tables {names}: {type(optimizers[which]).__name__} was made with lr={configured} for the parameter group "
                f"{index}, which they follow. The rate of the tables changes in proportion to that rate, which cannot be formed. "
                "Make the optimizer with the rate that belongs to the lr of the tables, and set the first rate in "
                "on_train_start or with a scheduler. To keep the weights of a table, set requires_grad=False"
            )
        ids = {id(parameter) for parameter in tables.values()}
        if not self._explicit and ids and {id(parameter) for parameter in group["params"]} <= ids | _table_ids(group):
            base = configured
            log_once(f"tables {names}: the learning rate is {base:g}, from their own parameter group")
        return _Rule(kernel, names, base, optimizers[which], index, configured)

    def apply(self) -> None:
        """Hand the current rates to the kernels. FBGEMM reads its rate in forward."""
        changed = False
        for rule in self._rules:
            rate = rule.rate()
            changed |= rule.kernel["lr"] != rate
            rule.kernel["lr"] = rate
        if changed:
            self._fused.step()  # Hands the rates to the kernels. It changes no weight.

    def rules_of(self, collection: Any) -> list[_Rule]:
        """How the rates of the kernels of a sharded collection follow."""
        owners = (child for child in collection.modules() if hasattr(child, "fused_optimizer"))  # it or a part of it
        kernels = {id(group) for owner in owners for group in owner.fused_optimizer.param_groups}
        return [rule for rule in self._rules if id(rule.kernel) in kernels]

    def rates(self) -> dict[str, float]:
        """The current rates for a logger: ``lr-tables``, or one entry for each kernel if they differ."""
        by_kernel = {rule.tables: rule.rate() for rule in self._rules}
        if len(set(by_kernel.values())) == 1:
            return {"lr-tables": next(iter(by_kernel.values()))}
        return {f"lr-tables/{tables}": rate for tables, rate in by_kernel.items()}


def refuse_change(rules: Iterable[_Rule], held: Iterable[float]) -> None:
    """Raise if the rates are not those that a look-up has ``held``."""
    for rule, rate in zip(rules, held, strict=True):
        if rule.rate() != rate:
            raise ConfigurationError(
                f"tables {rule.tables}: their learning rate has changed from {rate:g} to {rule.rate():g} between a look-up and "
                "its backward. The tables read it in the look-up, so this backward would update them with the old rate. Set "
                "the rate before the rows are looked up"
            )


def log_table_rates(trainer: Any, rates: TableLearningRates) -> None:
    """Log the rates of the tables at the steps at which a ``LearningRateMonitor`` logs those of the optimizers."""
    monitors = [callback for callback in trainer.callbacks if type(callback).__name__ == "LearningRateMonitor"]
    if not monitors or not compat.should_update_logs(trainer):
        return
    values = rates.rates()
    trainer.callback_metrics.update({name: torch.tensor(rate) for name, rate in values.items()})
    for logger in trainer.loggers:
        logger.log_metrics(values, step=compat.logging_step(trainer))


def _configured_rate(optimizer: Optimizer, index: int, schedulers: Sequence[Any]) -> float:
    """The rate of a parameter group at which its tables have their own rate."""
    for scheduler in _single_schedulers(schedulers):
        # CyclicLR begins at base_lr and writes it into the group as initial_lr. Only the scheduler itself knows max_lr.
        if isinstance(scheduler, CyclicLR) and scheduler.optimizer is optimizer:
            return float(scheduler.max_lrs[index])
    group = optimizer.param_groups[index]
    # OneCycleLR begins at a fraction of the user's rate, which it keeps as max_lr.
    return group.get("max_lr", group.get("initial_lr", group["lr"]))


def _single_schedulers(schedulers: Iterable[Any]) -> Iterator[Any]:
    """``schedulers``, with those that a SequentialLR or a ChainedScheduler is made of in its place."""
    for scheduler in schedulers:
        parts = getattr(scheduler, "_schedulers", None)
        yield from (scheduler,) if parts is None else _single_schedulers(parts)


def is_table(parameter: nn.Parameter) -> bool:
    """Whether FBGEMM updates this parameter inside backward."""
    return hasattr(parameter, "_in_backward_optimizers")


def _table_ids(group: Mapping[str, Any]) -> set[int]:
    return {id(parameter) for parameter in group["params"] if is_table(parameter)}


def _table_of(parameter: str) -> str:
    """The name of a table, from the name of its parameter."""
    return parameter.removesuffix(".weight").rpartition(".")[2]


def _find(parameter: nn.Parameter, optimizers: Sequence[Optimizer]) -> tuple[int, int] | None:
    """The optimizer and the group that hold ``parameter``, as two indices."""
    for which, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            if any(parameter is other for other in group["params"]):
                return which, index
    return None


def take_tables_out(optimizers: Iterable[Any], fused: Iterable[Any]) -> list[list[list[int]]]:
    """Remove the tables from the user's optimizers. Users write ``Adam(self.parameters())``, but FBGEMM updates the tables.

    Args:
        fused: the parameters that FBGEMM updates.

    Returns:
        For each optimizer and parameter group, the positions at which there were tables.
    """
    tables = {id(parameter) for parameter in fused}
    positions: list[list[list[int]]] = []
    for optimizer in optimizers:
        positions.append([])
        for group in optimizer.param_groups:
            found = [i for i, part in enumerate(group["params"]) if id(part) in tables or is_table(part)]
            for i in found:
                optimizer.state.pop(group["params"][i], None)  # Adagrad makes its state when the user makes it.
            group["params"] = [part for i, part in enumerate(group["params"]) if i not in found]
            positions[-1].append(found)
    return positions
