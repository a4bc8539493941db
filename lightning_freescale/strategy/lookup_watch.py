"""Sees the look-ups of tables in one run of a Trainer, and the backwards through them.

FBGEMM reads the learning rate in the look-up and updates the tables in the backward. So the rate must be right before a look-up,
and a backward in a validation would train the tables.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.types import ShardedModule

from lightning_freescale.embedding.backward_count import on_backward
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.strategy.table_learning_rate import TableLearningRates, refuse_change


class LookupWatch:
    """Hooks on the sharded collections of a model.

    Args:
        model: a model whose tables are sharded.
        trainer: the Trainer of the run. Its state tells a training from an evaluation.
        rates: the learning rates of the tables; ``None`` if the run is no training.
    """

    def __init__(self, model: nn.Module, trainer: Any, rates: TableLearningRates | None):
        self._trainer, self._rates = trainer, rates
        self._names = {child: name for name, child in model.named_modules() if isinstance(child, ShardedModule)}
        self._rules = {child: [] if rates is None else rates.rules_of(child) for child in self._names}
        self._handles = [child.register_forward_pre_hook(self._before_lookup) for child in self._names]
        self._backward_handles: list[RemovableHandle] = []
        # Automatic optimization runs no code of the user between a look-up and its backward, and a hook takes time.
        self._always_checks = rates is None or not trainer.lightning_module.automatic_optimization
        self.check_backwards(self._always_checks)

    @torch.compiler.disable
    def _before_lookup(self, *_: Any) -> None:
        if self._rates is not None and torch.is_grad_enabled():
            self._rates.apply()

    @torch.compiler.disable
    def _after_lookup(self, collection: Any, _: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        rules = self._rules[collection]
        held = [rule.rate() for rule in rules]

        def check() -> None:
            self._refuse_in_evaluation(collection)
            refuse_change(rules, held)

        on_backward(output, check)

    def _refuse_in_evaluation(self, collection: nn.Module) -> None:
        trainer = self._trainer
        if trainer.evaluating or trainer.predicting:
            raise ConfigurationError(
                f"rank {trainer.global_rank}: a backward runs through a look-up of {self._names[collection] or 'the model'} "
                f"during {trainer.state.stage.value}. Tables are updated in every backward, so this would train them. Compute "
                "the gradients with respect to the rows, with torch.autograd.grad(loss, rows), or detach the rows first"
            )

    def check_backwards(self, wanted: bool) -> None:
        """From now on, check each backward through a look-up, or stop to do so. A validation within a training needs it."""
        if wanted and not self._backward_handles:
            self._backward_handles = [child.register_forward_hook(self._after_lookup) for child in self._names]
        elif not wanted and not self._always_checks:
            _remove(self._backward_handles)

    def close(self) -> None:
        """Remove the hooks: the model may be used in another run."""
        _remove(self._handles)
        _remove(self._backward_handles)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
