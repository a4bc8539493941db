"""A second ``fit`` of a model trains with new optimizers, those of the tables included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_freescale import FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks
from tests.slow import slow
from tests.strategy import test_zero_collision as zero_collision


def fit(model: toy.Model, optimizer: str, prioritize: bool, **options: Any) -> dict[str, Tensor]:
    tables = {"optimizer": optimizer, "lr": 0.1}
    strategy = FreeScaleStrategy(embedding_optimizer=tables, prioritize=prioritize, balance="off")
    ckpt_path = options.pop("ckpt_path", None)
    toy.trainer(strategy, 2, **({"max_epochs": 1} | options)).fit(model, toy.loader(24), ckpt_path=ckpt_path)
    return toy.weights(model)


def second_fits(rank: int, optimizer: str, prioritize: bool) -> tuple[bool, bool]:
    """Whether a second fit trains as a new model with the same weights, and whether it trains at all."""
    used, new = toy.Model(), toy.Model()
    weights = fit(used, optimizer, prioritize)
    new.load_state_dict(weights)
    again = fit(used, optimizer, prioritize)
    return toy.same(again, fit(new, optimizer, prioritize)), not toy.same(again, weights)


@pytest.mark.parametrize("prioritize", [True, slow(False)])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad", "adam", "partial_rowwise_lamb"])
def test_a_second_fit_trains_as_a_new_model_with_these_weights(optimizer: str, prioritize: bool) -> None:
    assert run_ranks(second_fits, args=(optimizer, prioritize)) == [(True, True)] * 2


def resume_a_used_model(rank: int, folder: str) -> bool:
    pl.seed_everything(1, verbose=False)
    saves = pl.callbacks.ModelCheckpoint(folder, filename="first", every_n_epochs=1, save_top_k=-1)
    model = toy.Model()
    once = fit(model, "adam", True, max_epochs=2, callbacks=[saves], enable_checkpointing=True)
    return toy.same(once, fit(model, "adam", True, max_epochs=2, ckpt_path=f"{folder}/first.ckpt"))


def test_a_resume_of_a_used_model_restores_the_state_of_the_tables(tmp_path: Path) -> None:
    assert run_ranks(resume_a_used_model, args=(str(tmp_path),)) == [True, True]


class Started(pl.Callback):
    """Notes the identities, their ages and the state of the optimizer when a training starts."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.found = zero_collision.whole(module, trainer.strategy)


def identities_of_a_second_fit(rank: int) -> tuple[list[str], list[str]]:
    """What of the tables a second fit finds changed after the first one, and what of its optimizer is not zero."""
    model, started, after = zero_collision.Model(), Started(), {}
    for _ in range(2):
        strategy = FreeScaleStrategy(balance="off", prioritize=True)
        trainer = toy.trainer(strategy, 2, max_epochs=1, callbacks=[started])
        trainer.fit(model, zero_collision.loader(24))
        after = after or zero_collision.whole(model, strategy)
    assert any(torch.any(value) for key, value in after.items() if "momentum" in key)  # there is something to reset
    return (
        [key for key, value in started.found.items() if "momentum" not in key and not torch.equal(value, after[key])],
        [key for key, value in started.found.items() if "momentum" in key and torch.any(value)],
    )


def test_identities_and_ages_stay() -> None:
    assert run_ranks(identities_of_a_second_fit) == [([], [])] * 2
