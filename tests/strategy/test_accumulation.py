"""Gradient accumulation: a step over several micro-batches is the step of one large batch, also for the tables."""

from __future__ import annotations

import doctest
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset
from torchrec import EmbeddingCollection

from lightning_freescale import ConfigurationError, FreeScaleStrategy, ZeroCollision, zero_collision
from lightning_freescale.embedding import mode_trial
from lightning_freescale.embedding.held_gradients import HeldLookup
from lightning_freescale.runtime.log import logger
from lightning_freescale.strategy import accumulation
from tests import toy
from tests.ranks import run_ranks

Result = tuple[list[float], dict[str, Tensor], int]
SYNC: dict[str, Any] = {"balance": "off", "prioritize": False}


def fit(
    rank: int,
    world: int,
    bags: bool,
    strategy: dict[str, Any],
    *,
    size: int,
    batch_size: int,
    optimizer: str = "rowwise_adagrad",
    schedule: dict[int, int] | None = None,
    callback: type[pl.Callback] | None = None,
    **options: Any,
) -> Result:
    """Losses, weights and optimizer steps."""
    pl.seed_everything(1, verbose=False)
    model = toy.Model(bags=bags)
    tables = {"optimizer": optimizer, "lr": 0.1}
    callbacks: list[pl.Callback] = [GradientAccumulationScheduler(schedule)] if schedule else []
    callbacks += [callback()] if callback else []
    own = FreeScaleStrategy(embedding_optimizer=tables, **strategy)
    trainer = toy.trainer(own, world, callbacks=callbacks, use_distributed_sampler=True, **options)
    trainer.fit(model, toy.loader(size, batch_size, shuffle=False))
    return model.losses, toy.weights(model), trainer.global_step


def fits(rank: int, world: int, cases: list[tuple[bool, dict[str, Any], dict[str, Any]]]) -> list[Result]:
    return [fit(rank, world, bags, strategy, **options) for bags, strategy, options in cases]


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[key], b[key], rtol=1e-4, atol=1e-5) for key in a)


# ---- one large batch -------------------------------------------------------------------------------------------------
def test_equal_to_one_large_batch() -> None:
    """54 samples: the last micro-batch has one sample per rank at most, and the last window is not complete."""
    number, small = 4, 2
    for world in (1, 2):
        cases = []
        for bags, optimizer in ((False, "sgd"), (True, "sgd"), (False, "rowwise_adagrad"), (True, "rowwise_adagrad")):
            shared = {"size": 27 * world, "optimizer": optimizer}
            cases.append((bags, SYNC, {**shared, "batch_size": number * small}))
            cases.append((bags, SYNC, {**shared, "batch_size": small, "accumulate_grad_batches": number}))
        for results in run_ranks(fits, world, args=(world, cases)):
            for large, accumulated in zip(results[::2], results[1::2], strict=True):
                assert large[2] == accumulated[2] == 8  # two epochs of four steps
                assert len(accumulated[0]) == 28  # micro-batches
                assert close(large[1], accumulated[1])


class UpdateAtOnce(HeldLookup):
    """Does not hold gradients: every micro-batch updates the rows."""

    def _forward(self, features: Any) -> Tensor:
        return self._look_up(features)


