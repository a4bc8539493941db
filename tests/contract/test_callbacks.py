"""Callbacks, loops and logged values: the same hooks and the same values as with ``ddp``."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_freescale import FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks

# Sequence embeddings are frozen and initialized equally, so that the losses are those of ddp up to rounding.
SAME = {"sharding": "table_wise", "balance": "off", "prioritize": False, "monitor": False}


# ---- hooks -----------------------------------------------------------------------------------------------------------
def _names(kind: type, base: type) -> list[str]:
    """The public hooks of a class."""
    found = [name for name in dir(kind) if name.startswith(("on_", "setup", "teardown", "configure_", "prepare_data"))]
    kept = [name for name in found if callable(getattr(kind, name)) and hasattr(base, name)]
    return [name for name in kept if name not in ("configure_gradient_clipping", "configure_sharded_model")]


class Recorder(pl.Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    state_key = "recorder"


def _recorded(name: str) -> Callable[..., Any]:
    def hook(self: Recorder, *args: Any, **kwargs: Any) -> None:
        self.calls.append(f"callback.{name}")

    return hook


for _name in _names(pl.Callback, pl.Callback):
    setattr(Recorder, _name, _recorded(_name))


class RecordedModel(toy.Model):
    """Notes the calls of its own hooks between those of the callback."""

    calls: list[str]

    def test_step(self, batch: toy.Batch, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), batch_size=len(batch.label))

    def predict_step(self, batch: toy.Batch, batch_idx: int) -> Tensor:
        return self(batch.features)


def _passed_on(name: str) -> Callable[..., Any]:
    def hook(self: RecordedModel, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self, "calls"):
            self.calls.append(f"module.{name}")
        return getattr(super(RecordedModel, self), name)(*args, **kwargs)

    return hook


# The transfer hooks must not be overridden: the strategy would move batches when they are used, and not in advance.
TRANSFER = ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device")
for _name in _names(pl.LightningModule, pl.LightningModule):
    if _name not in TRANSFER:
        setattr(RecordedModel, _name, _passed_on(_name))


def record(rank: int) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for name in ("ddp", "freescale"):
        module, recorder = RecordedModel(), Recorder()
        module.calls = recorder.calls
        checkpoint = ModelCheckpoint(dirpath=name, every_n_train_steps=2, save_top_k=-1)
        callbacks: list[pl.Callback] = [recorder, checkpoint]
        options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": callbacks, "limit_train_batches": 4}
        trainer = toy.trainer(
            name,
            2,
            limit_val_batches=2,
            val_check_interval=0.5,
            limit_test_batches=2,
            limit_predict_batches=2,
            **options,
        )
        train, other = toy.loader(32), toy.loader(16, shuffle=False)
        calls: dict[str, list[str]] = {}
        runs: dict[str, Callable[[], Any]] = {
            "fit": partial(trainer.fit, module, train, other),
            "validate": partial(trainer.validate, module, other, verbose=False),
            "test": partial(trainer.test, module, other, verbose=False),
            "predict": partial(trainer.predict, module, other, return_predictions=False),
        }
        for run, start in runs.items():
            start()
            calls[run] = list(recorder.calls)
            recorder.calls.clear()
        found[name] = calls
    return found


def test_hooks_are_called_in_the_same_order_and_number() -> None:
    for rank in run_ranks(record):
        assert rank["ddp"].keys() == rank["freescale"].keys()
        for run, expected in rank["ddp"].items():
            assert len(expected) > 20
            assert rank["freescale"][run] == expected, run
        names = set(rank["ddp"]["fit"])
        assert {"callback.on_save_checkpoint", "module.on_before_zero_grad", "module.on_validation_model_eval"} <= names


# ---- logged values ---------------------------------------------------------------------------------------------------
class Logging(toy.Model):
    """Logs in all flavours. The tables are frozen and begin equally, and the optimizer is the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings.requires_grad_(False)
        self.mean = MeanMetric()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.05)

    def training_step(self, batch: toy.Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        size, value = len(batch.label), loss.detach() + self.global_rank
        self.log("step", value, on_step=True, on_epoch=False, batch_size=size)
        self.log("epoch", value, on_step=False, on_epoch=True, batch_size=size)
        self.log("both", value, on_step=True, on_epoch=True, prog_bar=True, batch_size=size)
        self.log("synced", value, on_step=True, on_epoch=True, sync_dist=True, batch_size=size)
        self.log("sum", value, on_epoch=True, sync_dist=True, reduce_fx="sum", batch_size=size)
        self.log("largest", value, on_epoch=True, sync_dist=True, reduce_fx="max", batch_size=size)
        self.log("rank zero", value, rank_zero_only=True, on_epoch=True, batch_size=size)
        self.log("number", 3, on_epoch=True, sync_dist=True, batch_size=size)
        self.log("not to loggers", value, logger=False, batch_size=size)
        self.log_dict({"a": value, "b": 2 * value}, on_epoch=True, batch_size=size)
        self.mean(value)
        self.log("torchmetric", self.mean, on_step=True, on_epoch=True, batch_size=size)
        return loss

    def validation_step(self, batch: toy.Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        value = self.loss(batch) + self.global_rank
        self.log("val", value, sync_dist=True, batch_size=len(batch.label))
        self.log(f"val_{dataloader_idx}", value, add_dataloader_idx=False, batch_size=len(batch.label))

    def on_train_epoch_end(self) -> None:
        self.log("at the end", float(self.global_rank + self.current_epoch), sync_dist=True)


def log(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, strategy in (("ddp", "ddp"), ("freescale", FreeScaleStrategy(**SAME))):
        pl.seed_everything(1, verbose=False)
        module, logger = Logging(), CSVLogger(name, version=0)
        callbacks = [LearningRateMonitor("step")]
        trainer = toy.trainer(
            strategy,
            2,
            logger=logger,
            log_every_n_steps=2,
            callbacks=callbacks,
            limit_val_batches=2,
            limit_train_batches=5,
        )
        validation = toy.loader(16, shuffle=False)
        trainer.fit(module, toy.loader(), [validation, validation])
        lines = Path(logger.log_dir, "metrics.csv").read_text().splitlines() if rank == 0 else []
        found[name] = {
            kind: {key: float(value) for key, value in getattr(trainer, kind).items()}
            for kind in ("logged_metrics", "callback_metrics", "progress_bar_metrics")
        } | {"file": _without_table_rates(list(csv.DictReader(lines)))}
    return found


def _without_table_rates(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows of a file without what only this strategy logs: the learning rate of the tables, in rows of their own."""
    rows = [{name: value for name, value in row.items() if not name.startswith("lr-tables")} for row in rows]
    return [row for row in rows if any(value for name, value in row.items() if name not in ("step", "epoch"))]


def assert_close(ours: Any, theirs: Any, where: str) -> None:
    assert ours.keys() == theirs.keys(), where
    for name, value in theirs.items():
        if isinstance(value, str):
            ours[name], value = (float(part) if part else -1.0 for part in (ours[name], value))
        assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-7), f"{where}: {name}"


def test_logged_values_are_those_of_ddp() -> None:
    for rank in run_ranks(log):
        ddp, freescale = rank["ddp"], rank["freescale"]
        assert len(ddp["callback_metrics"]) > 20
        assert len(freescale["file"]) == len(ddp["file"])
        for ours, theirs in zip(freescale["file"], ddp["file"], strict=True):
            assert_close(ours, theirs, "file")
        for kind in ("logged_metrics", "callback_metrics", "progress_bar_metrics"):
            extra = freescale[kind].keys() - ddp[kind].keys()
            assert all(name.startswith("lr-") for name in extra), extra
            assert_close({k: v for k, v in freescale[kind].items() if k not in extra}, ddp[kind], kind)


# ---- callbacks of Lightning ------------------------------------------------------------------------------------------
class Worsening(toy.Model):
    """Its score falls from epoch to epoch."""

    def validation_step(self, batch: toy.Batch, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("score", float(-self.current_epoch - self.global_rank), sync_dist=True)


def use_callbacks(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("ddp", "freescale"):
        stopping = EarlyStopping("score", mode="max", patience=2)
        best = ModelCheckpoint(f"{name}/best", "{epoch}", monitor="score", mode="max", save_top_k=2, save_last=True)
        timer = Timer()
        trainer = toy.trainer(
            name,
            2,
            max_epochs=6,
            limit_train_batches=3,
            limit_val_batches=1,
            enable_checkpointing=True,
            callbacks=[stopping, timer, best],
        )
        trainer.fit(Worsening(), toy.loader(16), toy.loader(8, shuffle=False))
        found[name] = {
            "epochs": trainer.current_epoch,
            "stopped": stopping.stopped_epoch,
            "files": sorted(path.name for path in Path(name, "best").iterdir()),
            "best": (Path(best.best_model_path).name, float(best.best_model_score)),  # type: ignore[arg-type]
            "timed": timer.time_elapsed("train") > 0,
        }
        limited = toy.trainer(name, 2, max_epochs=-1, callbacks=[Timer({"seconds": 0})])
        limited.fit(toy.Model(), toy.loader(16))
        found[name]["steps in no time"] = limited.global_step
    return found


def test_stopping_checkpoints_and_timers() -> None:
    for rank in run_ranks(use_callbacks):
        assert rank["freescale"] == rank["ddp"]
        assert rank["ddp"]["epochs"] == 3
        assert rank["ddp"]["files"] == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
        assert rank["ddp"]["timed"]


def tune_batch_size(rank: int) -> list[str]:
    found = []
    for name in ("ddp", "freescale"):
        with pytest.raises(ValueError, match="distributed") as refused:
            Tuner(toy.trainer(name, 2)).scale_batch_size(toy.Model(), toy.loader(16))
        found.append(str(refused.value))
        with pytest.raises(MisconfigurationException, match="distributed") as refused:
            toy.trainer(name, 2, callbacks=[BatchSizeFinder()]).fit(toy.Model(), toy.loader(16))
        found.append(str(refused.value))
    return found


def test_lightning_refuses_to_tune_the_batch_size_of_any_distributed_strategy() -> None:
    for messages in run_ranks(tune_batch_size):
        assert messages[:2] == messages[2:]


# ---- torch.compile ---------------------------------------------------------------------------------------------------
class Compiled(toy.Model):
    def __init__(self) -> None:
        super().__init__()
        self.head: nn.Module = torch.compile(self.head, backend="aot_eager")  # type: ignore[assignment]


def fit_compiled(rank: int) -> list[dict[str, Tensor]]:
    """Weights of a plain model, of one with a compiled part, and of one that is compiled as a whole."""
    found = []
    for kind, whole in ((toy.Model, False), (Compiled, False), (toy.Model, True)):
        pl.seed_everything(1, verbose=False)
        module = kind()
        trainer = toy.trainer(FreeScaleStrategy(prioritize=True), 2, max_steps=3)
        trainer.fit(torch.compile(module, backend="eager") if whole else module, toy.loader(16))
        found.append({name.replace("_orig_mod.", ""): value for name, value in toy.weights(module).items()})
    return found


def test_compiled_models_train_alike() -> None:
    importlib.import_module("torch._inductor.compile_fx")  # The ranks inherit the 500 modules that this imports.
    for eager, *compiled in run_ranks(fit_compiled, timeout=100):
        for weights in compiled:
            assert eager.keys() == weights.keys()
            for name, value in eager.items():
                torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
