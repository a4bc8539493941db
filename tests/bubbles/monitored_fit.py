"""A short training of the toy model with the monitor."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_freescale import BubbleMonitor, FreeScaleStrategy
from tests import toy


class SynchronousStrategy(FreeScaleStrategy):
    """FreeScaleStrategy with a synchronous exchange and without balancing, by default."""

    def __init__(self, **kwargs: Any):
        super().__init__(**({"prioritize": False, "balance": "off"} | kwargs))


def fit(
    world: int,
    model: pl.LightningModule | None = None,
    loader: Any = None,
    strategy: Any = None,
    monitor: Any = None,
    **options: Any,
) -> pl.Trainer:
    """Train on ``world`` ranks. By default the monitor records every step."""
    pl.seed_everything(1, verbose=False)
    trainer = toy.trainer(
        strategy or SynchronousStrategy(), world, **({"callbacks": [monitor or BubbleMonitor(every=1)]} | options)
    )
    trainer.fit(model or toy.Model(), loader or toy.loader(64))
    return trainer