@pytest.mark.parametrize("wrong", ["rows are updated at once", "every micro-batch counts alike"])
def test_the_comparison_can_fail(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong == "rows are updated at once":
        monkeypatch.setattr("lightning_freescale.embedding.held_gradients.HeldLookup", UpdateAtOnce)
    else:
        alike = accumulation.WindowFactors(1.0, 1.0)
        monkeypatch.setattr(accumulation, "window_factors", lambda *_: alike)
    shared = {"size": 27, "optimizer": "sgd"}
    cases = [
        (False, SYNC, {**shared, "batch_size": 8}),
        (False, SYNC, {**shared, "batch_size": 2, "accumulate_grad_batches": 4}),
    ]
    large, accumulated = run_ranks(fits, 1, args=(1, cases))[0]
    assert not close(large[1], accumulated[1])


def test_balanced_micro_batches_of_uneven_ranks_are_one_large_batch() -> None:
    """Two ranks with different numbers of samples, against one rank with all samples of the step."""
    balanced = {"balance": "variable", "prioritize": True}
    shared = {"size": 56, "optimizer": "sgd"}
    two = run_ranks(fits, 2, args=(2, [(False, balanced, {**shared, "batch_size": 2, "accumulate_grad_batches": 3})]))
    one = run_ranks(fits, 1, args=(1, [(False, SYNC, {**shared, "batch_size": 12})]))
    assert two[0][0][2] == one[0][0][2] == 10
    assert close(two[0][0][1], one[0][0][1])


# ---- both strategies -------------------------------------------------------------------------------------------------
def test_equal_under_both_strategies_bit_for_bit() -> None:
    """As a number, and as a schedule that begins and ends with prioritized steps."""
    settings: list[tuple[bool, dict[str, Any], dict[str, Any]]] = [
        (False, {}, {"accumulate_grad_batches": 3}),
        (True, {}, {"accumulate_grad_batches": 3}),
        (False, {}, {"schedule": {1: 3, 2: 1}, "max_epochs": 3}),
        (False, {"dedup": True}, {"accumulate_grad_batches": 3}),
        (False, {"wire": "bfloat16"}, {"accumulate_grad_batches": 3}),
    ]
    cases = [
        (bags, {"balance": "off", "prioritize": prioritize, **own}, {"size": 40, "batch_size": 2, **options})
        for bags, own, options in settings
        for prioritize in (False, True)
    ]
    for results in run_ranks(fits, 2, args=(2, cases)):
        for plain, prioritized in zip(results[::2], results[1::2], strict=True):
            assert plain[0] == prioritized[0]
            assert toy.same(plain[1], prioritized[1])
        assert [result[2] for result in results[::2]] == [8, 8, 24, 8, 8]
        assert not toy.same(results[0][1], results[8][1])  # another wire gives other tables


class Auto(FreeScaleStrategy):
    """Notes the choices of a fit."""

    def teardown(self) -> None:
        self.lightning_module.choices = self.choices
        super().teardown()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        before = self.mode_choice
        output = super().training_step(*args, **kwargs)
        if self.mode_choice is not before and self.mode_choice is not None:
            self.choices.append(self.mode_choice.prioritized)
        return output

    def __init__(self, **options: Any) -> None:
        super().__init__(balance="off", **options)
        self.choices: list[bool] = []


def fit_in_windows(rank: int, prioritize: Any) -> tuple[list[float], dict[str, Tensor], list[bool]]:
    """Two epochs of 20 micro-batches in windows of three, then two epochs without accumulation."""
    pl.seed_everything(1, verbose=False)
    model = toy.Model()
    own = Auto(prioritize=prioritize, embedding_optimizer={"optimizer": "adam", "lr": 0.1})
    callbacks = [GradientAccumulationScheduler({0: 3, 2: 1})]
    toy.trainer(own, 2, max_epochs=4, callbacks=callbacks).fit(model, toy.loader(80))
    return model.losses, toy.weights(model), model.choices


def test_auto_measures_micro_batches_and_again_when_their_number_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode_trial, "MAX_TIME_RATIO", 1e9)  # the prioritized exchange wins
    monkeypatch.setattr(mode_trial, "BLOCK_STEPS", 2)
    plain, auto = (run_ranks(fit_in_windows, args=(mode,)) for mode in (False, "auto"))
    for expected, found in zip(plain, auto, strict=True):
        assert found[0] == expected[0]
        assert toy.same(found[1], expected[1])
        assert found[2] == [True, True]  # once with windows of three, once without


def exchanged(rank: int) -> list[list[str]]:
    """The prioritized modules of each step, with accumulation in the second of three epochs."""
    seen: list[list[str]] = []

    class Watch(pl.Callback):
        def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
            seen.append(trainer.strategy.schedule.prioritized)

    trainer = toy.trainer(
        FreeScaleStrategy(balance="off", prioritize=True),
        2,
        max_epochs=3,
        callbacks=[GradientAccumulationScheduler({1: 2, 2: 1}), Watch()],
    )
    trainer.fit(toy.Model(), toy.loader(16))
    return seen


