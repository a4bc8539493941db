"""Asynchronous saves: exact, crash-safe, and loud when they fail."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

import lightning_freescale as fs
from lightning_freescale import CheckpointError, FreeScaleStrategy
from lightning_freescale.strategy.checkpoints import device_copy
from lightning_freescale.strategy.checkpoints import file as checkpoint_file
from lightning_freescale.strategy.checkpoints import folder as checkpoint
from lightning_freescale.strategy.checkpoints import saving as checkpoint_saving
from lightning_freescale.strategy.checkpoints.background import BackgroundSaves
from lightning_freescale.strategy.checkpoints.format import is_asynchronous, is_lightnings_io, writing_io
from tests import toy
from tests.ranks import RankFailed, run_ranks
from tests.strategy.async_saves import assert_same, contents, train, train_only

FORMATS = ["file", "sharded"]


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
