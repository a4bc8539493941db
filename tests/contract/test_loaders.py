"""Loaders of every kind: without a length, several at once, uneven, fetched by the step itself; with transfer hooks."""

from __future__ import annotations

import os
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_freescale import FreeScaleStrategy
from tests import toy
from tests.ranks import RankFailed, run_ranks

SGD = {"optimizer": "sgd", "lr": 0.05}


class SgdModel(toy.Model):
    """Trains everything with SGD, so that one rank with plain DDP gives the truth."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def strategy(name: str, **options: Any) -> Any:
    if name == "ddp":
        return "ddp"
    return FreeScaleStrategy(
        prioritize=name != "synchronous",
        embedding_optimizer=SGD,
        sharding="row_wise",
        balance="fixed" if name == "balanced" else "off",
        **options,
    )


class Stream(IterableDataset):
    """Batches of a rank without a length. Rank ``r`` of ``world`` gets ``r + 1`` parts of every global batch."""

    def __init__(self, rank: int, world: int, batches: int = 6, size: int = 6):
        parts = torch.arange(world + 1).cumsum(0) * size // (world * (world + 1) // 2)
        self.bounds, self.batches, self.size = (int(parts[rank]), int(parts[rank + 1])), batches, size

    def __iter__(self) -> Iterator[toy.Batch]:
        samples = toy.Samples(1000)
        for batch in range(self.batches):
            yield toy.collate([samples[batch * self.size + index] for index in range(*self.bounds)])


def stream(rank: int, world: int, **options: Any) -> DataLoader:
    return DataLoader(Stream(rank, world, **options), batch_size=None)


def fit(
    rank: int, name: str, world: int, loader: Any = stream, model: type = SgdModel, **options: Any
) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    module = model()
    trainer = toy.trainer(strategy(name, **options.pop("strategy", {})), world, **({"max_epochs": 1} | options))
    trainer.fit(module, loader(rank, world))
    schedule_batches = getattr(module, "exchanged", None)
    return {"weights": toy.weights(module), "seen": module.seen, "losses": module.losses, "exchanged": schedule_batches}


class CountsExchanges(SgdModel):
    """Notes how many batches the schedule has requested ids for."""

    def on_train_end(self) -> None:
        schedule = self.trainer.strategy.schedule
        if schedule is not None:
            self.exchanged = [module.exchange.stats.batches for module in schedule.modules]


def test_batches_without_a_length_keep_their_own_loss_weight() -> None:
    """Lightning fetches one batch ahead of the training if a loader has no length."""
    truth = run_ranks(fit, 1, args=("ddp", 1))[0]
    for name in ("synchronous", "prioritized"):
        for result in run_ranks(fit, 2, args=(name, 2, stream, CountsExchanges)):
            for key, value in truth["weights"].items():
                torch.testing.assert_close(result["weights"][key], value, rtol=1e-4, atol=1e-6)
            if name == "prioritized":  # The first step is synchronous. Every later batch is requested once.
                assert result["exchanged"] == [5]


class WrongWeight(FreeScaleStrategy):
    """The negative control: the loss gets the weight of the following batch."""

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        current = self._pipeline.current
        self._pipeline.current = [batch.next if batch.next.batch is not None else batch for batch in current]
        try:
            return super().backward(*args, **kwargs)
        finally:
            self._pipeline.current = current


class Growing(Stream):
    """The share of a rank changes from batch to batch."""

    def __iter__(self) -> Iterator[toy.Batch]:
        samples = toy.Samples(1000)
        for batch in range(self.batches):
            cut = 1 + batch % (self.size - 1)
            low, high = (
                (0, self.size) if self.bounds == (0, self.size) else ((0, cut), (cut, self.size))[self.bounds[0] > 0]
            )
            yield toy.collate([samples[batch * self.size + index] for index in range(low, high)])


def growing(rank: int, world: int) -> DataLoader:
    return DataLoader(Growing(rank, world), batch_size=None)


def fit_wrong(rank: int) -> dict[str, torch.Tensor]:
    pl.seed_everything(3, verbose=False)
    module = SgdModel()
    wrong = WrongWeight(prioritize=False, embedding_optimizer=SGD, sharding="row_wise", balance="off")
    toy.trainer(wrong, 2, max_epochs=1).fit(module, growing(rank, 2))
    return toy.weights(module)


def test_shares_that_change_from_batch_to_batch() -> None:
    truth = run_ranks(fit, 1, args=("ddp", 1, growing))[0]["weights"]
    right = run_ranks(fit, 2, args=("prioritized", 2, growing))[0]["weights"]
    wrong = run_ranks(fit_wrong)[0]
    for key, value in truth.items():
        torch.testing.assert_close(right[key], value, rtol=1e-4, atol=1e-6)
    assert any((wrong[key] - value).abs().max() > 1e-4 for key, value in truth.items())


# ---- resume ----------------------------------------------------------------------------------------------------------
def resume(rank: int, folder: str, name: str, hook: str, sized: bool) -> tuple[Any, Any]:
    """Trains ``6`` batches at once, and again from a checkpoint that is written in ``hook`` of batch 3."""

    class Save(pl.Callback):
        def save(self, trainer: pl.Trainer, batch_idx: int) -> None:
            if batch_idx == 3:
                trainer.save_checkpoint(f"{folder}/{hook}.ckpt")

        def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if hook == "on_train_batch_start":
                self.save(trainer, batch_idx)

        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, out: Any, batch: Any, batch_idx: int) -> None:
            if hook == "on_train_batch_end":
                self.save(trainer, batch_idx)

    def loader() -> Any:
        return toy.loader(24, shuffle=False) if sized else stream(rank, 2)

    results = []
    for callbacks, path in (([Save()], None), ([], f"{folder}/{hook}.ckpt")):
        pl.seed_everything(3, verbose=False)
        module = SgdModel()
        trainer = toy.trainer(strategy(name), 2, max_epochs=1, callbacks=callbacks)
        trainer.fit(module, loader(), ckpt_path=path)
        results.append((module.seen, toy.weights(module)))
    return results[0], results[1]


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_a_resume_repeats_and_loses_no_batch(tmp_path: Path, hook: str, sized: bool) -> None:
    for (seen, weights), (resumed, resumed_weights) in run_ranks(
        resume, args=(str(tmp_path), "prioritized", hook, sized)
    ):
        assert resumed == seen[3 if hook == "on_train_batch_start" else 4 :]
        assert toy.same(weights, resumed_weights)


# ---- several loaders ---------------------------------------------------------------------------------------------------
class SumsLoaders(SgdModel):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = [part for part in toy.leaves(batch) if part is not None]
        self.seen.append([part.index.tolist() for part in parts])
        loss = sum(self.loss(part) for part in parts)
        self.losses.append(loss.item())
        return loss


def nested(rank: int, world: int) -> Any:
    loaders = {
        "a": toy.loader(24, batch_size=6 // world, shuffle=False),
        "b": [toy.loader(12, batch_size=6 // world, shuffle=False)],
    }
    return CombinedLoader(loaders, "max_size_cycle")


def test_nested_loaders_train_as_with_ddp() -> None:
    truth = run_ranks(fit, 2, args=("ddp", 2, nested, SumsLoaders))
    for name in ("synchronous", "prioritized"):
        for expected, result in zip(truth, run_ranks(fit, 2, args=(name, 2, nested, SumsLoaders)), strict=True):
            assert result["seen"] == expected["seen"]
            torch.testing.assert_close(result["losses"], expected["losses"], rtol=1e-5, atol=1e-6)


# ---- batches of other types --------------------------------------------------------------------------------------------
class TakesMappings(SgdModel):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert type(batch).__name__ == self.kind
        return super().training_step(batch["batch"], batch_idx)


def mapping_loader(kind: str) -> DataLoader:
    def collate(samples: list) -> Any:
        batch = toy.collate(samples)
        made = {"defaultdict": defaultdict(list), "OrderedDict": OrderedDict(), "dict": {}}[kind]
        made["batch"] = batch
        return made

    return DataLoader(toy.Samples(16), batch_size=2, collate_fn=collate)


def fit_mappings(rank: int) -> list[int]:
    steps = []
    for kind in ("defaultdict", "OrderedDict", "dict"):
        for balance in ("off", "fixed"):
            pl.seed_everything(3, verbose=False)
            module = TakesMappings()
            module.kind = kind
            plugin = FreeScaleStrategy(embedding_optimizer=SGD, balance=balance, prioritize=True)
            toy.trainer(plugin, 2, max_epochs=1).fit(module, mapping_loader(kind))
            steps.append(len(module.losses))
    return steps


def test_mappings_of_every_kind_keep_their_type() -> None:
    assert run_ranks(fit_mappings) == [[4] * 6] * 2


# ---- dataloader_iter, transfer hooks -----------------------------------------------------------------------------------
class FetchesItself(SgdModel):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


def sized(rank: int, world: int) -> Any:
    return toy.loader(24, shuffle=False)


def test_a_step_that_fetches_its_own_batches_trains_as_with_ddp() -> None:
    truth = run_ranks(fit, 2, args=("ddp", 2, sized, FetchesItself))
    for expected, result in zip(truth, run_ranks(fit, 2, args=("prioritized", 2, sized, FetchesItself)), strict=True):
        assert result["seen"] == expected["seen"]
        torch.testing.assert_close(result["losses"], expected["losses"], rtol=1e-5, atol=1e-6)


class Hooked(SgdModel):
    """Notes which hook was called with which loader."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[tuple[str, int]] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.hooks.append(("before", dataloader_idx))
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.hooks.append(("transfer", dataloader_idx))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.hooks.append(("after", dataloader_idx))
        return batch


