"""Callbacks of the demo: throughput, losses, and a shorter progress bar."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from torch import Tensor

import lightning_freescale as fs


class DemoProgressBar(TQDMProgressBar):
    """Lightning's progress bar without the version number of the run."""

    def get_metrics(self, *args: Any) -> dict[str, Any]:
        return {name: value for name, value in super().get_metrics(*args).items() if name != "v_num"}


class ThroughputMeter(Callback):
    """Samples per second of training over all ranks, without the time of validation."""

    def __init__(self) -> None:
        self.samples, self.seconds, self._since = 0, 0.0, 0.0

    def on_train_epoch_start(self, *args: Any) -> None:
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: fs.SeqBatch, index: int
    ) -> None:
        now = time.perf_counter()
        self.samples += batch.num_samples
        self.seconds += now - self._since
        self._since = now

    def on_validation_end(self, *args: Any) -> None:
        self._since = time.perf_counter()

    def rate(self, trainer: pl.Trainer) -> float:
        """Samples per second of the whole training; 0 if there was no step. This is a collective."""
        strategy = trainer.strategy
        total = strategy.reduce(torch.tensor(float(self.samples), device=strategy.root_device), reduce_op="sum")
        return float(total) / self.seconds if self.seconds else 0.0


class LossRecorder(Callback):
    """The loss of every step.

    The strategy weights the loss of a rank by its share of the global batch. So the mean over ranks is the loss of the global
    batch.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: Tensor) -> None:
        self._losses.append(loss.detach())

    def of_global_batches(self, trainer: pl.Trainer) -> Tensor:
        """``[steps]`` float64. This is a collective."""
        strategy = trainer.strategy
        own = (
            torch.stack(self._losses).double() if self._losses else torch.zeros(0, device=strategy.root_device).double()
        )
        reduced = strategy.reduce(own, reduce_op="mean")
        assert isinstance(reduced, Tensor)
        return reduced.cpu()
