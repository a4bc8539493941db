"""What an asynchronous save of a folder leaves to its thread: agreements between ranks, and checks of the weights."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import lightning_freescale as fs
from lightning_freescale import CheckpointError, FreeScaleError, FreeScaleStrategy
from lightning_freescale.strategy.checkpoints.background import BackgroundSaves
from lightning_freescale.strategy.control import Control
from tests import toy
from tests.ranks import run_ranks


class Saves(pl.Callback):
    """Saves after every fourth batch, and counts the gathers of the training thread during each save."""

    def __init__(self, folder: str, rank: int):
        self.folder, self.rank = folder, rank
        self.gathers: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 4 != 3:
            return
        gather, count = Control.gather, 0

        def counted(*args: Any) -> Any:
            nonlocal count
            count += threading.current_thread() is threading.main_thread()
            return gather(*args)

        Control.gather = counted  # type: ignore[method-assign]
        trainer.save_checkpoint(f"{self.folder}/step={batch_idx + 1}_rank={self.rank}.ckpt")
        Control.gather = gather  # type: ignore[method-assign]
        self.gathers.append(count)


def train(rank: int, folder: str, asynchronous: bool = True, model: toy.Model | None = None) -> list[int]:
    pl.seed_everything(1, verbose=False)
    saves = Saves(folder, rank)
    trainer = toy.trainer(
        FreeScaleStrategy(checkpoint="sharded", balance="off", timeout=20),
        2,
        max_epochs=1,
        callbacks=[saves],
        plugins=[AsyncCheckpointIO()] if asynchronous else [],
    )
    trainer.fit(model or toy.Model(), toy.loader(48))  # 12 steps
    return saves.gathers


# ---- agreements ------------------------------------------------------------------------------------------------------
def count_gathers(rank: int, folder: str) -> tuple[list[int], list[int]]:
    return train(rank, f"{folder}/background"), train(rank, f"{folder}/synchronous", asynchronous=False)


def test_the_training_thread_asks_no_other_rank(tmp_path: Path) -> None:
    for background, synchronous in run_ranks(count_gathers, args=(str(tmp_path),)):
        assert background == [0, 0, 0]
        assert all(count > 0 for count in synchronous)  # The negative control: such gathers are counted.
    for kind in ("background", "synchronous"):  # All ranks write to the path of rank 0.
        assert {path.name for path in (tmp_path / kind).iterdir()} == {f"step={n}_rank=0.ckpt" for n in (4, 8, 12)}
        for path in (tmp_path / kind).iterdir():
            fs.export(path, tmp_path / "out.pt")


def fail_on_rank_one(rank: int) -> list[str]:
    torch.distributed.init_process_group("gloo")
    control = Control(timedelta(seconds=20))
    saves, messages = BackgroundSaves(), []

    def save() -> None:
        if rank == 1:
            raise OSError("disk full")

    for action in (save, lambda: None):
        saves.control(control)
        saves.start(action, "a.ckpt")
        try:
            saves.finish()
        except CheckpointError as error:
            messages.append(str(error))
    assert saves.close() is None
    return messages


def test_a_failure_on_one_rank_is_the_outcome_on_all_ranks() -> None:
    for messages in run_ranks(fail_on_rank_one):
        assert len(messages) == 1  # The save after it succeeds.
        assert "rank 1: saving a.ckpt: OSError: disk full" in messages[0]


# ---- losses ----------------------------------------------------------------------------------------------------------
class Diverges(toy.Model):
    """The loss of one batch is not finite on rank 1."""

    def __init__(self, at: int):
        super().__init__()
        self.at = at

    def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
        bad = batch_idx == self.at and self.global_rank == 1
        return super().training_step(batch, batch_idx) * (float("nan") if bad else 1.0)


def diverge(rank: int, folder: str) -> list[str]:
    messages = []
    for name, at in (("middle", 7), ("end", 11), ("unchecked", 7)):
        if name == "unchecked":
            Control.losses_so_far = lambda self: lambda: None  # type: ignore[method-assign]
        with pytest.raises(FreeScaleError) as raised:
            train(rank, f"{folder}/{name}", model=Diverges(at))
        messages.append(str(raised.value))
    return messages


def test_no_asynchronous_save_holds_weights_that_a_nan_has_reached(tmp_path: Path) -> None:
    for messages in run_ranks(diverge, args=(str(tmp_path),)):
        # Rank 0 may have met the same value in the steps after it.
        assert all("rank 1: loss is nan at step" in message for message in messages)
        assert not any("asynchronous save" in message for message in messages)
    found = {name: {path.name for path in (tmp_path / name).glob("step=*")} for name in ("middle", "end", "unchecked")}
    assert found["middle"] == {"step=4_rank=0.ckpt"}
    assert found["end"] == {f"step={step}_rank=0.ckpt" for step in (4, 8)}
    assert "step=8_rank=0.ckpt" in found["unchecked"]  # The negative control: without the check it is written.