class OnlyAfter(SgdModel):
    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[tuple[str, int]] = []

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.hooks.append(("after", dataloader_idx))
        return batch


def fit_hooked(rank: int, name: str) -> list[Any]:
    results = []
    for model in (Hooked, OnlyAfter):
        pl.seed_everything(3, verbose=False)
        module = model()
        module.validation_step = lambda batch, batch_idx, dataloader_idx=0: None
        trainer = toy.trainer(strategy(name), 2, max_epochs=1, limit_train_batches=3, limit_val_batches=1)
        trainer.fit(module, toy.loader(24), [toy.loader(8, shuffle=False), toy.loader(8, shuffle=False)])
        results.append(module.hooks)
    return results


def test_transfer_hooks_are_called_as_with_ddp() -> None:
    truth = run_ranks(fit_hooked, args=("ddp",))
    assert ("after", 1) in truth[0][0]
    for name in ("synchronous", "prioritized"):
        assert run_ranks(fit_hooked, args=(name,)) == truth


# ---- what Lightning and users do with loaders --------------------------------------------------------------------------
class Noisy(toy.Samples):
    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return (*sample[:2], float(torch.rand(()) > 0.5) + torch.rand(()).item())


class KeepsLabels(SgdModel):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.labels = [*getattr(self, "labels", []), *batch.label.tolist()]
        return super().training_step(batch, batch_idx)


