"""Asynchronous saves: exact, crash-safe, and loud when they fail."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

import lightning_freescale as fs
from lightning_freescale import CheckpointError, FreeScaleStrategy
from lightning_freescale.embedding.exchange_mode import ExchangeMode
from lightning_freescale.strategy.checkpoints import device_copy
from lightning_freescale.strategy.checkpoints import file as checkpoint_file
from lightning_freescale.strategy.checkpoints import folder as checkpoint
from lightning_freescale.strategy.checkpoints import saving as checkpoint_saving
from lightning_freescale.strategy.checkpoints.background import BackgroundSaves
from lightning_freescale.strategy.checkpoints.format import is_asynchronous, is_lightnings_io, writing_io
from tests import toy
from tests.ranks import RankFailed, run_ranks

FORMATS = ["file", "sharded"]


def train(
    rank: int,
    folder: str,
    kind: str,
    asynchronous: bool,
    prioritize: Any = "auto",
    optimizer: str = "adagrad",
    **options: Any,
) -> pl.Trainer:
    pl.seed_everything(1, verbose=False)
    save = pl.callbacks.ModelCheckpoint(dirpath=folder, every_n_train_steps=4, **{"save_top_k": -1, **options})
    trainer = toy.trainer(
        FreeScaleStrategy(
            checkpoint=kind,
            balance="off",
            timeout=20,
            prioritize=prioritize,
            embedding_optimizer={"optimizer": optimizer},
        ),
        2,
        max_epochs=1,
        enable_checkpointing=True,
        callbacks=[save],
        plugins=[AsyncCheckpointIO()] if asynchronous else [],
    )
    trainer.fit(toy.Model(), toy.loader(48))  # 12 steps
    return trainer


def module_that_writes(kind: str) -> tuple[Any, str]:
    return (checkpoint_file, "write") if kind == "file" else (checkpoint, "save")


def delayed(rank: int, folder: str, kind: str, copies: bool) -> list[bool]:
    """Train with saves that begin to write only when training has gone on for two steps. Return what each save saw."""
    owner, name = module_that_writes(kind)
    write, threads, steps = getattr(owner, name), [], threading.Semaphore(0)

    def write_late(*args: Any) -> None:
        threads.append(threading.current_thread() is not threading.main_thread())
        while steps.acquire(blocking=False):
            pass  # These steps were done before the save.
        if not any(isinstance(part, str) and "step=12" in part for part in args):  # No step follows the last save.
            assert all(steps.acquire(timeout=30) for _ in range(2))
        write(*args)

    end = toy.Model.optimizer_step

    def optimizer_step(self: Any, *args: Any, **kwargs: Any) -> None:
        end(self, *args, **kwargs)
        steps.release()

    toy.Model.optimizer_step = optimizer_step  # type: ignore[method-assign]
    setattr(owner, name, write_late)
    if not copies:
        checkpoint_saving.snapshot = device_copy.snapshot = lambda value, *args, **kwargs: value
    train(rank, folder, kind, asynchronous=True)
    return threads


@pytest.mark.parametrize("kind", FORMATS)
def test_an_asynchronous_save_equals_a_synchronous_one(tmp_path: Path, kind: str) -> None:
    run_ranks(train_only, args=(str(tmp_path / "sync"), kind, False))
    threads = run_ranks(delayed, args=(str(tmp_path / "async"), kind, True))
    assert threads[0] == [True] * 3
    run_ranks(delayed, args=(str(tmp_path / "uncopied"), kind, False))
    for step in (4, 8, 12):
        name = f"epoch=0-step={step}.ckpt"
        sync, background, uncopied = (contents(tmp_path / run / name) for run in ("sync", "async", "uncopied"))
        assert_same(background, sync)
        if step < 12:  # The negative control: without a copy, training changes what is written.
            with pytest.raises(AssertionError):
                assert_same(uncopied, sync)


def prioritized_saves(
    rank: int, folder: str, optimizer: str, applies_late: bool, reads: bool = False
) -> tuple[list[int], list[str]]:
    """The step in whose backward each copy of the tables began, and the calls of ``flush`` before the end of the training."""
    device_copy.SMALL_BYTES = 0  # The tables of the test count as large.
    copy_tables, flush = FreeScaleStrategy.copy_tables, FreeScaleStrategy.flush
    began, flushes = [], []

    def noted(self: Any) -> None:
        began.extend(self._module.trainer.global_step for _ in self._open_copies)
        copy_tables(self)

    def noted_flush(self: Any) -> None:
        if not self._module.trainer.should_stop and self._module.trainer.global_step < 12:
            flushes.append(f"step {self._module.trainer.global_step}")
        flush(self)

    FreeScaleStrategy.copy_tables, FreeScaleStrategy.flush = noted, noted_flush  # type: ignore[method-assign]
    if not applies_late:
        ExchangeMode.apply_late = lambda self: self.table_streams  # type: ignore[method-assign]
    if reads:
        toy.Model.on_save_checkpoint = lambda self, checkpoint: None  # type: ignore[method-assign]
    train(rank, folder, "sharded", True, prioritize=True, optimizer=optimizer)
    return began, flushes


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
    for _, flushes in run_ranks(prioritized_saves, args=(str(tmp_path), "adagrad", True, True)):
        assert flushes == ["step 4", "step 8"]


def _synchronous_saves(rank: int, folder: str, optimizer: str) -> None:
    train(rank, folder, "sharded", False, prioritize=True, optimizer=optimizer)


class TwoSaves(pl.Callback):
    """Saves twice after step 5, waits for the saves, and saves after the last step of the training."""

    def __init__(self, folder: str):
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            for name in ("first", "second"):
                trainer.save_checkpoint(self.folder / f"{name}.ckpt", weights_only=False)
            trainer.strategy.finish_saves()  # type: ignore[attr-defined]
            assert (self.folder / "second.ckpt").exists()


def two_saves(rank: int, folder: str) -> None:
    device_copy.SMALL_BYTES = 0
    pl.seed_everything(1, verbose=False)
    strategy = FreeScaleStrategy(checkpoint="sharded", balance="off", timeout=20, prioritize=True)
    options: dict[str, Any] = {"callbacks": [TwoSaves(folder)], "plugins": [AsyncCheckpointIO()], "max_steps": 6}
    toy.trainer(strategy, 2, max_epochs=1, enable_checkpointing=False, **options).fit(toy.Model(), toy.loader(48))


def test_saves_that_follow_each_other_without_a_step_are_complete_and_equal(tmp_path: Path) -> None:
    run_ranks(two_saves, args=(str(tmp_path),))
    first, second = (contents(tmp_path / f"{name}.ckpt") for name in ("first", "second"))
    assert_same(first, second)


class SavesAroundTheBackward(pl.Callback):
    """Saves before and after the backward of step 5."""

    def __init__(self, folder: str):
        self.folder = Path(folder)

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self._save(trainer, "before")

    def on_after_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self._save(trainer, "after")

    def _save(self, trainer: pl.Trainer, name: str) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(self.folder / f"{name}.ckpt", weights_only=False)


def saves_around_the_backward(rank: int, folder: str, asynchronous: bool) -> None:
    device_copy.SMALL_BYTES = 0
    pl.seed_everything(1, verbose=False)
    strategy = FreeScaleStrategy(checkpoint="sharded", balance="off", timeout=20, prioritize=True)
    options: dict[str, Any] = {"callbacks": [SavesAroundTheBackward(folder)], "max_steps": 8}
    plugins = [AsyncCheckpointIO()] if asynchronous else []
    trainer = toy.trainer(strategy, 2, max_epochs=1, enable_checkpointing=False, plugins=plugins, **options)
    trainer.fit(toy.Model(), toy.loader(48))


def test_saves_around_a_backward_equal_synchronous_ones(tmp_path: Path) -> None:
    for name, asynchronous in (("sync", False), ("async", True)):
        run_ranks(saves_around_the_backward, args=(str(tmp_path / name), asynchronous))
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


def train_only(rank: int, folder: str, kind: str, asynchronous: bool) -> None:
    train(rank, folder, kind, asynchronous)


def contents(path: Path) -> dict[str, Any]:
    """Weights and optimizer states, dense and of the tables."""
    fs.export(path, path.with_suffix(".full"), lightning=True)
    whole = torch.load(path.with_suffix(".full"), weights_only=True)
    return {
        "weights": dict(whole["state_dict"]),
        "tables": whole["freescale"]["table_optimizer"],
        "dense": {f"{i}.{k}": v for i, s in whole["optimizer_states"][0]["state"].items() for k, v in s.items()},
        "others": leaves({name: whole[name] for name in ("global_step", "loops", "lr_schedulers", "freescale")}),
    }


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    """The numbers, texts and tensors in nested mappings and sequences, by their place."""
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {name: value.tolist() if isinstance(value, torch.Tensor) else value}
    return {place: leaf for key, part in value.items() for place, leaf in leaves(part, f"{name}/{key}").items()}


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    for part in ("weights", "tables", "dense"):
        assert toy.same(a[part], b[part]), part
    assert a["tables"]
    assert a["dense"]
    assert a["others"] == b["others"]
    assert any("random" in name for name in a["others"])


# ---- failures --------------------------------------------------------------------------------------------------------
def fail(rank: int, folder: str, kind: str, which: int) -> str:
    owner, name = module_that_writes(kind)
    write, calls = getattr(owner, name), []

    def write_or_fail(*args: Any) -> None:
        calls.append(1)
        if len(calls) == which:
            if kind == "sharded":  # One rank of two fails. The others learn it from the first agreement in the save.
                args[-1].agree(OSError("disk full") if rank == 0 else None, where=f"saving {args[0]}")
            raise OSError("disk full")
        write(*args)

    setattr(owner, name, write_or_fail)
    with pytest.raises(CheckpointError) as raised:
        train(rank, folder, kind, asynchronous=True)
    return str(raised.value)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("which", [2, 3])  # Raised at the next save, or at the end of fit.
def test_a_failure_in_the_background_is_raised_on_all_ranks(tmp_path: Path, kind: str, which: int) -> None:
    for message in run_ranks(fail, args=(str(tmp_path), kind, which)):
        assert "disk full" in message
        assert "rank 0: saving" in message
        assert f"step={4 * which}.ckpt" in message
    assert len(list(tmp_path.glob("epoch*.ckpt"))) == which - 1
    fs.export(tmp_path / f"epoch=0-step={4 * which - 4}.ckpt", tmp_path / "out.pt")


def die_in_the_background(rank: int, folder: str, kind: str) -> None:
    owner, name = module_that_writes(kind)
    write, calls = getattr(owner, name), []

    def write_and_die(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 2 and rank == 0:
            torch.save = lambda *a, **k: os._exit(9)
        write(*args)

    setattr(owner, name, write_and_die)
    train(rank, folder, kind, asynchronous=True, save_top_k=1)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_crash_in_the_background_leaves_the_checkpoint_before_it(tmp_path: Path, kind: str) -> None:
    """``save_top_k=1`` asks to remove the old checkpoint at once. It stays until the new one is complete."""
    with pytest.raises(RankFailed, match="died with exit code 9"):
        run_ranks(die_in_the_background, args=(str(tmp_path), kind), every_error=True)
    assert [path.name for path in tmp_path.glob("epoch*.ckpt")] == ["epoch=0-step=4.ckpt"]
    fs.export(tmp_path / "epoch=0-step=4.ckpt", tmp_path / "out.pt")


@pytest.mark.parametrize("kind", FORMATS)
def test_save_top_k_removes_after_the_new_one_is_complete(tmp_path: Path, kind: str) -> None:
    run_ranks(train_top_one, args=(str(tmp_path), kind))
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=0-step=12.ckpt"]


def train_top_one(rank: int, folder: str, kind: str) -> None:
    trainer = train(rank, folder, kind, asynchronous=True, save_top_k=1)
    trainer.save_checkpoint(f"{folder}/after.ckpt")  # After fit the save is complete when the call returns.
    assert Path(f"{folder}/after.ckpt").exists()
    trainer.strategy.barrier()
    trainer.strategy.remove_checkpoint(f"{folder}/after.ckpt")
    trainer.strategy.barrier()


class Counting(TorchCheckpointIO):
    saved: ClassVar[list[str]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.saved.append(os.path.basename(path))
        super().save_checkpoint(checkpoint, path, storage_options)


def asynchronous_user_io(rank: int, folder: str) -> list[str]:
    trainer = toy.trainer(FreeScaleStrategy(), 2, max_steps=2, plugins=[AsyncCheckpointIO(Counting())])
    trainer.fit(toy.Model(), toy.loader())
    trainer.save_checkpoint(f"{folder}/own.ckpt")
    return Counting.saved


def test_a_users_own_io_writes_in_the_background(tmp_path: Path) -> None:
    assert run_ranks(asynchronous_user_io, args=(str(tmp_path),)) == [["own.ckpt"], []]
    assert (tmp_path / "own.ckpt").is_file()


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_the_plugins_of_both_namespaces_are_recognised(namespace: str) -> None:
    plugins = pytest.importorskip(f"{namespace}.plugins.io")
    background = plugins.AsyncCheckpointIO(plugins.TorchCheckpointIO())
    assert is_asynchronous(background)
    assert is_lightnings_io(writing_io(background))
    assert not is_asynchronous(plugins.TorchCheckpointIO())
    assert not is_lightnings_io(Counting())


def test_an_action_after_a_failed_save_does_not_run() -> None:
    saves, done = BackgroundSaves(), []
    saves.start(lambda: 1 / 0, "x.ckpt")  # type: ignore[arg-type,return-value]
    saves.after_save(lambda: done.append("removed"))
    assert isinstance(saves.close(), ZeroDivisionError)
    assert done == []
