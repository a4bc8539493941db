"""Whether samples move between ranks: the strategy, the model or the user may decide against it, also for a data module."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_freescale import ConfigurationError, FreeScaleStrategy, SeqRecDataModule
from tests import toy
from tests.balance.test_balanced_training import Recorder
from tests.ranks import run_ranks

ITEMS = 60


class CoupledHSTU(Recorder):
    couples_samples = True


class CoupledModel(toy.Model):
    couples_samples = True


def fit(folder: str, strategy: Any, kind: type[Recorder] = Recorder, **options: Any) -> list[list[int]]:
    """Train HSTU for two epochs. Returns the users of each step of this rank."""
    synthetic = {"users": 48, "items": ITEMS, "mean_length": 12, "sigma": 1.2, "max_length": 64}
    data = SeqRecDataModule(
        batch_size=4, max_history=32, num_negatives=4, cache_dir=folder, synthetic=synthetic, **options
    )
    model = kind(ITEMS, embedding_dim=8, num_layers=1, num_heads=2, max_history=32)
    toy.trainer(strategy, 2, max_epochs=2).fit(model, datamodule=data)
    return model.users


def balance_of_the_data_module(rank: int, folder: str) -> dict[str, list[list[int]]]:
    return {
        "off": fit(folder, FreeScaleStrategy(balance="off"), balance="off"),
        "baseline": fit(folder, "freescale_sync"),
        "another strategy": fit(folder, "ddp"),
        "coupled samples": fit(folder, "freescale", CoupledHSTU),
        "default": fit(folder, "freescale"),
        "fixed": fit(folder, "freescale_sync", balance="fixed"),
        "strategy's mode": fit(folder, FreeScaleStrategy(balance="zigzag")),
        "zigzag": fit(folder, "freescale_sync", balance="zigzag"),
    }


def test_by_default_the_data_module_follows_the_strategy(tmp_path: Any) -> None:
    for rank, found in enumerate(run_ranks(balance_of_the_data_module, args=(str(tmp_path),), timeout=110)):
        assert len(found["off"]) == 12
        for name in ("baseline", "another strategy", "coupled samples"):
            assert found[name] == found["off"], (rank, name)
        assert found["default"] == found["fixed"] != found["off"]  # the comparison can fail
        assert found["strategy's mode"] == found["zigzag"] != found["fixed"]


def coupled_models(rank: int, folder: str) -> tuple[dict[str, Any], list[str]]:
    seen = {}
    for name, kind, strategy in (
        ("off", toy.Model, FreeScaleStrategy(balance="off")),
        ("default", toy.Model, FreeScaleStrategy()),
        ("coupled", CoupledModel, FreeScaleStrategy()),
    ):
        module = kind()
        toy.trainer(strategy, 2, max_epochs=1).fit(module, toy.loader(24, shuffle=False))
        seen[name] = module.seen
    messages = []
    for strategy, options in ((FreeScaleStrategy(), {"balance": "fixed"}), (FreeScaleStrategy(balance="zigzag"), {})):
        with pytest.raises(ConfigurationError) as refused:
            fit(folder, strategy, CoupledHSTU, **options)
        messages.append(str(refused.value))
    return seen, messages


def test_coupled_samples_stay_on_their_rank(tmp_path: Any) -> None:
    for seen, messages in run_ranks(coupled_models, args=(str(tmp_path),), timeout=110):
        assert seen["coupled"] == seen["off"] != seen["default"]
        for message, mode, whose in zip(messages, ("fixed", "zigzag"), ("data module", "strategy"), strict=True):
            assert message.startswith(f"balance='{mode}' of the {whose} moves samples between ranks, but CoupledHSTU")


def loader_of_one_rank(rank: int, folder: str) -> str:
    data = SeqRecDataModule(batch_size=4, max_history=32, cache_dir=folder, synthetic={"users": 48, "items": ITEMS})
    model = Recorder(ITEMS, embedding_dim=8, num_layers=1, num_heads=2, max_history=32)
    with pytest.raises(ConfigurationError) as refused:
        toy.trainer("freescale", 2, max_epochs=1).fit(model, data.train_dataloader())
    return str(refused.value)


def test_a_loader_that_was_made_without_the_trainer_is_refused(tmp_path: Any) -> None:
    """All ranks would train on the same samples."""
    for message in run_ranks(loader_of_one_rank, args=(str(tmp_path),)):
        assert message.startswith("the loader was made for 1 ranks, but there are 2. Pass the data module itself")
