"""Balanced training with the Trainer has the same steps, losses and quality as without, at the source and by exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_freescale import FreeScaleStrategy, SeqBatch, SeqRecDataModule
from lightning_freescale.models import HSTU
from tests import toy
from tests.ranks import run_ranks

EPOCHS = 3
OPTIMIZER = {"optimizer": "rowwise_adagrad", "lr": 0.1}
# The settings balance of the data module (at the source) and of the strategy (by exchange).
WAYS = [("off", "off"), ("fixed", "off"), ("variable", "off"), ("off", "variable")]
SYNTHETIC = {"users": 96, "items": 60, "clusters": 6, "mean_length": 12, "sigma": 1.2, "max_length": 80}


class Recorder(HSTU):
    """Records for each step the users, by the first timestamp of their history, and the total loss and its token count."""

    def on_train_start(self) -> None:
        self.users: list[list[int]] = []
        self.totals: list[tuple[float, int]] = []

    def training_step(self, batch: SeqBatch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        starts = torch.nn.functional.pad(batch.lengths.cumsum(0), (1, 0))[:-1]
        self.users.append(batch.timestamps[starts].tolist())
        tokens = int(self.num_predicted(batch))
        self.totals.append((loss.item() * tokens, tokens))
        return loss


def _fit(rank: int, world: int, cache: Path, seeds: int, epochs: int) -> dict[Any, Any]:
    """Train with each setting and seed. Return users and totals of every step, and HR@10 at the end."""
    found = {}
    for balance, exchange in WAYS:
        for seed in range(seeds):
            pl.seed_everything(seed, verbose=False)
            strategy = FreeScaleStrategy(balance=exchange, embedding_optimizer=OPTIMIZER, prioritize=False)  # type: ignore[arg-type]
            data = SeqRecDataModule(
                batch_size=16 // world,
                max_history=64,
                balance=balance,
                num_negatives=8,
                seed=seed,
                cache_dir=cache,
                synthetic={**SYNTHETIC, "seed": 0},
            )
            model = Recorder(data.num_items, embedding_dim=16, num_layers=1, num_heads=2, max_history=64, lr=5e-3)
            validation = {"check_val_every_n_epoch": epochs, "limit_val_batches": 1.0, "num_sanity_val_steps": 0}
            trainer = toy.trainer(strategy, world, max_epochs=epochs, **validation)
            trainer.fit(model, datamodule=data)
            found[balance, exchange, seed] = (
                model.users,
                np.array(model.totals),
                float(trainer.callback_metrics["val/hr@10"]),
            )
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    torch.set_num_threads(1)
    return run_ranks(_fit, args=(2, tmp_path_factory.mktemp("cache"), 1, EPOCHS), timeout=110)


def test_every_step_has_the_same_samples(runs: list[dict[Any, Any]]) -> None:
    def by_step(way: tuple[str, str]) -> list[list[int]]:
        steps = zip(*(rank[(*way, 0)][0] for rank in runs), strict=True)
        return [sorted(user for own in step for user in own) for step in steps]

    plain = by_step(WAYS[0])
    assert len(plain) == EPOCHS * SYNTHETIC["users"] / 16
    for way in WAYS[1:]:
        assert by_step(way) == plain
        assert [rank[(*way, 0)][0] for rank in runs] != [rank[(*WAYS[0], 0)][0] for rank in runs]


def test_losses_are_the_same(runs: list[dict[Any, Any]]) -> None:
    def losses(way: tuple[str, str]) -> list[float]:
        total = sum(rank[(*way, 0)][1] for rank in runs)
        return (total[:, 0] / total[:, 1]).tolist()

    plain = losses(WAYS[0])
    assert plain[-1] < 0.8 * plain[0]
    for way in WAYS[1:]:
        assert losses(way) == pytest.approx(plain, rel=1e-3)


def test_quality_is_the_same(runs: list[dict[Any, Any]]) -> None:
    """``benchmarks/quality.py`` compares more data and seeds."""
    rates = {way: runs[0][(*way, 0)][2] for way in WAYS}
    for way in WAYS[1:]:
        assert rates[way] == pytest.approx(rates[WAYS[0]], abs=0.04)
    assert rates[WAYS[0]] > 2 * 10 / SYNTHETIC["items"]  # the model has learnt
