"""What the pages say about look-ups, tables that no optimizer has, inference mode, random numbers, and stopping."""

from __future__ import annotations

import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from lightning_freescale import FreeScaleError, FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks


class OneLookup(toy.Model):
    lookups = 1

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = [self.embeddings(features) for _ in range(self.lookups)] * (2 // self.lookups)
        pooled = [sum(toy.mean(part[key]) for part in rows) for key in toy.FEATURES]
        scores: Tensor = self.head(torch.cat(pooled, dim=1)).squeeze(-1)
        return scores


class TwoLookups(OneLookup):
    lookups = 2


class LeavesTablesOut(OneLookup):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.05)


class Frozen(OneLookup):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings.requires_grad_(False)


def fit(rank: int, kind: type[toy.Model], optimizer: str) -> tuple[dict[str, Tensor], bool]:
    """The weights, and whether the tables have changed."""
    pl.seed_everything(1, verbose=False)
    model = kind()
    before = {name: value.clone() for name, value in model.state_dict().items() if "embeddings" in name}
    tables = {"optimizer": optimizer, "lr": 0.1}
    toy.trainer(FreeScaleStrategy(balance="off", embedding_optimizer=tables), 2, max_steps=1).fit(model, toy.loader(24))
    weights = toy.weights(model)
    return weights, not toy.same({name: weights[name] for name in before}, before)


def difference(optimizer: str) -> float:
    once, twice = (run_ranks(fit, args=(kind, optimizer))[0][0] for kind in (OneLookup, TwoLookups))
    return max(float((once[key] - twice[key]).abs().max()) for key in once)


def test_two_look_ups_are_two_updates() -> None:
    assert difference("sgd") < 1e-6
    for optimizer in ("adagrad", "rowwise_adagrad", "adam"):
        assert difference(optimizer) > 1e-2


def test_tables_that_no_optimizer_has_train_unless_they_are_frozen() -> None:
    assert run_ranks(fit, args=(LeavesTablesOut, "sgd"))[0][1]
    assert not run_ranks(fit, args=(Frozen, "sgd"))[0][1]


def look_up_without_gradients(rank: int) -> None:
    model = toy.Model()
    trainer = toy.trainer(FreeScaleStrategy(), 2, max_steps=1, limit_val_batches=1)
    trainer.fit(model, toy.loader(8), toy.loader(8))
    features = toy.collate([toy.Samples(2)[0], toy.Samples(2)[1]]).features
    with torch.no_grad():
        model(features)
    with torch.inference_mode(), pytest.raises(NotImplementedError):
        model(features)


def test_a_look_up_in_inference_mode_fails_on_a_cpu() -> None:
    run_ranks(look_up_without_gradients)


class DrawingSamples(toy.Samples):
    def __getitem__(self, index: int) -> Any:
        torch.rand(())
        return super().__getitem__(index)


class Draws(toy.Model):
    def on_train_start(self) -> None:
        self.drawn: list[float] = []

    def training_step(self, batch: toy.Batch, batch_idx: int) -> Tensor:
        self.drawn.append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)


def draw(rank: int, strategy: str, workers: int) -> list[float]:
    pl.seed_everything(1, verbose=False)
    model = Draws()
    data = DataLoader(DrawingSamples(24), 2, collate_fn=toy.collate, num_workers=workers)
    toy.trainer(strategy, 2, max_epochs=1).fit(model, data)
    return model.drawn


def test_a_loader_with_a_worker_draws_as_with_ddp_and_one_without_does_not() -> None:
    drawn = {
        (strategy, workers): run_ranks(draw, args=(strategy, workers))
        for strategy in ("ddp", "freescale", "freescale_sync")
        for workers in (0, 1)
    }
    for strategy in ("freescale", "freescale_sync"):
        assert drawn[strategy, 1] == drawn["ddp", 1]
        assert drawn[strategy, 0] != drawn["ddp", 0]


class StopsTogether(toy.Model):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        stop = self.global_rank == 1 and batch_idx == 2
        assert isinstance(self.trainer.strategy, FreeScaleStrategy)
        self.trainer.should_stop |= self.trainer.strategy.reduce_boolean_decision(stop, all=False)


class StopsAlone(toy.Model):
    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop |= self.global_rank == 1 and self.trainer.global_step == 3


def error_of_stopping_alone(rank: int, prioritize: bool) -> str:
    trainer = toy.trainer(FreeScaleStrategy(prioritize=prioritize, timeout=5.0), 2, max_epochs=2)
    with pytest.raises((FreeScaleError, RuntimeError)) as caught:
        trainer.fit(StopsAlone(), toy.loader(48))
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


@pytest.mark.parametrize("prioritize", [True, False])
def test_a_rank_that_stops_alone_is_named(prioritize: bool) -> None:
    for error in run_ranks(error_of_stopping_alone, args=(prioritize,)):
        assert re.search(r"Rank 0 was in epoch 0, and rank 1 at the end of (epoch 0|the training)", error), error


def steps(rank: int) -> int:
    trainer = toy.trainer(FreeScaleStrategy(prioritize=True), 2, max_epochs=2)
    trainer.fit(StopsTogether(), toy.loader(48))
    return trainer.global_step


def test_all_ranks_can_decide_to_stop() -> None:
    assert run_ranks(steps) == [3, 3]
