"""A rank that is stuck or fails ends the others within the timeout, with a reason."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_freescale import FreeScaleStrategy
from tests import toy
from tests.ranks import RankFailed, run_ranks


class Stuck(toy.Model):
    def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            time.sleep(60)
        return super().training_step(batch, batch_idx)


class Failing(toy.Model):
    def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            raise ValueError("the user's own mistake")
        return super().training_step(batch, batch_idx)


def fit_broken(rank: int, model: type) -> None:
    toy.trainer(FreeScaleStrategy(timeout=3), 2).fit(model(), toy.loader())


def test_a_stuck_rank_is_an_error_within_the_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed) as failure:
        run_ranks(fit_broken, args=(Stuck,))
    assert list(failure.value.errors) == [0]
    assert "rank 0 of 2, step 2: rank 1 is missing: stuck or dead for 3 s" in failure.value.errors[0]
    assert time.monotonic() - start < 30


def test_a_failing_rank_ends_the_others_with_its_own_traceback() -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(fit_broken, args=(Failing,), every_error=True, timeout=30)
    assert "the user's own mistake" in failure.value.errors[1]
    assert "rank 1 ended with ValueError: the user's own mistake" in failure.value.errors[0]
