"""Both Lightning namespaces know the strategies by name and train with them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch

import lightning_freescale as fs
from tests import toy
from tests.ranks import run_ranks


@pytest.mark.parametrize("namespace", [lightning.pytorch, pytorch_lightning], ids=lambda module: module.__name__)
def test_registered(namespace: Any) -> None:
    registry = namespace.strategies.StrategyRegistry
    assert {"freescale", "freescale_sync"} <= set(registry.available_strategies())
    sync = registry.get("freescale_sync")
    assert (sync._balance, sync._prioritize) == ("off", False)
    full = registry.get("freescale")
    assert (full._balance, full._prioritize) == ("auto", "auto")


class OldModel(pytorch_lightning.LightningModule):
    """The toy model on the other namespace's base class."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = toy.Model()
        self.losses: list[float] = []

    def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
        loss = self.inner.loss(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]


def fit(rank: int, old: bool, name: str) -> list[float]:
    namespace = pytorch_lightning if old else lightning.pytorch
    namespace.seed_everything(1, verbose=False)
    model = OldModel() if old else toy.Model()
    trainer = namespace.Trainer(
        strategy=name,
        devices=2,
        accelerator="cpu",
        max_steps=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, toy.loader())
    return model.losses


def test_both_namespaces_and_both_names_train_alike() -> None:
    results = [
        run_ranks(fit, args=args) for args in [(False, "freescale"), (True, "freescale"), (False, "freescale_sync")]
    ]
    assert len(results[0][0]) == 6
    assert results[0] == results[1]
    # Balancing moves samples between ranks: the mean over all ranks, each with as many samples, stays.
    mean, mean_sync = ([sum(step) / 2 for step in zip(*result, strict=True)] for result in (results[0], results[2]))
    assert mean == pytest.approx(mean_sync, rel=1e-5)


def test_twins() -> None:
    assert issubclass(fs.pytorch_lightning.SeqRecDataModule, pytorch_lightning.LightningDataModule)
    assert issubclass(fs.pytorch_lightning.HSTU, pytorch_lightning.LightningModule)
    assert issubclass(fs.FreeScaleStrategy, lightning.pytorch.strategies.DDPStrategy)
