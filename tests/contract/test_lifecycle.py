"""What a Trainer opens ends with it: threads, file descriptors, shared memory. Models and Trainers can be used again."""

from __future__ import annotations

import copy
import io
import os
import pickle
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_freescale import ConfigurationError, FreeScaleStrategy
from lightning_freescale.embedding import exchange_mode
from lightning_freescale.strategy import control
from tests import toy
from tests.contract.test_plain_ddp import Dense
from tests.ranks import RankFailed, run_ranks
from tests.soak import MAX_GROWTH_MIB, held, problems, summarise

# ``FREESCALE_SOAK=200`` runs the long soak: it takes minutes. Leaks of one Trainer show after a few.
TRAINERS = int(os.environ.get("FREESCALE_SOAK", "8"))
WARM_UP_TRAINERS = 4
MAX_TRAINER_GROWTH_MIB = 24 + TRAINERS // 4  # The allocator's pools and the rendezvous store grow a little.


def strategies(number: int) -> Any:
    """The strategy of the Trainer with this number: every kind of exchange, balancing and fitted costs."""
    return (
        FreeScaleStrategy(prioritize=True),
        FreeScaleStrategy(fit_costs=2, prioritize=False),
        FreeScaleStrategy(transport="host"),
        "freescale_sync",
    )[number % 4]


def soak(rank: int, trainers: int, closing: bool) -> list[dict[str, int]]:
    if not closing:
        control.leave = exchange_mode.leave = lambda group: None  # type: ignore[assignment]
    found = []
    for number in range(trainers):
        logger = pl.loggers.CSVLogger(f"logs{rank}", version=number) if number % 2 else False
        trainer = toy.trainer(
            strategies(number), 2, max_epochs=1, limit_train_batches=5, limit_val_batches=1, logger=logger
        )
        trainer.fit(toy.Model(), toy.loader(32), toy.loader(8, shuffle=False))
        del trainer, logger
        found.append(held())
    return found


def growth(found: list[dict[str, int]]) -> dict[str, int]:
    first, last = found[WARM_UP_TRAINERS], found[-1]
    return {name: last[name] - first[name] for name in first}


@pytest.mark.slow
@pytest.mark.timeout(60 + 6 * TRAINERS)
def test_nothing_grows_from_trainer_to_trainer() -> None:
    trainers = (
        TRAINERS - TRAINERS % 4 + WARM_UP_TRAINERS + 1
    )  # The first and the last that count have the same strategy.
    for found in run_ranks(soak, args=(trainers, True), timeout=50 + 6 * trainers):
        grown = growth(found)
        resident = grown.pop("MiB")
        assert grown.keys() == {"threads", "descriptors", "shared memory", "process groups"}
        assert max(grown.values()) <= 0, grown
        assert resident < MAX_TRAINER_GROWTH_MIB


@pytest.mark.slow
def test_the_soak_finds_groups_that_stay_open() -> None:
    for found in run_ranks(soak, args=(WARM_UP_TRAINERS + 5, False), timeout=100):
        grown = growth(found)
        assert grown["threads"] > 8
        assert grown["descriptors"] > 16
        assert grown["process groups"] > 8


def test_the_long_soak_names_what_grows() -> None:
    """``python -m tests.soak`` compares the second quarter of its notes with the last one."""
    notes = [{"step": step, "rate": 10.0, "threads": 5 + (step > 6), "MiB": 100 + 20 * step} for step in range(8)]
    summary = summarise(notes)
    assert summary["grown"] == {"threads": 0.5, "MiB": 80.0}
    assert problems(summary) == ["threads: +0.5", "MiB: +80"]
    assert problems({"grown": {"threads": 0, "MiB": MAX_GROWTH_MIB}}) == []


# ---- used again ------------------------------------------------------------------------------------------------------
def use_again(rank: int, strategy: Any) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module, validation = toy.Model(), toy.loader(8, shuffle=False)
    options: dict[str, Any] = {"limit_train_batches": 4, "limit_val_batches": 2, "num_sanity_val_steps": 0}
    first = toy.trainer(strategy(), 2, max_epochs=1, **options)
    first.fit(module, toy.loader(16), validation)
    first.save_checkpoint("after_fit.ckpt")
    groups = held()["process groups"]
    first.fit_loop.max_epochs = 2
    first.fit(module, toy.loader(16), validation)
    steps = first.global_step
    scores = [first.validate(module, validation, verbose=False)]
    second = toy.trainer(strategy(), 2, max_epochs=1, **options)
    scores.append(second.validate(module, validation, verbose=False))
    second.fit(module, toy.loader(16), validation)
    scores.append(second.test(Tested.of(module), validation, verbose=False))
    return {"steps": steps, "scores": scores, "groups": groups, "groups at the end": held()["process groups"]}


class Tested(toy.Model):
    def test_step(self, batch: toy.Batch, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True, batch_size=len(batch.label))

    @classmethod
    def of(cls, module: toy.Model) -> toy.Model:
        module.__class__ = cls
        return module


