"""Gradient accumulation where the mode of the exchange differs: inside of a window, between collections, inside of an epoch."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchrec import EmbeddingCollection, EmbeddingConfig

from lightning_freescale import FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks
from tests.strategy.test_accumulation import fits


class Switching(pl.Callback):
    """Changes the mode after three micro-batches of each second window of five."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        schedule = trainer.strategy.schedule  # type: ignore[attr-defined]
        if schedule is not None and batch_idx % 10 == 3:
            schedule.activate(schedule.names if batch_idx % 20 == 3 else ())


def fit_switching(rank: int, prioritize: bool) -> tuple[list[float], dict[str, Tensor]]:
    pl.seed_everything(1, verbose=False)
    model = toy.Model()
    own = FreeScaleStrategy(balance="off", prioritize=prioritize)
    options = {"max_epochs": 1, "accumulate_grad_batches": 5, "callbacks": [Switching()]}
    toy.trainer(own, 2, **options).fit(model, toy.loader(160))
    return model.losses, toy.weights(model)


def test_windows_of_both_modes() -> None:
    """A window that begins prioritized and ends synchronous leaves nothing to one that ends prioritized."""
    plain, switching = (run_ranks(fit_switching, args=(mode,)) for mode in (False, True))
    for expected, found in zip(plain, switching, strict=True):
        assert found[0] == expected[0]
        assert toy.same(found[1], expected[1])


class ChangesNumber(pl.Callback):
    """Begins and ends to accumulate gradients inside of an epoch."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        trainer.accumulate_grad_batches = 2 if batch_idx // 4 % 2 else 1


def test_the_number_changes_inside_of_an_epoch() -> None:
    """Gradients of bags are late when the first window begins. They belong to a step of one batch."""
    options = {"size": 64, "batch_size": 2, "max_epochs": 1, "callback": ChangesNumber}
    cases = [
        (bags, {"balance": "off", "prioritize": mode}, options) for bags in (False, True) for mode in (False, True)
    ]
    for results in run_ranks(fits, args=(2, cases)):
        for plain, prioritized in zip(results[::2], results[1::2], strict=True):
            assert plain[0] == prioritized[0]
            assert toy.same(plain[1], prioritized[1])


class CalledTwice(toy.Model):
    """Has a second collection, whose exchange stays synchronous because it is called twice. Its table is on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = EmbeddingCollection([EmbeddingConfig(40, toy.DIM, name="extra", feature_names=["shops"])])

    def forward(self, features: Any) -> Tensor:
        extra = [self.extra(features)["shops"].values() for _ in range(2)]
        return super().forward(features) + torch.cat(extra).sum()


def fit_both_exchanges(rank: int, prioritize: bool) -> tuple[list[float], dict[str, Tensor]]:
    pl.seed_everything(1, verbose=False)
    model = CalledTwice()
    own = FreeScaleStrategy(balance="off", prioritize=prioritize, timeout=20, sharding={"extra": "table_wise"})
    toy.trainer(own, 2, max_epochs=1, accumulate_grad_batches=2).fit(model, toy.loader(32))
    return model.losses, toy.weights(model)


def test_a_collection_that_stays_synchronous_beside_a_prioritized_one() -> None:
    """Only one rank has rows of the synchronous collection. Its update must not start an exchange of the other collection."""
    plain, prioritized = (run_ranks(fit_both_exchanges, args=(mode,)) for mode in (False, True))
    for expected, found in zip(plain, prioritized, strict=True):
        assert found[0] == expected[0]
        assert toy.same(found[1], expected[1])