def test_micro_batches_are_prioritized() -> None:
    """Four micro-batches an epoch. The first step of a training shows what a module is called with."""
    for seen in run_ranks(exchanged):
        assert seen == [[]] + [["embeddings"]] * 9


# ---- windows that do not end, validation inside of a window ----------------------------------------------------------
class Stopping(toy.Model):
    """Validates inside of a window. Notes the tables at each validation."""

    def on_fit_start(self) -> None:
        self.tables: list[dict[str, Tensor]] = []

    def on_validation_start(self) -> None:
        self.tables.append(toy.weights(self))


def validate_inside(rank: int, prioritize: bool) -> tuple[list[dict[str, Tensor]], list[float], int]:
    """The tables after each micro-batch, losses, and optimizer steps."""
    pl.seed_everything(1, verbose=False)
    model = Stopping()
    trainer = toy.trainer(
        FreeScaleStrategy(balance="off", prioritize=prioritize),
        2,
        max_epochs=1,
        limit_train_batches=7,
        limit_val_batches=1,
        val_check_interval=1,
        num_sanity_val_steps=0,
        accumulate_grad_batches=3,
    )
    trainer.fit(model, toy.loader(40), toy.loader(8, shuffle=False))
    return model.tables, model.losses, trainer.global_step


def test_rows_change_only_after_the_last_micro_batch() -> None:
    plain, prioritized = (run_ranks(validate_inside, args=(mode,)) for mode in (False, True))
    for expected, (tables, losses, steps) in zip(plain, prioritized, strict=True):
        changes = [not toy.same(before, after) for before, after in itertools.pairwise(tables)]
        assert changes == [False, True, False, False, True, True]  # after micro-batches 2 to 7
        assert steps == expected[2] == 3
        assert losses == expected[1]
        assert all(map(toy.same, tables, expected[0]))


# ---- what is logged, and what is refused -----------------------------------------------------------------------------
@pytest.fixture
def messages() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def logged(rank: int, found: list[str]) -> list[str]:
    strategy = {"balance": "off", "prioritize": True}
    fit(rank, 2, False, strategy, size=16, batch_size=2, accumulate_grad_batches=2, max_epochs=1)
    return found


def test_the_log_names_memory_and_exchange(messages: list[str]) -> None:
    found = run_ranks(logged, args=(messages,))[0]
    assert sum("gradients of the tables are held until the last of 2 micro-batches" in text for text in found) == 1
    assert not any("exchanged synchronously" in text for text in found)


class RawIds(toy.Model):
    def __init__(self) -> None:
        super().__init__()
        assert isinstance(self.embeddings, EmbeddingCollection)
        self.embeddings = zero_collision(
            self.embeddings, {name: ZeroCollision(buckets=4, max_probe=4) for name in toy.ROWS}
        )


def accumulate_raw_ids(rank: int) -> None:
    trainer = toy.trainer(FreeScaleStrategy(), 1, accumulate_grad_batches=2)
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches: embeddings has zero-collision ids"):
        trainer.fit(RawIds(), toy.loader(8))


def test_zero_collision_ids_are_refused() -> None:
    run_ranks(accumulate_raw_ids, 1)


def test_the_examples_of_the_factors() -> None:
    assert doctest.testmod(accumulation).failed == 0
    assert accumulation.window_factors([0, 3], 2, last=True) == (2.0, 2.0)
    assert accumulation.window_factors([0, 0], 2, last=True) == (0.0, 1.0)


# ---- loaders without length, a second fit, a rank that ends early, a resume ------------------------------------------
class Stream(IterableDataset):
    """The samples of one rank, without a length. Rank 1 ends ``missing`` samples before the others."""

    def __init__(self, rank: int, missing: int = 0):
        self.indices = range(rank, 44 - (missing if rank == 1 else 0), 2)

    def __iter__(self) -> Iterator[Any]:
        return map(toy.Samples(44).__getitem__, self.indices)


