"""A backward through a look-up of tables in a validation or a test would train them. It is refused."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_freescale import ConfigurationError, FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks


class Evaluated(toy.Model):
    """Runs a backward in every step of an evaluation."""

    def validation_step(self, batch: toy.Batch, batch_idx: int) -> None:
        with torch.enable_grad():
            self.evaluate(batch)
        self.zero_grad()

    test_step = validation_step

    def evaluate(self, batch: toy.Batch) -> None:
        self.loss(batch).backward()


class GradientsOfRows(Evaluated):
    """Computes gradients with respect to rows, which reach no table."""

    def evaluate(self, batch: toy.Batch) -> None:
        rows = self.embeddings(batch.features)
        values = [rows[key].values() for key in toy.FEATURES]
        self.noted = torch.autograd.grad(self.score(values).sum(), values)
        detached = [part.detach().requires_grad_() for part in values]
        self.score(detached).sum().backward()
        assert all(part.grad is not None for part in detached)

    def score(self, values: list[Tensor]) -> Tensor:
        return self.head(torch.stack([part.sum(0) for part in values]).flatten())


def run(rank: int, kind: type[toy.Model], where: str, prioritize: bool, bags: bool) -> Any:
    pl.seed_everything(1, verbose=False)
    model = kind(bags=bags)
    strategy = FreeScaleStrategy(prioritize=prioritize, balance="off", embedding_optimizer={"optimizer": "sgd"})
    options = {"limit_val_batches": 1.0, "inference_mode": False, "num_sanity_val_steps": 0, "max_epochs": 1}
    trainer = toy.trainer(strategy, 2, **options)
    if where == "fit":
        trainer.fit(model, toy.loader(16))
        trainer.fit_loop.max_epochs = 2
    before = toy.weights(model)
    try:
        if where == "fit":
            trainer.fit(model, toy.loader(16), toy.loader(16))
        else:
            getattr(trainer, where)(model, toy.loader(16), verbose=False)
    except ConfigurationError as error:
        return str(error)
    return where == "fit" or toy.same(toy.weights(model), before)


@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize("prioritize", [True, False])
@pytest.mark.parametrize(("where", "stage"), [("fit", "validate"), ("validate", "validate"), ("test", "test")])
def test_a_backward_through_a_look_up_is_refused(where: str, stage: str, prioritize: bool, bags: bool) -> None:
    for rank, message in enumerate(run_ranks(run, args=(Evaluated, where, prioritize, bags))):
        assert message.startswith(f"rank {rank}: a backward runs through a look-up of embeddings during {stage}.")


@pytest.mark.parametrize("where", ["fit", "test"])
def test_gradients_of_rows_are_no_training(where: str) -> None:
    assert run_ranks(run, args=(GradientsOfRows, where, True, False)) == [True, True]
