"""The training of one rank. It resumes from the last checkpoint in its folder, if there is one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor

import lightning_freescale as fs
from lightning_freescale.data.histories import Histories
from lightning_freescale.models import HSTU
from tests import toy

USERS, GLOBAL_BATCH, EPOCHS = 48, 12, 3
STEPS = EPOCHS * USERS // GLOBAL_BATCH
SAVE_EVERY, COPY_EVERY = 3, 2  # steps
SHARED_ITEMS = (
    16  # Items of which every history has some. Item ``SHARED_ITEMS + u`` is the first event of user ``u`` alone.
)


@dataclass(frozen=True)
class Settings:
    """What differs between the trainings of a campaign. The result of the training depends on none of it."""

    prioritize: bool = True
    checkpoint: str = "file"
    asynchronous: bool = False
    transport: str = "auto"
    timeout: float = 10.0  # seconds
    device: str = "cpu"  # or "cuda": all ranks share one GPU, and each counts as a host
    host_copies: bool = False  # each rank has a folder that stands for the memory of its own host


def histories() -> Histories:
    """Users with 5 to 20 events. The first event of a user tells who it is."""
    numbers = np.random.default_rng(0)
    lengths = numbers.integers(5, 21, USERS)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    items = numbers.integers(0, SHARED_ITEMS, offsets[-1])
    items[offsets[:-1]] = SHARED_ITEMS + np.arange(USERS)
    times = 1_000_000 + np.concatenate([np.arange(length) * 60 for length in lengths])
    return Histories(items, times, offsets, np.arange(SHARED_ITEMS + USERS), np.arange(USERS))


def append_record(folder: Path, attempt: int | None, rank: int, kind: str, entry: dict[str, Any]) -> None:
    """Add a line to what a rank records of ``kind``."""
    path = folder / kind / f"{attempt}.{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        stream.write(json.dumps(entry) + "\n")


class SampleRecord(pl.Callback):
    """Writes the users of every trained batch to ``folder/samples``, and notes the begin of the parts of every step and save."""

    def __init__(self, folder: Path, attempt: int | None):
        self.folder, self.attempt = folder, attempt

    def _append(self, rank: int, kind: str, entry: dict[str, Any]) -> None:
        append_record(self.folder, self.attempt, rank, kind, entry)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.attempt is None:
            self.attempt = trainer.strategy.broadcast(time.time_ns())
        entry = {"begin": trainer.global_step, "world": trainer.world_size, "time": time.time()}
        self._append(trainer.global_rank, "samples", entry)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, out: Any, batch: Any, i: int) -> None:
        history = batch.history
        first = history.values()[history.offsets()[:-1].long()]
        entry = {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "users": (first - SHARED_ITEMS).tolist(),
        }
        self._append(trainer.global_rank, "samples", entry)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, i: int) -> None:
        self._append(trainer.global_rank, "forward", {"step": trainer.global_step})

    def on_before_backward(self, trainer: pl.Trainer, module: pl.LightningModule, loss: Any) -> None:
        self._append(trainer.global_rank, "backward", {"step": trainer.global_step})

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._append(trainer.global_rank, "exchange", {"step": trainer.global_step})

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._append(trainer.global_rank, "saves", {"step": trainer.global_step})


def train(
    rank: int,
    world: int,
    folder: str,
    attempt: int | None,
    settings: Settings,
    nodes: int = 1,
    callbacks: Sequence[pl.Callback] = (),
) -> dict[str, Tensor]:
    """Train to the end. Rank 0 returns the unsharded weights.

    Args:
        attempt: the number of the start in the record of the samples; ``None``: the time of the start, in nanoseconds.
        nodes: number of hosts. The ranks are divided evenly.
        callbacks: further callbacks of the Trainer.
    """
    placement: dict[str, Any] = {"devices": world // nodes, "num_nodes": nodes}
    if settings.device == "cuda":
        # NCCL refuses two ranks on one GPU of one host.
        os.environ.update(LOCAL_RANK="0", NODE_RANK=str(rank), NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo")
        os.environ.update(NCCL_IB_DISABLE="1", NCCL_MAX_NCHANNELS="1")  # A shorter set-up.
        placement = {"accelerator": "gpu", "devices": 1, "num_nodes": world}
    pl.seed_everything(1, verbose=False)
    data = fs.SeqRecDataModule(histories(), batch_size=GLOBAL_BATCH // world, max_history=32, num_negatives=4)
    model = HSTU(
        data.num_items,
        embedding_dim=8,
        num_layers=1,
        num_heads=1,
        max_history=32,
        lr=1e-2,
    )
    memory = Path(folder) / f"memory_{rank}"
    memory.mkdir(parents=True, exist_ok=True)
    strategy = fs.FreeScaleStrategy(
        host_copies=fs.HostCopies(COPY_EVERY, str(memory), run="faults") if settings.host_copies else None,
        prioritize=settings.prioritize,
        checkpoint=fs.Incremental(full_every=3) if settings.checkpoint == "incremental" else settings.checkpoint,  # type: ignore[arg-type]
        transport=settings.transport,  # type: ignore[arg-type]
        timeout=settings.timeout,
        monitor=False,
    )
    saves = pl.callbacks.ModelCheckpoint(
        dirpath=Path(folder) / "checkpoints", every_n_train_steps=SAVE_EVERY, save_last=True, save_on_exception=True
    )
    options: dict[str, Any] = {"plugins": [AsyncCheckpointIO()]} if settings.asynchronous else {}
    trainer = toy.trainer(
        strategy,
        world,
        max_epochs=EPOCHS,
        enable_checkpointing=True,
        callbacks=[saves, SampleRecord(Path(folder), attempt), *callbacks],
        **placement,
        **options,
    )
    trainer.fit(model, data, ckpt_path="last")
    return final_weights(Path(folder)) if rank == 0 else {}


def final_weights(folder: Path) -> dict[str, Tensor]:
    """The unsharded weights of the last checkpoint, which was written after the last step."""
    weights = fs.export(folder / "checkpoints" / "last.ckpt", folder / "weights.pt", weights_only=False)
    assert all(torch.isfinite(value).all() for value in weights.values())
    return weights
