"""The progress bar's values: late ones where the device is behind, the same as ever everywhere else."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from lightning_freescale.runtime.streams import Readback
from lightning_freescale.strategy import progress_bar

BEHIND = 2  # steps that the device of these tests is behind


class Device:
    """Stands for one that is ``BEHIND`` steps behind the host: its values arrive that much later."""

    now = 0
    waited = 0

    class Readback(Readback):
        def __init__(self, value: torch.Tensor):
            super().__init__(value)
            self._due = Device.now + BEHIND

        def arrived(self) -> bool:
            return Device.now >= self._due

        def wait(self) -> torch.Tensor:
            Device.waited += not self.arrived()
            return super().wait()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[Device]:
    monkeypatch.setattr(progress_bar, "Readback", Device.Readback)
    monkeypatch.setattr(progress_bar, "_is_device_number", lambda value: isinstance(value, torch.Tensor))
    Device.now = Device.waited = 0
    return Device


def test_numbers_are_the_newest_that_have_arrived(device: type[Device]) -> None:
    numbers = progress_bar.LateNumbers()
    seen = []
    for device.now in range(7):
        seen.append(numbers.read("loss", torch.tensor(float(device.now))))
    assert seen == [0, 0, 0, 0, 2, 2, 4]  # one is under way at a time
    assert device.waited == 1  # for the first
    assert numbers.settle() == {"loss": 6.0}


class Counting(BoringModel):
    """Logs the number of its step in every way there is."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        step = torch.tensor(float(self.trainer.global_step))
        self.log("now", step, prog_bar=True)
        self.log("both", step, prog_bar=True, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", torch.tensor(float(self.trainer.global_step)), prog_bar=True)


class Watch(pl.Callback):
    def __init__(self, late: bool) -> None:
        self.late = late
        self.bar: list[float] = []
        self.callbacks: list[float] = []

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        if self.late:
            progress_bar.show_late_values(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        Device.now += 1
        self.bar.append(trainer.progress_bar_metrics["now"])
        self.callbacks.append(trainer.callback_metrics["now"].item())

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        progress_bar.show_last_values(trainer)


def fit(folder: Path, late: bool) -> tuple[Watch, pl.Trainer, list[str]]:
    watch, logger = Watch(late), CSVLogger(folder, name=str(late))
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=logger,
        callbacks=[watch],
        max_epochs=2,
        limit_train_batches=5,
        limit_val_batches=1,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Counting())
    return watch, trainer, (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()


def test_the_bar_is_late_and_nothing_else_is(tmp_path: Path, device: type[Device]) -> None:
    expected, plain, plain_log = fit(tmp_path, late=False)
    device.now = 0
    got, trainer, log = fit(tmp_path, late=True)
    assert expected.bar == list(map(float, range(10)))
    assert got.bar != expected.bar
    lags = [now - shown for now, shown in zip(expected.bar, got.bar, strict=True)]
    assert min(lags) >= 0
    assert max(lags) <= 2 * BEHIND
    assert device.waited == 2  # for the first number of either value
    assert got.callbacks == expected.callbacks
    assert log == plain_log
    assert trainer.progress_bar_metrics == plain.progress_bar_metrics  # epoch means, validation and the last step's


@pytest.mark.gpu
@pytest.mark.parametrize("late", [True, False])
def test_no_step_waits_for_the_device(tmp_path: Path, late: bool) -> None:
    """As CUDA itself tells. Without late bars it does tell: the check is able to fail."""

    class Debug(Watch):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            torch.cuda.set_sync_debug_mode("warn" if batch_idx == 2 else "default")

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            pass

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pl.Trainer(
            accelerator="gpu",
            devices=1,
            logger=False,
            callbacks=[Debug(late)],
            max_steps=4,
            limit_val_batches=0,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        ).fit(OnDevice())
    waits = [str(warning.message) for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    assert bool(waits) is not late, waits


class OnDevice(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.log("loss", output["loss"], prog_bar=True)
        return output
