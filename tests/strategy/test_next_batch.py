"""``strategy.next_batch()``: the batch of the next step, for models that prepare something for it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_freescale import FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks


class Model(toy.Model):
    """Notes the batch of each step, and what the strategy says about the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[Any] = []
        self.announced: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append(batch)
        self.announced.append(self.trainer.strategy.next_batch())
        return super().training_step(batch, batch_idx)


class ChangingModel(Model):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


def fit(rank: int, kind: type[Model], prioritize: bool) -> tuple[int, list[str]]:
    """Number of steps, and for each whether its next batch was known: ``"right"``, ``"wrong"`` or ``"none"``."""
    pl.seed_everything(1, verbose=False)
    model = kind()
    strategy = FreeScaleStrategy(sharding="row_wise", prioritize=prioritize, balance="off")
    toy.trainer(strategy, 2, max_epochs=1).fit(model, toy.loader(20, 2, shuffle=False))
    following = [*model.trained[1:], None]
    found = [
        "none" if got is None else ("right" if got is want else "wrong")
        for got, want in zip(model.announced, following, strict=True)
    ]
    return len(model.trained), found


def test_the_next_batch_is_known_in_a_prioritized_step() -> None:
    for steps, found in run_ranks(fit, 2, (Model, True)):
        assert steps == 5
        assert found == ["right"] * 4 + ["none"]


def test_it_is_not_known_if_user_code_may_replace_it_or_nothing_is_prefetched() -> None:
    for _, found in run_ranks(fit, 2, (ChangingModel, True)):
        assert set(found) == {"none"}
    for _, found in run_ranks(fit, 2, (Model, False)):
        assert set(found) == {"none"}
