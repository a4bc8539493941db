"""The strategy with a timeline that its loader marks, and a small fit that is watched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.bubbles.monitor import BubbleMonitor
from lightning_freescale.bubbles.timeline import Timeline
from tests import toy


class Watched(FreeScaleStrategy):
    def __init__(self, **kwargs: Any):
        super().__init__(**({"prioritize": False, "balance": "off"} | kwargs))
        self.timeline = Timeline()

    def process_dataloader(self, dataloader: object) -> Any:
        loader = super().process_dataloader(dataloader)
        batches = loader._batches

        def timed() -> Iterator[Any]:
            return self.timeline.iterate("input_wait", batches())

        loader._batches = timed
        return loader


def fit(
    world: int,
    model: pl.LightningModule | None = None,
    loader: Any = None,
    strategy: Any = None,
    monitor: Any = None,
    **options: Any,
) -> pl.Trainer:
    pl.seed_everything(1, verbose=False)
    trainer = toy.trainer(
        strategy or Watched(), world, **({"callbacks": [monitor or BubbleMonitor(every=1)]} | options)
    )
    trainer.fit(model or toy.Model(), loader or toy.loader())
    return trainer
