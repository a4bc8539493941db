"""A rank that is stuck or fails ends the others within the timeout, with a reason."""

from __future__ import annotations

import time

import lightning.pytorch as pl
import pytest
import torch

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.embedding.table_watch import CHECKED_STEPS
from tests import toy
from tests.ranks import RankFailed, run_ranks

TIMEOUT = 5  # seconds; the ranks must also connect within it


class Stuck(toy.Model):
    at = 2

    def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and self.trainer.global_step == self.at:
            time.sleep(60)
        return super().training_step(batch, batch_idx)


class StuckLater(Stuck):
    """After the steps in which the ranks ask each other whether the tables have changed."""

    at = CHECKED_STEPS + 1


class Failing(toy.Model):
    def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            raise ValueError("the user's own mistake")
        return super().training_step(batch, batch_idx)


def fit_broken(rank: int, model: type) -> None:
    toy.trainer(FreeScaleStrategy(timeout=TIMEOUT), 2).fit(model(), toy.loader(40))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Stuck,
            f"rank 0: waited for the comparison of tables before a look-up; rank 1 is missing: stuck or dead for {TIMEOUT} s",
        ),
        (StuckLater, f"rank 0 of 2, step {StuckLater.at}: rank 1 is missing: stuck or dead for {TIMEOUT} s"),
    ],
)
def test_a_stuck_rank_is_an_error_within_the_timeout(model: type, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed) as failure:
        run_ranks(fit_broken, args=(model,))
    assert list(failure.value.errors) == [0]
    assert message in failure.value.errors[0]
    assert time.monotonic() - start < 60


def test_a_failing_rank_ends_the_others_with_its_own_traceback() -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(fit_broken, args=(Failing,), every_error=True, timeout=30)
    assert "the user's own mistake" in failure.value.errors[1]
    assert "rank 1 ended with ValueError: the user's own mistake" in failure.value.errors[0]


def fit_again(rank: int, failing: bool) -> tuple[str, list[float], list[float]]:
    """One training that fails while tables are exchanged synchronously, and then two that do not."""
    options = {"transport": "host", "balance": "off", "timeout": 3}
    error = ""
    if failing:
        with pytest.raises((ValueError, RuntimeError)) as failure:
            toy.trainer(FreeScaleStrategy(**options, prioritize=False), 2).fit(Failing(), toy.loader())
        error = str(failure.value)
    losses = []
    for prioritize in (True, False):
        pl.seed_everything(1, verbose=False)
        model = toy.Model()
        toy.trainer(FreeScaleStrategy(**options, prioritize=prioritize), 2).fit(model, toy.loader())
        losses.append(model.losses)
    return error, *losses


def test_another_model_trains_in_the_processes_of_a_failed_training() -> None:
    """What the failed training has left in its process groups does not reach the next one."""
    expected = run_ranks(fit_again, args=(False,))
    for rank, (error, *losses) in enumerate(run_ranks(fit_again, args=(True,))):
        assert error.endswith("the user's own mistake") if rank else error
        assert losses == list(expected[rank][1:])


class StuckInSecondFit(pl.Callback):
    """In the first training rank 1 fails, and in the second one it is stuck."""

    def __init__(self, fails: bool):
        self.fails = fails

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: object, index: int) -> None:
        if index == 2 and trainer.global_rank == 1:
            if self.fails:
                raise ValueError("the mistake of the first training")
            time.sleep(2 * TIMEOUT)


def fail_twice(rank: int) -> list[str]:
    errors = []
    for fails in (True, False):
        strategy = FreeScaleStrategy(balance="off", timeout=TIMEOUT)
        with pytest.raises((ValueError, RuntimeError)) as failure:
            toy.trainer(strategy, 2, callbacks=[StuckInSecondFit(fails)]).fit(toy.Model(), toy.loader())
        errors.append(str(failure.value))
    return errors


def test_a_second_failure_is_not_explained_by_the_first() -> None:
    first, second = run_ranks(fail_twice)[0]
    assert "rank 1 ended with ValueError: the mistake of the first training" in first
    assert f"rank 1 is missing: stuck or dead for {TIMEOUT} s" in second
    assert "the mistake of the first training" not in second