def fit_stream(
    rank: int, data: Any, fits: int = 1, ckpt_path: str | None = None, folder: str | None = None, **strategy: Any
) -> dict[str, Tensor]:
    pl.seed_everything(1, verbose=False)
    model = toy.Model()
    loader = DataLoader(data, batch_size=2, collate_fn=toy.collate)
    tables = {"optimizer": "rowwise_adagrad", "lr": 0.1}
    for _ in range(fits):
        saves = [pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)] if folder else []
        options = {"accumulate_grad_batches": 4, "use_distributed_sampler": False, "callbacks": saves}
        own = FreeScaleStrategy(embedding_optimizer=tables, balance="off", **strategy)
        trainer = toy.trainer(own, 2, enable_checkpointing=bool(saves), **options)
        trainer.fit(model, loader, ckpt_path=ckpt_path)
    return toy.weights(model)


def fit_streams(rank: int, folder: str) -> list[bool]:
    """Each pair of trainings: whether the weights are equal."""
    sized = Subset(toy.Samples(44), range(rank, 44, 2))
    whole = fit_stream(rank, Stream(rank), folder=folder)
    short = [fit_stream(rank, Stream(rank, 12), uneven="continue", prioritize=mode) for mode in ("auto", False)]
    return [
        toy.same(whole, fit_stream(rank, sized)),
        toy.same(fit_stream(rank, sized, fits=2), fit_stream(rank, Stream(rank), fits=2)),
        toy.same(*short),
        toy.same(whole, fit_stream(rank, Stream(rank), ckpt_path=f"{folder}/epoch=0-step=2.ckpt")),
        not toy.same(whole, short[0]),  # the comparison can fail
    ]


def test_streams_second_fits_early_ends_and_resumes(tmp_path: Path) -> None:
    assert run_ranks(fit_streams, args=(str(tmp_path),)) == [[True] * 5] * 2


class NoLast(toy.Model):
    """The last micro-batch of each window has no loss."""

    def training_step(self, batch: toy.Batch, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        return None if batch_idx % 3 == 2 else super().training_step(batch, batch_idx)


class TwoThirds(toy.Model):
    """What Lightning makes of such a window: the sum of the gradients of two micro-batches, divided by three."""

    def training_step(self, batch: toy.Batch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (2 / 3)


def fit_alone(rank: int, model: type[toy.Model], prioritize: bool, number: int) -> dict[str, Tensor]:
    pl.seed_everything(1, verbose=False)
    module = model()
    strategy = FreeScaleStrategy(
        balance="off", prioritize=prioritize, embedding_optimizer={"optimizer": "sgd", "lr": 0.1}
    )
    options = {"accumulate_grad_batches": number, "max_epochs": 1, "use_distributed_sampler": False}
    chosen = [index for index in range(36) if number == 3 or index // 2 % 3 != 2]
    loader = DataLoader(Subset(toy.Samples(36), chosen), batch_size=2, collate_fn=toy.collate)
    toy.trainer(strategy, 1, **options).fit(module, loader)
    return toy.weights(module)


def test_a_window_without_a_last_loss_updates_the_tables() -> None:
    expected = run_ranks(fit_alone, 1, args=(TwoThirds, False, 2))[0]
    for prioritize in (False, True):
        assert close(run_ranks(fit_alone, 1, args=(NoLast, prioritize, 3))[0], expected)


class ChangesNumber(pl.Callback):
    """Accumulates another number of batches from the third batch on. The next window begins at place 2 of 3."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        trainer.accumulate_grad_batches = 2 if batch_idx < 2 else 3


def test_a_number_that_changes_within_an_epoch() -> None:
    case = {"size": 40, "batch_size": 2, "callback": ChangesNumber, "max_epochs": 1}
    cases = [(False, SYNC | {"prioritize": prioritize}, case) for prioritize in (False, True)]
    for (losses, weights, steps), (others, other_weights, other_steps) in run_ranks(fits, args=(2, cases)):
        assert losses == others
        assert steps == other_steps
        assert toy.same(weights, other_weights)
