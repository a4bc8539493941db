"""The timer measures the compute of a rank, without its waits for other ranks."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.balance.compute_timer import ComputeTimer
from tests import toy
from tests.ranks import run_ranks

PAUSE = 0.05  # seconds
SLOW = 1  # the rank that sleeps


class Slow(toy.Model):
    """Rank ``SLOW`` sleeps before the lookup, before it logs, and in backward. The other ranks wait for it."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.walls: list[float] = []

    def _pause(self, *_: Any) -> None:
        if self.trainer.global_rank == SLOW:
            time.sleep(PAUSE)

    def training_step(self, batch: toy.Batch, batch_idx: int) -> Tensor:
        self._began = time.perf_counter()
        self._pause()
        outputs = self(batch.features)
        outputs.register_hook(self._pause)
        loss = nn.functional.binary_cross_entropy_with_logits(outputs, batch.label)
        self._pause()
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.walls.append(time.perf_counter() - self._began)

    def on_train_end(self) -> None:
        cost_fit = self.trainer.strategy._balancer.cost_fit  # type: ignore[attr-defined]
        self.seconds = [float(row[-1]) for row in cost_fit._observed]
        self.sums = [row[:-1].tolist() for row in cost_fit._observed]


class Bags(Slow):
    def __init__(self) -> None:
        super().__init__(bags=True)


class Dense(Slow):
    """A model without tables: ranks wait only for the dense AllReduce."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = None  # type: ignore[assignment]

    def forward(self, features: Any) -> Tensor:
        lengths = features.lengths().view(len(toy.FEATURES), -1).T.float()
        return self.head(lengths.repeat(1, toy.DIM)).squeeze(-1)


def fit(rank: int, model: type[Slow], prioritize: bool) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    module = model()
    strategy = FreeScaleStrategy(balance="fixed", prioritize=prioritize, fit_costs=1000)
    toy.trainer(strategy, 2, max_steps=9).fit(module, toy.loader(64, batch_size=2))
    return {"seconds": module.seconds, "walls": module.walls, "sums": module.sums}


@pytest.mark.parametrize(("model", "prioritize"), [(Slow, False), (Slow, True), (Bags, False), (Dense, False)])
def test_waits_for_another_rank_are_not_counted(model: type[Slow], prioritize: bool) -> None:
    quick, slow = run_ranks(fit, args=(model, prioritize))
    assert len(quick["seconds"]) == len(slow["seconds"]) >= 4  # without the first steps, and the last
    assert min(slow["seconds"]) >= 3 * PAUSE
    assert min(quick["walls"]) >= PAUSE  # it did wait
    assert min(quick["seconds"]) < PAUSE
    assert all(sums[-1] == 1 and sums[0] >= 0 for sums in quick["sums"])


def test_a_step_without_backward_is_dropped() -> None:
    timer = ComputeTimer()
    timer.start("no backward")
    timer.end_forward()
    timer.start("no gradient")
    timer.end_forward()
    timer.begin_backward(torch.zeros(()))
    timer.end_step()
    assert list(timer.finished_steps()) == []

    timer.start("whole")
    with timer.waiting(), timer.waiting():
        pass
    timer.end_forward()
    loss = torch.ones((), requires_grad=True) * 2
    timer.begin_backward(loss)
    loss.backward()
    timer.end_step()
    ((label, seconds),) = timer.finished_steps()
    assert label == "whole"
    assert seconds > 0
    assert list(timer.finished_steps()) == []
