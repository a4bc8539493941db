"""The model and the trainings of the tests of checkpoints."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_freescale import FreeScaleStrategy
from tests import toy

FORMATS = ["file", "sharded"]
TABLE = "embeddings.embeddings.item.weight"


class Model(toy.Model):
    """Has a hyperparameter without a default, so that ``load_from_checkpoint`` must find it in the checkpoint."""

    def __init__(self, width: int, lr: float = 0.05):
        super().__init__(lr=lr)
        self.save_hyperparameters()
        self.head = nn.Sequential(nn.Linear(len(toy.FEATURES) * toy.DIM, width), nn.ReLU(), nn.Linear(width, 1))

    def test_step(self, batch: toy.Batch, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True, batch_size=len(batch.label))


def trained(world: int, path: str | None = None, model: Any = None, **options: Any) -> tuple[Any, pl.Trainer]:
    pl.seed_everything(1, verbose=False)
    strategy = {key: options.pop(key) for key in ("checkpoint", "embedding_optimizer", "balance") if key in options}
    model = model or Model(6)
    trainer = toy.trainer(FreeScaleStrategy(**strategy), world, **{"max_steps": 3, **options})
    trainer.fit(model, toy.loader(40))
    if path is not None:
        trainer.save_checkpoint(path)
    return model, trainer


def save_both(rank: int, folder: str) -> dict[str, Tensor]:
    for kind in FORMATS:
        model, _ = trained(2, f"{folder}/{kind}.ckpt", checkpoint=kind)
    return toy.weights(model)


def resume(rank: int, paths: list[str]) -> list[list[float]]:
    losses = []
    for path in paths:
        pl.seed_everything(1, verbose=False)
        model = Model(6)
        toy.trainer(FreeScaleStrategy(), 2, max_steps=8).fit(model, toy.loader(40), ckpt_path=path)
        losses.append(model.losses)
    return losses
