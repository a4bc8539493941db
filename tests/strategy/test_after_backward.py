"""Tables are updated in the backward. The log names what the user's code does later and what reaches the dense part only."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
)

from lightning_freescale import BubbleMonitor, ConfigurationError, FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks
from tests.strategy.test_several_backwards import Messages


class SkipsSteps(toy.Model):
    """Runs the closure itself, and steps with every second batch only."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        if batch_idx % 2:
            optimizer.step()


class SkipsTheLast(SkipsSteps):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, int(not self.trainer.is_last_batch), optimizer, optimizer_closure)


class StepsLater(SkipsSteps):
    """Runs the closure itself, and always steps."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, 1, optimizer, optimizer_closure)


class Twice(toy.Model):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step(closure=optimizer_closure)


class NoOptimizer(toy.Model):
    def configure_optimizers(self) -> None:
        return None


class Clips(toy.Model):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(*args, **kwargs)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class Scales(pl.Callback):
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        module.head[0].weight.grad.mul_(0.5)


class ManualClips(Clips):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: toy.Batch, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def only_reads(*_: Any) -> None:
    """A hook of the user."""


CALLBACKS = {
    "none": lambda: [],
    "scales": lambda: [Scales()],
    "lambda": lambda: [LambdaCallback(on_after_backward=only_reads)],
    "lightning's": lambda: [
        LambdaCallback(on_train_batch_end=only_reads),
        LearningRateMonitor(),
        GradientAccumulationScheduler({0: 2}),
        BubbleMonitor(),
        ModelCheckpoint("unused", every_n_epochs=100),
    ],
}


def messages_of(rank: int, kind: type[toy.Model], callbacks: str, accumulate: int, prioritize: bool) -> list[str]:
    pl.seed_everything(1, verbose=False)
    messages = Messages()
    logging.getLogger("lightning_freescale").addHandler(messages)
    options = {
        "logger": pl.loggers.CSVLogger("unused") if callbacks == "lightning's" else False,
        "enable_checkpointing": callbacks == "lightning's",
        "accumulate_grad_batches": accumulate,
        "limit_train_batches": 6,
    }
    strategy = FreeScaleStrategy(prioritize=prioritize, balance="off")
    trainer = toy.trainer(strategy, 2, max_epochs=1, callbacks=CALLBACKS[callbacks](), **options)
    try:
        trainer.fit(kind(), toy.loader())
    except ConfigurationError as error:
        return [str(error)]
    words = ("automatic optimization: a backward", "what this does to gradients")
    return [message for message in messages.found if any(word in message for word in words)]


def found(kind: type[toy.Model], callbacks: str = "none", accumulate: int = 1, prioritize: bool = True) -> list[str]:
    """What rank 0 has logged, or the error of all ranks."""
    return run_ranks(messages_of, args=(kind, callbacks, accumulate, prioritize))[0]


@pytest.mark.parametrize("prioritize", [True, False])
def test_a_backward_without_a_step_is_named(prioritize: bool) -> None:
    for kind, accumulate in ((SkipsSteps, 1), (SkipsTheLast, 1), (SkipsTheLast, 3)):
        (message,) = found(kind, accumulate=accumulate, prioritize=prioritize)
        assert message.startswith("automatic optimization: a backward has updated the tables, and no optimizer.step()")


@pytest.mark.parametrize("prioritize", [True, False])
def test_gradients_that_are_computed_twice_are_refused(prioritize: bool) -> None:
    (message,) = found(Twice, prioritize=prioritize)
    assert message.startswith("the gradients of a batch are computed several times")


def test_hooks_that_may_change_gradients_are_named() -> None:
    cases = {
        ("Clips", "none"): "Clips.on_before_optimizer_step, Clips.configure_gradient_clipping: what",
        ("ManualClips", "none"): "ManualClips.on_before_optimizer_step: what",
        ("Model", "scales"): "Scales.on_after_backward: what",
        ("Model", "lambda"): "LambdaCallback.on_after_backward: what",
    }
    kinds = {kind.__name__: kind for kind in (Clips, ManualClips, toy.Model)}
    for (kind, callbacks), start in cases.items():
        (message,) = found(kinds[kind], callbacks)
        assert message.startswith(start)


def test_the_log_is_silent_where_nothing_is_lost(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cases = ((toy.Model, "none", 1), (toy.Model, "none", 3), (StepsLater, "none", 1), (NoOptimizer, "none", 1))
    for kind, callbacks, accumulate in (*cases, (toy.Model, "lightning's", 1)):
        assert found(kind, callbacks, accumulate) == []
