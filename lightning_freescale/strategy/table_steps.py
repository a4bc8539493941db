"""What automatic optimization does after a backward does not reach the tables: they have been updated in it.

The log names hooks of the user that may change gradients, and backwards that no step of the optimizer follows.
"""

from __future__ import annotations

import logging
from typing import Any

from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.log import log_once
from lightning_freescale.runtime.user_code import is_of_user

# The hooks in which Lightning lets users change gradients, between a backward and the step of the optimizer.
_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")
_CLIPPING_HOOK = "configure_gradient_clipping"  # of the model, and only with automatic optimization


class TableSteps:
    """Compares the backwards of automatic optimization, which update the tables, with the steps of the other parameters."""

    def __init__(self) -> None:
        self._backward = self._updated = False

    def note_backward(self, last: bool) -> None:
        """Before a backward.

        Args:
            last: whether the tables are updated after it. It is False for a micro-batch that is not the last one of its window.
        """
        if self._backward:
            raise ConfigurationError(
                "the gradients of a batch are computed several times. The tables are updated in every backward, so they would "
                "take several steps. Call the closure of optimizer_step once, or give it to optimizer.step()"
            )
        self._backward, self._updated = True, last

    def note_step(self) -> None:
        """The optimizer of the other parameters has stepped."""
        self._updated = False

    def end_batch(self) -> None:
        """Before the next batch, and at the end of the training."""
        if self._updated:
            log_once(
                "automatic optimization: a backward has updated the tables, and no optimizer.step() has followed, because the "
                "hook optimizer_step has called the closure itself. The other parameters skip such a step, and the tables do "
                "not. To skip a step, decide it before the backward, for example with a loss that is multiplied by 0",
                logging.WARNING,
            )
        self._backward = self._updated = False


def name_gradient_hooks(trainer: Any) -> None:
    """Log the user's hooks that run between a backward and the step of the optimizer. Their changes reach no table."""
    model = trainer.lightning_module
    hooks = [(owner, hook) for owner in (model, *trainer.callbacks) for hook in _GRADIENT_HOOKS]
    if model.automatic_optimization:
        hooks.append((model, _CLIPPING_HOOK))
    found = [f"{type(owner).__name__}.{hook}" for owner, hook in hooks if is_of_user(getattr(owner, hook))]
    if found:
        log_once(
            f"{', '.join(found)}: what this does to gradients reaches the dense parameters and not the tables, which have been "
            "updated in the backward before. max_gradient in embedding_optimizer clips the gradients of rows"
        )