def own_strategy() -> FreeScaleStrategy:
    return FreeScaleStrategy(prioritize=True, transport="host")


@pytest.mark.parametrize("strategy", [FreeScaleStrategy, own_strategy])
def test_a_trainer_fits_again_and_another_uses_its_model(strategy: Any) -> None:
    for result in run_ranks(use_again, args=(strategy,)):
        assert result["steps"] == 8
        assert result["scores"][0] == result["scores"][1]
        assert result["scores"][2][0]["test_loss"] > 0
        assert result["groups"] == result["groups at the end"] <= 2  # The default group, and that of the tables.


# ---- a failing rank --------------------------------------------------------------------------------------------------
class Failing(toy.Model):
    def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 3:
            raise ValueError("the user's own mistake")
        return super().training_step(batch, batch_idx)


def fit_failing(rank: int, seconds: float) -> None:
    start = time.monotonic()
    strategy = FreeScaleStrategy(prioritize=True, timeout=100)
    try:
        toy.trainer(strategy, 2, logger=pl.loggers.CSVLogger("logs")).fit(Failing(), toy.loader())
    finally:
        assert time.monotonic() - start < seconds, "the end of the run has waited for another rank"


def test_the_end_of_a_failing_rank_does_not_wait_for_the_others() -> None:
    """The timeout is 100 seconds. No rank waits that long."""
    with pytest.raises(RankFailed) as failure:
        run_ranks(fit_failing, args=(60,), every_error=True, timeout=90)
    assert "the user's own mistake" in failure.value.errors[1]
    assert "waited for another rank" not in str(failure.value)


class FailingBeforeSharding(toy.Model):
    def __init__(self) -> None:
        super().__init__(device="meta")

    def setup(self, stage: str) -> None:
        raise ValueError("the user's own mistake")


def fail_before_sharding(rank: int) -> str:
    with pytest.raises(ValueError, match="own mistake") as failure:
        toy.trainer("freescale", 2).fit(FailingBeforeSharding(), toy.loader())
    return str(failure.value)


def test_the_end_does_not_hide_an_error_before_the_tables_exist() -> None:
    assert run_ranks(fail_before_sharding) == ["the user's own mistake"] * 2


# ---- copies of a model -----------------------------------------------------------------------------------------------
class WithoutTables(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


COPIES = (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)))


def copy_models(rank: int) -> list[str]:
    plain, data = WithoutTables(), torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=2)
    trainer = toy.trainer(FreeScaleStrategy(), 2, max_epochs=1)
    assert pickle.loads(pickle.dumps(trainer)).max_epochs == 1
    trainer.fit(plain, data)
    torch.save(plain, io.BytesIO())  # with its Trainer
    for make in COPIES:
        copied = make(plain)
        assert toy.same(copied.state_dict(), plain.state_dict())
        toy.trainer(FreeScaleStrategy(), 2, max_epochs=1).fit(copied, data)
        assert not toy.same(copied.state_dict(), plain.state_dict())
    module = toy.Model()
    toy.trainer(FreeScaleStrategy(), 2, max_epochs=1).fit(module, toy.loader(16))
    messages = []
    for make in (*COPIES, lambda module: torch.save(module, io.BytesIO())):
        with pytest.raises(ConfigurationError) as refused:
            make(module)
        messages.append(str(refused.value))
    return messages


def test_models_without_tables_can_be_copied_and_others_say_what_to_do() -> None:
    for messages in run_ranks(copy_models):
        assert len(messages) == 3
        assert all("save_checkpoint" in message and "freescale export" in message for message in messages)


def before_set_up(rank: int, folder: str) -> dict[str, Any]:
    """Callbacks that refer to the Trainer are copied; a checkpoint is read before any set-up."""

    class Keeper(pl.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self.trainer = trainer

    found: dict[str, Any] = {}
    for name, strategy in (("ddp", "ddp"), ("ours", FreeScaleStrategy())):
        trainer = toy.trainer(strategy, 2, max_steps=1, callbacks=[Keeper()])
        trainer.fit(Dense(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))
        found[f"{name} copies"] = len(copy.deepcopy(trainer.callbacks)) - len(trainer.callbacks)
        trainer.save_checkpoint(f"{folder}/{name}.ckpt")
        fresh = toy.trainer("ddp" if name == "ddp" else FreeScaleStrategy(), 2)
        checkpoint = fresh.strategy.load_checkpoint(f"{folder}/{name}.ckpt", weights_only=True)
        found[f"{name} step"] = checkpoint["global_step"]
        with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
            toy.trainer(type(strategy)() if name == "ours" else "ddp", 2).fit(
                Dense(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2), ckpt_path=f"{folder}/none.ckpt"
            )
    return found


def test_callbacks_are_copied_and_checkpoints_are_read_before_set_up(tmp_path: Path) -> None:
    assert run_ranks(before_set_up, args=(str(tmp_path),))[0] == {
        "ddp copies": 0,
        "ours copies": 0,
        "ddp step": 1,
        "ours step": 1,
    }
