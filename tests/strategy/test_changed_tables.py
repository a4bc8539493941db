"""User code that changes tables between steps. Rows that were read before must not be used, and nothing may be silent."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_freescale import FreeScaleError, FreeScaleStrategy
from lightning_freescale.embedding import mode_trial
from lightning_freescale.embedding.support import CHANGED_TABLES
from lightning_freescale.embedding.table_watch import TableWatch
from tests import toy
from tests.ranks import run_ranks
from tests.strategy.noting import CHECKED_STEPS, Noting, check_few_steps

STEPS = 12  # more than those in which values are compared


@pytest.fixture(autouse=True)
def _few_checked_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    check_few_steps(monkeypatch)


def shards(module: pl.LightningModule) -> Iterator[Tensor]:
    """The rows of each table that are on this rank."""
    for value in module.state_dict().values():
        if hasattr(value, "local_shards"):
            yield from (shard.tensor for shard in value.local_shards())


def halve(module: pl.LightningModule) -> None:
    with torch.no_grad():
        for rows in shards(module):
            rows.mul_(0.5)


def halve_data(module: pl.LightningModule) -> None:
    """No version counter counts this."""
    for name, parameter in module.named_parameters():
        if name.startswith("embeddings."):
            parameter.data.mul_(0.5)


def clear_first_row(module: pl.LightningModule) -> None:
    """On one rank alone: as for the row of the padding."""
    if module.global_rank == 0:
        with torch.no_grad():
            next(shards(module))[0] = 0.0


class Change(pl.Callback):
    """Changes the tables after some steps."""

    def __init__(self, change: Any, every: int = 1, flush: bool = False):
        self.change, self.every, self.flush = change, every, flush

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            if self.flush and isinstance(trainer.strategy, FreeScaleStrategy):
                trainer.strategy.flush()
            self.change(module)


class ChangeBetweenEpochs(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        halve(module)


class Swap(pl.Callback):
    """Validates with other weights, as callbacks with averaged weights do, and restores the weights afterwards."""

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.kept = [rows.clone() for rows in shards(module)]
        halve(module)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        with torch.no_grad():
            for rows, kept in zip(shards(module), self.kept, strict=True):
                rows.copy_(kept)


class Ends(pl.Callback):
    """Stops within an epoch, and keeps the tables as the end of the training shows them to callbacks."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 7

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        module.at_the_end = [rows.clone() for rows in shards(module)]


class ChangesInStep(toy.Model):
    """Changes its tables in each step, before the look-up."""

    flush = False

    def training_step(self, batch: toy.Batch, batch_idx: int) -> Tensor:
        if self.flush:
            self.trainer.strategy.flush()  # type: ignore[attr-defined]
        halve(self)
        return super().training_step(batch, batch_idx)


class ChangesAfterFlush(ChangesInStep):
    flush = True


def fit(
    rank: int, prioritize: Any, callbacks: list[pl.Callback], model: Any = toy.Model, steps: int = STEPS, **options: Any
) -> dict[str, Any]:
    logging.getLogger("lightning_freescale").setLevel(logging.ERROR)
    pl.seed_everything(1, verbose=False)
    module = model(**options)
    module.reasons, module.prioritized = set(), 0
    strategy = Noting(prioritize=prioritize, balance="off", embedding_optimizer={"optimizer": "adagrad", "lr": 0.1})
    settings = {"max_epochs": -1, "max_steps": steps, "callbacks": callbacks, "limit_val_batches": 1}
    trainer = toy.trainer(strategy, 2, **settings, val_check_interval=5, num_sanity_val_steps=0)
    trainer.fit(module, toy.loader(40), toy.loader(8, shuffle=False))
    return {
        "losses": module.losses,
        "weights": toy.weights(module),
        "reasons": module.reasons - {None},
        "prioritized": module.prioritized,
    }


def both(callbacks: Any, prioritize: Any, **options: Any) -> tuple[bool, dict[str, Any]]:
    """Whether a training has the bits of the synchronous one, and what rank 0 says of it."""
    expected = run_ranks(_fit, args=(False, callbacks, options))
    found = run_ranks(_fit, args=(prioritize, callbacks, options))
    same = all(
        a["losses"] == b["losses"] and toy.same(a["weights"], b["weights"])
        for a, b in zip(expected, found, strict=True)
    )
    return same, found[0]


def _fit(rank: int, prioritize: Any, callbacks: list[pl.Callback], options: dict[str, Any]) -> dict[str, Any]:
    return fit(rank, prioritize, callbacks, **options)


@pytest.mark.parametrize(
    ("callbacks", "options"),
    [
        ([Change(halve)], {}),
        ([Change(halve_data)], {"bags": True}),
        ([Change(clear_first_row, every=2)], {}),
        ([], {"model": ChangesInStep}),
    ],
    ids=["in place", "data of bags", "a row of one rank", "in the step"],
)
def test_tables_that_user_code_changes_are_exchanged_synchronously(callbacks: Any, options: Any) -> None:
    same, found = both(callbacks, "auto", **options)
    assert same
    assert found["reasons"] == {CHANGED_TABLES}


