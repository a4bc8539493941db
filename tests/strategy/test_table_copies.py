"""Asynchronous saves copy the tables beside the training. The copies equal those of a synchronous save."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.embedding.exchange_mode import ExchangeMode
from lightning_freescale.strategy.checkpoints import device_copy
from tests import toy
from tests.ranks import run_ranks
from tests.strategy.async_saves import assert_same, contents, train, train_only


def prioritized_saves(
    rank: int, folder: str, optimizer: str, applies_late: bool, reads: bool = False
) -> tuple[list[int], list[str]]:
    """The step in whose backward each copy of the tables began, and the calls of ``flush`` before the end of the training."""
    device_copy.SMALL_BYTES = 0  # The tables of the test count as large.
    copy_tables, complete = FreeScaleStrategy.copy_tables, FreeScaleStrategy.complete_tables
    began, completed = [], []

    def noted(self: Any) -> None:
        began.extend(self._module.trainer.global_step for _ in self._open_copies)
        copy_tables(self)
        if not applies_late:  # The copy is made at once, and not by chance after the late gradients.
            for copy in self._open_copies:
                copy.protect()

    def noted_completion(self: Any) -> None:
        if not self._module.trainer.should_stop and self._module.trainer.global_step < 12:
            completed.append(f"step {self._module.trainer.global_step}")
        complete(self)

    FreeScaleStrategy.copy_tables = noted  # type: ignore[method-assign]
    FreeScaleStrategy.complete_tables = noted_completion  # type: ignore[method-assign]
    if not applies_late:
        ExchangeMode.apply_late = lambda self: self.table_streams  # type: ignore[method-assign]
    if reads:
        toy.Model.on_save_checkpoint = lambda self, checkpoint: None  # type: ignore[method-assign]
    train(rank, folder, "sharded", True, prioritize=True, optimizer=optimizer)
    return began, completed


def test_a_save_of_a_prioritized_training_waits_for_the_next_backward(tmp_path: Path) -> None:
    """It copies the tables after the late gradients of its own step, so it need not end their exchange early."""
    optimizer = "adam"  # Its step count is a part of the state.
    run_ranks(_synchronous_saves, args=(str(tmp_path / "sync"), optimizer))
    saves = run_ranks(prioritized_saves, args=(str(tmp_path / "async"), optimizer, True))
    assert saves == [([4, 8], [])] * 2
    run_ranks(prioritized_saves, args=(str(tmp_path / "too_early"), optimizer, False))
    for step in (4, 8, 12):
        name = f"epoch=0-step={step}.ckpt"
        sync, background, early = (contents(tmp_path / run / name) for run in ("sync", "async", "too_early"))
        assert_same(background, sync)
        if step < 12:  # The negative control: the exclusive rows lack the gradients of the last step.
            with pytest.raises(AssertionError):
                assert_same(early, sync)


def test_a_hook_that_may_read_the_tables_gets_complete_ones(tmp_path: Path) -> None:
    for _, completed in run_ranks(prioritized_saves, args=(str(tmp_path), "adagrad", True, True)):
        assert completed == ["step 4", "step 8"]


def _synchronous_saves(rank: int, folder: str, optimizer: str) -> None:
    train(rank, folder, "sharded", False, prioritize=True, optimizer=optimizer)


class TwoSaves(pl.Callback):
    """Saves twice after step 5, and waits for both saves."""

    def __init__(self, folder: str):
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            for name in ("first", "second"):
                trainer.save_checkpoint(self.folder / f"{name}.ckpt", weights_only=False)
            trainer.strategy.finish_saves()  # type: ignore[attr-defined]
            assert (self.folder / "second.ckpt").exists()


class SavesAroundTheBackward(pl.Callback):
    """Saves before and after the backward of the step after step 5."""

    def __init__(self, folder: str):
        self.folder = Path(folder)

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self._save(trainer, "before")

    def on_after_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self._save(trainer, "after")

    def _save(self, trainer: pl.Trainer, name: str) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(self.folder / f"{name}.ckpt", weights_only=False)


def saves_of(rank: int, callback: pl.Callback, asynchronous: bool) -> None:
    """Train 8 prioritized steps, in which ``callback`` saves."""
    device_copy.SMALL_BYTES = 0
    pl.seed_everything(1, verbose=False)
    strategy = FreeScaleStrategy(checkpoint="sharded", balance="off", timeout=20, prioritize=True)
    plugins = [AsyncCheckpointIO()] if asynchronous else []
    trainer = toy.trainer(
        strategy, 2, max_epochs=1, max_steps=8, callbacks=[callback], plugins=plugins, enable_checkpointing=False
    )
    trainer.fit(toy.Model(), toy.loader(48))


def test_saves_that_follow_each_other_without_a_step_are_complete_and_equal(tmp_path: Path) -> None:
    run_ranks(saves_of, args=(TwoSaves(str(tmp_path)), True))
    first, second = (contents(tmp_path / f"{name}.ckpt") for name in ("first", "second"))
    assert_same(first, second)


def test_saves_around_a_backward_equal_synchronous_ones(tmp_path: Path) -> None:
    for name, asynchronous in (("sync", False), ("async", True)):
        run_ranks(saves_of, args=(SavesAroundTheBackward(str(tmp_path / name)), asynchronous))
    before, after = (
        [contents(tmp_path / run / f"{name}.ckpt") for run in ("sync", "async")] for name in ("before", "after")
    )
    assert_same(*before)
    assert_same(*after)
    with pytest.raises(AssertionError):  # The negative control: the backward changes rows.
        assert_same(before[0], after[0])


def fails_after_a_save(rank: int, folder: str) -> bool:
    """Whether the error of the model is raised, though a save waits for a backward that does not come."""
    device_copy.SMALL_BYTES = 0
    step = toy.Model.training_step

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.trainer.global_step == 4:
            raise ValueError("of the model")
        return step(self, *args, **kwargs)

    toy.Model.training_step = training_step  # type: ignore[method-assign]
    try:
        train(rank, folder, "sharded", True, prioritize=True)
    except Exception as error:
        return "of the model" in str(error)
    return False


def test_a_failure_before_the_next_backward_ends_the_save(tmp_path: Path) -> None:
    assert run_ranks(fails_after_a_save, args=(str(tmp_path),)) == [True, True]


def slow_copies(rank: int, folder: str, protected: bool) -> list[bool]:
    """Train with saves whose tables are copied late. Return whether each copy was made in a thread."""
    copy, threads = device_copy.LateCopies._copy, []

    def copy_late(self: Any) -> None:
        time.sleep(0.2)  # The training comes to the next backward pass meanwhile.
        threads.append(threading.current_thread() is not threading.main_thread())
        copy(self)

    device_copy.SMALL_BYTES, device_copy.LateCopies._copy = 0, copy_late  # type: ignore[method-assign]
    if not protected:
        device_copy.LateCopies.protect = lambda self, streams=None: None  # type: ignore[method-assign]
        device_copy.LateCopies.check = lambda self: None  # type: ignore[method-assign]
    train(rank, folder, "sharded", asynchronous=True)
    return threads


def test_tables_that_are_copied_beside_the_training_equal_those_of_a_synchronous_save(tmp_path: Path) -> None:
    run_ranks(train_only, args=(str(tmp_path / "sync"), "sharded", False))
    assert run_ranks(slow_copies, args=(str(tmp_path / "beside"), True)) == [[True] * 3] * 2
    run_ranks(slow_copies, args=(str(tmp_path / "unprotected"), False))
    for step in (4, 8, 12):
        name = f"epoch=0-step={step}.ckpt"
        sync, beside, other = (contents(tmp_path / run / name) for run in ("sync", "beside", "unprotected"))
        assert_same(beside, sync)
        if step < 12:  # The negative control: no step follows the last save.
            with pytest.raises(AssertionError):
                assert_same(other, sync)
