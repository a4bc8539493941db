"""``prioritize="auto"`` in a training: it keeps the faster exchange, and no switch changes a result."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.embedding import mode_review, mode_trial
from tests import toy
from tests.ranks import run_ranks
from tests.strategy.test_strategy import Plain, fit


class Auto(FreeScaleStrategy):
    """Leaves on the model what the trial found, and whether anything stands between the model and TorchRec."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "prioritize": "auto", "balance": "off"})

    def teardown(self) -> None:
        choice, module = self.mode_choice, self.lightning_module
        module.lanes = choice and (
            choice.prioritized,
            self.schedule is not None,
            "forward" in vars(module.embeddings),
        )
        super().teardown()


@pytest.mark.parametrize(("gain", "prioritized"), [(0.0, False), (1e9, True)])
def test_auto_keeps_the_faster_path_and_switching_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, gain: float, prioritized: bool
) -> None:
    monkeypatch.setattr(mode_trial, "MAX_TIME_RATIO", gain)  # whatever is measured
    monkeypatch.setattr(mode_trial, "BLOCK_STEPS", 3)
    options = {"max_epochs": 4, "max_steps": 28, "limit_val_batches": 1, "val_check_interval": 0.5}
    plain, auto = (run_ranks(fit, args=(strategy, 2, options)) for strategy in (Plain, Auto))
    assert [rank["losses"] for rank in auto] == [rank["losses"] for rank in plain]
    assert all(toy.same(a["weights"], b["weights"]) for a, b in zip(auto, plain, strict=True))
    assert auto[0]["lanes"] == auto[1]["lanes"] == (prioritized,) * 3


class SecondCollection(toy.Model):
    """The same model with a second collection of the same features."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(name="more", embedding_dim=toy.DIM, num_embeddings=96, feature_names=["clicks", "carts"])
        ]
        self.more = EmbeddingCollection(tables=tables, device=torch.device("cpu"))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.more(features)
        return super().forward(features) + sum(toy.mean(rows[key]).sum(dim=1) for key in ("clicks", "carts"))


class Reviewed(Auto):
    """Counts the trials of a fit, and keeps the modules that each of them has chosen."""

    def teardown(self) -> None:
        chosen = self._chosen
        super().teardown()
        self.lightning_module.lanes = chosen

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        before = self.mode_choice
        output = super().training_step(*args, **kwargs)
        if self.mode_choice is not before and self.mode_choice is not None:
            self._chosen.append(self.mode_choice.modules)
        return output

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._chosen: list[tuple[str, ...]] = []


def fit_growing(rank: int, strategy: type) -> dict[str, Any]:
    """Trains on batches of 2 samples, and of 6 samples in the second epoch."""
    pl.seed_everything(1, verbose=False)
    module = SecondCollection()
    trainer = toy.trainer(
        strategy(embedding_optimizer={"optimizer": "adagrad", "lr": 0.1}),
        2,
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
    )

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return toy.loader(*((240, 2) if self.trainer.current_epoch == 0 else (720, 6)), shuffle=False)

    trainer.fit(module, datamodule=Data())
    return {"losses": module.losses, "weights": toy.weights(module), "chosen": getattr(module, "lanes", None)}


def test_auto_switches_single_modules_and_measures_again_when_batches_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every comparison is won by the second setting: all modules, then without the first, then without both."""
    monkeypatch.setattr(mode_trial, "MAX_TIME_RATIO", 1e9)
    monkeypatch.setattr(mode_trial, "BLOCK_STEPS", 2)
    monkeypatch.setattr(mode_review, "REVIEW_STEPS", 20)
    plain, auto = (run_ranks(fit_growing, args=(strategy,)) for strategy in (Plain, Reviewed))
    assert [rank["losses"] for rank in auto] == [rank["losses"] for rank in plain]
    assert all(toy.same(a["weights"], b["weights"]) for a, b in zip(auto, plain, strict=True))
    assert [rank["chosen"] for rank in auto] == [[(), ()]] * 2  # two choices: at first, and for the larger batches


def test_auto_decides_alike_on_all_ranks() -> None:
    auto = run_ranks(fit, args=(Auto, 2, {"max_epochs": 9, "max_steps": 58}))
    assert auto[0]["lanes"] == auto[1]["lanes"]
    assert auto[0]["lanes"] is not None  # the trial is over
