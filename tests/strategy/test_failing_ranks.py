"""A rank that is stuck or fails ends the others within the timeout, with a reason."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.embedding.table_watch import CHECKED_STEPS
from tests import toy
from tests.ranks import RankFailed, run_ranks


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
    toy.trainer(FreeScaleStrategy(timeout=3), 2).fit(model(), toy.loader())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Stuck,
            "rank 0: waited for the comparison of tables before a look-up; rank 1 is missing: stuck or dead for 3 s",
        ),
        (StuckLater, f"rank 0 of 2, step {StuckLater.at}: rank 1 is missing: stuck or dead for 3 s"),
    ],
)
def test_a_stuck_rank_is_an_error_within_the_timeout(model: type, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed) as failure:
        run_ranks(fit_broken, args=(model,))
    assert list(failure.value.errors) == [0]
    assert message in failure.value.errors[0]
    assert time.monotonic() - start < 30


def test_a_failing_rank_ends_the_others_with_its_own_traceback() -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(fit_broken, args=(Failing,), every_error=True, timeout=30)
    assert "the user's own mistake" in failure.value.errors[1]
    assert "rank 1 ended with ValueError: the user's own mistake" in failure.value.errors[0]
