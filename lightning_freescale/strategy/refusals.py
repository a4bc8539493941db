"""Settings under which the training would not be the one of plain TorchRec: refused, or said."""

from __future__ import annotations

from typing import Any

from lightning_freescale.embedding import plan as tables
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.log import log_once

PRECISIONS = ("32-true", "bf16-mixed")


def refuse_inexact(trainer: Any, precision: str, module: Any) -> None:
    """Raise :class:`ConfigurationError` for settings of ``trainer`` that cannot be exact with sharded tables."""
    if precision not in PRECISIONS:
        reason = (
            "its loss scaling cannot reach the tables, which are updated inside backward"
            if precision == "16-mixed"
            else "the tables and their optimizer state are kept in float32"
        )
        raise ConfigurationError(
            f"precision={precision!r} is not supported: {reason}; use one of {', '.join(PRECISIONS)}"
        )
    refuse_accumulation(trainer)
    if trainer.gradient_clip_val and tables.embedding_modules(module):
        log_once(
            f"gradient_clip_val={trainer.gradient_clip_val} clips the dense parameters; the tables are updated inside "
            "backward, row by row, and are not part of the norm"
        )


def refuse_accumulation(trainer: Any) -> None:
    """In every step, too: a callback may schedule it."""
    if trainer.accumulate_grad_batches != 1:
        raise ConfigurationError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}: the tables are updated in every backward, so the "
            "micro-batches would see different rows; use a larger batch_size instead"
        )
