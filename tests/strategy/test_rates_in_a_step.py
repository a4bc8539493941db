"""Learning rates that the user's code sets inside a step, and optimizers made without a rate."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingCollection

from lightning_freescale import ConfigurationError, FreeScaleStrategy, ZeroCollision, zero_collision
from tests import toy
from tests.ranks import run_ranks

RATES = [0.05, 0.2, 0.01, 0.1, 0.4, 0.05]


class Manual(toy.Model):
    """Sets the rate of its optimizer before every step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def set_rate(self) -> None:
        self.optimizers().param_groups[0]["lr"] = RATES[self.trainer.fit_loop.batch_idx]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.set_rate()

    def training_step(self, batch: toy.Batch, batch_idx: int) -> None:  # type: ignore[override]
        self.step(super().training_step(batch, batch_idx))

    def step(self, loss: Tensor) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class SetsInStep(Manual):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass

    def training_step(self, batch: toy.Batch, batch_idx: int) -> None:  # type: ignore[override]
        self.set_rate()
        super().training_step(batch, batch_idx)


class SetsAfterLookup(SetsInStep):
    def training_step(self, batch: toy.Batch, batch_idx: int) -> None:  # type: ignore[override]
        loss = toy.Model.training_step(self, batch, batch_idx)
        self.set_rate()
        self.step(loss)


class ZeroCollisionTables(SetsAfterLookup):
    def __init__(self) -> None:
        super().__init__()
        assert isinstance(self.embeddings, EmbeddingCollection)
        options = {name: ZeroCollision(buckets=4, max_probe=4) for name in toy.ROWS}
        self.embeddings = zero_collision(self.embeddings, options)


class SetsBetweenLosses(Manual):
    """A second loss, which does not train the tables, has another rate."""

    def training_step(self, batch: toy.Batch, batch_idx: int) -> None:  # type: ignore[override]
        rows = self.embeddings(batch.features)
        pooled = torch.cat([toy.mean(rows[key]) for key in toy.FEATURES], dim=1)
        self.step((self.head(pooled).squeeze(-1) - batch.label).square().mean())
        self.optimizers().param_groups[0]["lr"] = 0.03
        self.step(self.head(pooled.detach()).square().mean())


def fit(rank: int, kind: type[toy.Model], prioritize: bool) -> Any:
    pl.seed_everything(1, verbose=False)
    model = kind()
    tables = {"optimizer": "rowwise_adagrad", "lr": 0.1}
    strategy = FreeScaleStrategy(embedding_optimizer=tables, prioritize=prioritize, balance="off")
    try:
        toy.trainer(strategy, 2, max_epochs=1).fit(model, toy.loader(4 * len(RATES)))
    except ConfigurationError as error:
        return str(error)
    return toy.weights(model)


@pytest.mark.parametrize("prioritize", [True, False])
def test_a_rate_that_is_set_in_the_step_reaches_the_tables_in_this_step(prioritize: bool) -> None:
    before, inside = (run_ranks(fit, args=(kind, prioritize)) for kind in (Manual, SetsInStep))
    for expected, found in zip(before, inside, strict=True):
        assert toy.same(found, expected)


@pytest.mark.parametrize("prioritize", [True, False])
def test_a_rate_that_changes_after_the_look_up_is_refused(prioritize: bool) -> None:
    kinds = (SetsAfterLookup, ZeroCollisionTables)
    for message in [message for kind in kinds for message in run_ranks(fit, args=(kind, prioritize))]:
        assert message.startswith(
            "tables item, shop: their learning rate has changed from 0.1 to 0.4 between a look-up"
        )
    for weights in run_ranks(fit, args=(SetsBetweenLosses, prioritize)):
        assert isinstance(weights, dict), weights


class StartsAtZero(toy.Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class WarmsUp(toy.Model):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, float), "interval": "step"}]


def test_an_optimizer_made_without_a_rate_is_refused() -> None:
    for message in run_ranks(fit, args=(StartsAtZero, False)):
        assert message.startswith("tables item, shop: SGD was made with lr=0.0 for the parameter group 0, which")
    for weights in run_ranks(fit, args=(WarmsUp, False)):  # begins at rate 0, too
        assert isinstance(weights, dict), weights