def fit_workers(rank: int) -> tuple[list[float], bool]:
    pl.seed_everything(3, workers=True, verbose=False)
    module = KeepsLabels()
    loader = DataLoader(Noisy(8), batch_size=2, collate_fn=toy.collate, num_workers=1)
    trainer = toy.trainer(strategy("synchronous"), 2, max_epochs=1, limit_val_batches=1)
    trainer.fit(module, loader, toy.loader(8, shuffle=False))
    is_loader = isinstance(trainer.train_dataloader, DataLoader) and isinstance(trainer.val_dataloaders, DataLoader)
    os.environ.pop("PL_SEED_WORKERS", None)
    return module.labels, is_loader


def test_workers_of_different_ranks_draw_different_numbers() -> None:
    (zero, is_loader), (one, _) = run_ranks(fit_workers)
    assert is_loader
    assert len(zero) == len(one) == 4
    assert not set(zero) & set(one)


class Reuses(Stream):
    """Fills the same label in every batch; or yields the same batch every time."""

    def __init__(self, rank: int, world: int, fills: bool):
        super().__init__(rank, world)
        self.fills, self.label = fills, torch.zeros(self.bounds[1] - self.bounds[0])

    def __iter__(self) -> Iterator[toy.Batch]:
        first = None
        for batch in super().__iter__():
            first = first or batch
            if self.fills:
                batch.label = self.label.copy_(batch.index / 40)
            yield batch if self.fills else first


class ChangesItsBatch(SgdModel):
    def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
        batch.label.mul_(0.5)
        return super().training_step(batch, batch_idx)


def reuses(rank: int, world: int, fills: bool = True) -> DataLoader:
    return DataLoader(Reuses(rank, world, fills), batch_size=None)


def repeats(rank: int, world: int) -> DataLoader:
    return reuses(rank, world, fills=False)


@pytest.mark.parametrize("name", ["prioritized", "balanced"])
def test_a_loader_that_fills_the_tensors_of_earlier_batches_is_refused(name: str) -> None:
    """Batches wait for their step, so the step would see the values of a later batch."""
    with pytest.raises(RankFailed, match="rank 0, 1: batch 1: the loader wrote batch 1 into the memory of batch 0"):
        run_ranks(fit, 2, args=(name, 2, reuses))


def test_a_loader_may_yield_one_batch_again_and_again() -> None:
    """The step may also change it: the next step then sees the change, as with DDP."""
    truth = run_ranks(fit, 1, args=("ddp", 1, repeats, ChangesItsBatch))[0]
    result = run_ranks(fit, 2, args=("prioritized", 2, repeats, ChangesItsBatch))[0]
    for key, value in truth["weights"].items():
        torch.testing.assert_close(result["weights"][key], value, rtol=1e-4, atol=1e-6)
