"""Random states in checkpoints: a resumed run with dropout equals the uninterrupted one, and shuffles stay what they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.strategy.checkpoints import random_states as checkpoint_random
from tests import toy
from tests.ranks import run_ranks
from tests.slow import slow


class Noisy(toy.Model):
    """Draws from every generator, in the step and in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)
        self.drawn: list[tuple[float, ...]] = []

    def forward(self, features: Any) -> Tensor:
        rows = self.embeddings(features)
        pooled = torch.cat([toy.mean(rows[key]) for key in toy.FEATURES], dim=1)
        return self.head(self.dropout(pooled)).squeeze(-1)

    def training_step(self, batch: toy.Batch, batch_idx: int) -> Tensor:
        self.drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))  # noqa: NPY002
        return super().training_step(batch, batch_idx)


class NoisyHooks(Noisy):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        torch.rand(1)
        return batch

    def on_train_start(self) -> None:
        torch.rand(3)

    def on_train_epoch_start(self) -> None:
        torch.rand(2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.rand(1)


class Stream(IterableDataset):
    """No length, so that Lightning fetches the first batch before the training starts."""

    def __iter__(self) -> Iterator[Any]:
        samples = toy.Samples(64)
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return (samples[index] for index in range(rank, 64, world))


def loader(name: str) -> DataLoader:
    if name == "stream":
        return DataLoader(Stream(), batch_size=4, collate_fn=toy.collate)
    workers = {"num_workers": 1, "multiprocessing_context": "fork"} if name == "workers" else {}
    return toy.loader(40, batch_size=4, **workers)


def train(world: int, kind: type[Noisy], data: str, folder: str | None, resume: str | None) -> dict[str, Any]:
    pl.seed_everything(1, workers=True, verbose=False)
    if resume is not None:
        torch.rand(17)  # A resumed script may have drawn other numbers before fit.
        random.random()
    model = kind()
    options: dict[str, Any] = {}
    if folder is not None:
        save = pl.callbacks.ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        options = {"enable_checkpointing": True, "callbacks": [save]}
    options["use_distributed_sampler"] = data != "drawn"  # PyTorch's own sampler draws the order of the samples.
    trainer = toy.trainer(FreeScaleStrategy(embedding_optimizer={"optimizer": "adagrad", "lr": 0.1}), world, **options)
    trainer.fit(model, loader(data), ckpt_path=resume)
    return {"seen": model.seen, "losses": model.losses, "drawn": model.drawn, "weights": toy.weights(model)}


def compare(rank: int, world: int, kind: type[Noisy], data: str, folder: str, disturb: bool = False) -> list[bool]:
    """Whether runs that resume in the middle of an epoch, and between two, equal the uninterrupted one."""
    full = train(world, kind, data, folder, None)
    steps = len(full["losses"]) // 2
    if disturb:
        checkpoint_random.restore = lambda state, device: None
    equal = []
    for done in (3, steps, steps + 3):
        rest = train(world, kind, data, None, f"{folder}/step={done}.ckpt")
        assert rest["seen"] == full["seen"][done:] or disturb
        equal.append(
            all(rest[name] == full[name][done:] for name in ("losses", "drawn"))
            and toy.same(rest["weights"], full["weights"])
        )
    return equal


@pytest.mark.parametrize(("world", "data"), [(1, "drawn"), (2, "shuffled"), (2, "stream"), slow(2, "workers")])
def test_a_resumed_run_with_dropout_equals_the_uninterrupted_one(tmp_path: Path, world: int, data: str) -> None:
    for equal in run_ranks(compare, world, args=(world, Noisy, data, str(tmp_path))):
        assert equal == [True, True, True]


def test_hooks_that_draw_numbers(tmp_path: Path) -> None:
    """``on_train_start`` runs once more in a resumed run: what it draws must not count."""
    for equal in run_ranks(compare, 2, args=(2, NoisyHooks, "shuffled", str(tmp_path))):
        assert equal[0] is True
        assert equal[2] is True


class WithoutTables(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def compare_without_tables(rank: int, folder: str) -> tuple[list[float], list[float]]:
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    losses = []
    for resumed in (None, f"{folder}/epoch=0.ckpt"):
        pl.seed_everything(1, verbose=False)  # Lightning's distributed sampler shuffles by this seed.
        torch.rand(0 if resumed is None else 17)
        model = WithoutTables()
        save = pl.callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
        options = {"callbacks": [save], "enable_checkpointing": True} if resumed is None else {}
        trainer = toy.trainer(FreeScaleStrategy(), 1, max_epochs=2, **options)
        trainer.fit(model, DataLoader(data, 4, shuffle=True), ckpt_path=resumed)
        losses.append(model.losses)
    return losses[0], losses[1]


def test_a_model_without_tables_continues_its_random_numbers_after_an_epoch(tmp_path: Path) -> None:
    """Its loader is Lightning's own, which draws a number from the same generator as dropout when it is opened."""
    ((full, rest),) = run_ranks(compare_without_tables, 1, args=(str(tmp_path),))
    assert len(full) == 16
    assert rest == full[8:]


def test_without_the_random_states_the_runs_differ(tmp_path: Path) -> None:
    """The negative control."""
    for equal in run_ranks(compare, 2, args=(2, Noisy, "shuffled", str(tmp_path), True)):
        assert equal == [False, False, False]


def resume(rank: int, world: int, path: str, caplog_file: str) -> None:
    import logging

    logging.getLogger("lightning_freescale").addHandler(logging.FileHandler(caplog_file))
    train(world, Noisy, "shuffled", None, path)


def test_another_number_of_ranks_is_logged(tmp_path: Path) -> None:
    run_ranks(save_one, 1, args=(str(tmp_path),))
    run_ranks(resume, 2, args=(2, str(tmp_path / "step=8.ckpt"), str(tmp_path / "log")))
    assert (tmp_path / "log").read_text().count("holds the random states of 1 ranks, but 2 ranks train") == 1


def save_one(rank: int, folder: str) -> None:
    train(1, Noisy, "shuffled", folder, None)


def test_states_round_trip() -> None:
    device = torch.device("cpu")
    before = checkpoint_random.capture(device)
    first = random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item()  # noqa: NPY002
    checkpoint_random.restore(before, device)
    assert first == (random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item())  # noqa: NPY002