def test_a_late_change_between_synchronous_steps_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one rank knows of it, so the exchange stays as it is."""
    monkeypatch.setattr(mode_trial, "BLOCK_STEPS", 2)
    step = mode_trial.TRIAL_WARM_UP_STEPS + 2 * mode_trial.BLOCK_STEPS + 1  # within the second synchronous block
    assert CHECKED_STEPS < step < STEPS
    same, found = both([Change(clear_first_row, every=step)], "auto")
    assert same
    assert not found["reasons"]
    assert found["prioritized"] > 0


def _fit_unwatched(rank: int, prioritize: bool) -> dict[str, Any]:
    TableWatch.differs = lambda self: False  # type: ignore[method-assign]
    return fit(rank, prioritize, [Change(halve, every=4)])


def test_the_comparison_can_fail() -> None:
    """Without the search for changes, old rows are used."""
    expected, found = (run_ranks(_fit_unwatched, args=(prioritize,))[0] for prioritize in (False, True))
    assert found["prioritized"] == STEPS - 1
    assert expected["losses"] != found["losses"]


@pytest.mark.parametrize(
    ("callbacks", "options"),
    [
        ([Change(halve, every=3, flush=True)], {}),
        ([Change(halve_data, every=3, flush=True)], {"bags": True}),
        ([Swap()], {}),
        ([ChangeBetweenEpochs()], {}),
        ([], {}),
    ],
    ids=["flushed", "flushed bags", "restored", "between epochs", "not changed"],
)
def test_changes_that_are_right_leave_the_exchange_prioritized(callbacks: Any, options: Any) -> None:
    same, found = both(callbacks, True, **options)
    assert same
    assert not found["reasons"]
    assert found["prioritized"] == STEPS - 1


def _tables_at_the_end(rank: int, prioritize: bool) -> list[Tensor]:
    pl.seed_everything(1, verbose=False)
    module = toy.Model()
    strategy = FreeScaleStrategy(prioritize=prioritize, balance="off")
    toy.trainer(strategy, 2, callbacks=[Ends()]).fit(module, toy.loader(40))
    return module.at_the_end  # type: ignore[return-value]


def test_callbacks_see_complete_tables_at_the_end_of_the_training() -> None:
    expected, found = (run_ranks(_tables_at_the_end, args=(prioritize,)) for prioritize in (False, True))
    assert all(torch.equal(a, b) for x, y in zip(expected, found, strict=True) for a, b in zip(x, y, strict=True))


class FlushesAlone(pl.Callback):
    def __init__(self, step: int):
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == 0:
            trainer.strategy.flush()  # type: ignore[attr-defined]


def _flush_alone(rank: int, step: int) -> None:
    strategy = FreeScaleStrategy(prioritize=True, balance="off", timeout=6)
    toy.trainer(strategy, 2, callbacks=[FlushesAlone(step)]).fit(toy.Model(), toy.loader(40))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (3, "rank 0 is at trainer.strategy.flush(), which all ranks must call, and rank 1 is at "),
        (CHECKED_STEPS + 2, "rank 0: waited for trainer.strategy.flush(), which all ranks must call"),
    ],
)
def test_a_flush_on_one_rank_alone_is_an_error(step: int, message: str) -> None:
    """In the first steps, the other rank is at another agreement. Later it is at none."""
    with pytest.raises(AssertionError) as failure:
        run_ranks(_flush_alone, args=(step,), every_error=True)
    errors = failure.value.errors  # type: ignore[attr-defined]
    assert errors.keys() == {0, 1}
    assert message in errors[0]


def test_a_flush_within_a_step_makes_that_step_synchronous() -> None:
    same, found = both([], True, model=ChangesAfterFlush)
    assert same
    assert not found["reasons"]


@pytest.mark.parametrize(
    ("change", "step"),
    [(halve_data, 3), (halve, CHECKED_STEPS + 2), (halve, 5), (halve, STEPS)],
    ids=["early", "late", "before a validation", "after the last step"],
)
def test_a_change_that_comes_too_late_is_an_error(change: Any, step: int) -> None:
    with pytest.raises(AssertionError) as failure:
        run_ranks(_fit, args=(True, [Change(change, every=step)], {}), every_error=True)
    errors = failure.value.errors  # type: ignore[attr-defined]
    assert errors.keys() == {0, 1}
    for text in errors.values():
        assert FreeScaleError.__name__ in text
        assert "embeddings: user code has changed its tables after a step" in text
        assert "trainer.strategy.flush() on all ranks" in text.replace('"\n', "")
