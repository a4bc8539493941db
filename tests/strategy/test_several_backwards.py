"""Models that run several backwards through one look-up. TorchRec updates the tables in each of them, so they are synchronous."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_freescale import ConfigurationError, FreeScaleError, FreeScaleStrategy
from lightning_freescale.embedding import mode_trial
from lightning_freescale.embedding.support import SEVERAL_BACKWARDS
from tests import toy
from tests.ranks import run_ranks

STEPS = 14
SHARDING = {"item": "row_wise", "shop": "table_wise"}  # two sharding groups, whose gradients return separately


class Manual(toy.Model):
    """Runs one backward for each loss of a step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def losses_of(self, batch: toy.Batch) -> list[Tensor]:
        raise NotImplementedError

    def training_step(self, batch: toy.Batch, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        losses = self.losses_of(batch)
        for number, loss in enumerate(losses):
            self.manual_backward(loss, retain_graph=number < len(losses) - 1)
            self.losses.append(loss.item())
        optimizer.step()


class TwoLosses(Manual):
    """Two losses of the same rows."""

    def losses_of(self, batch: toy.Batch) -> list[Tensor]:
        scores = self(batch.features)
        return [torch.nn.functional.binary_cross_entropy_with_logits(scores, batch.label), scores.square().mean()]


class TwoLossesOfBags(TwoLosses):
    def __init__(self) -> None:
        super().__init__(bags=True)


class LossOfEachTable(Manual):
    """The first loss depends on the rows of one table, the second one on those of the other table."""

    def losses_of(self, batch: toy.Batch) -> list[Tensor]:
        rows = self.embeddings(batch.features)
        parts = {key: toy.mean(rows[key]) for key in toy.FEATURES}
        losses = []
        for table in toy.ROWS:
            chosen = [part if toy.FEATURES[key] == table else part.detach() for key, part in parts.items()]
            losses.append((self.head(torch.cat(chosen, dim=1)).squeeze(-1) - batch.label).square().mean())
        return losses


class Late(TwoLosses):
    """Has its second loss from batch 4 on."""

    def losses_of(self, batch: toy.Batch) -> list[Tensor]:
        self.steps = getattr(self, "steps", -1) + 1
        losses = super().losses_of(batch)
        return losses if self.steps >= 4 else losses[:1]


class GradientOfRows(toy.Model):
    """Has a penalty for the gradient of its rows. That gradient updates no table: the step has one backward through the rows."""

    def loss(self, batch: toy.Batch) -> Tensor:
        rows = self.embeddings(batch.features)
        pooled = torch.cat([toy.mean(rows[key]) for key in toy.FEATURES], dim=1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.head(pooled).squeeze(-1), batch.label)
        values = [rows[key].values() for key in toy.FEATURES]
        gradients = torch.autograd.grad(loss, values, create_graph=True)
        return loss + sum(gradient.square().sum() for gradient in gradients)


class Lbfgs(toy.Model):
    """Its optimizer computes the gradients several times in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


class Noting(FreeScaleStrategy):
    """Leaves on the model why each module was synchronous, as long as there was a schedule."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.schedule is not None:
            self.lightning_module.reasons = [module.synchronous_reason for module in self.schedule.modules]
        return super().training_step(*args, **kwargs)


def fit(rank: int, model: type[toy.Model], prioritize: Any, steps: int = STEPS) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    messages = Messages()
    logging.getLogger("lightning_freescale").addHandler(messages)
    module = model()
    strategy = Noting(
        prioritize=prioritize,
        balance="off",
        sharding=SHARDING,
        embedding_optimizer={"optimizer": "adagrad", "lr": 0.1},
    )
    trainer = toy.trainer(strategy, 2, max_epochs=1)
    try:
        trainer.fit(module, toy.loader(4 * steps))
    except FreeScaleError as error:
        return {"error": str(error)}
    return {
        "losses": module.losses,
        "weights": toy.weights(module),
        "reasons": getattr(module, "reasons", None),
        "messages": [message for message in messages.found if SEVERAL_BACKWARDS in message],
    }


@pytest.fixture
def auto_prioritizes_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """``prioritize="auto"`` trains six steps synchronously, then blocks of three steps, and chooses the prioritized exchange."""
    monkeypatch.setattr(mode_trial, "BLOCK_STEPS", 3)
    monkeypatch.setattr(mode_trial, "MAX_TIME_RATIO", 1e9)


CASES = [
    (TwoLosses, "auto"),
    (TwoLosses, True),
    (TwoLossesOfBags, "auto"),
    (LossOfEachTable, "auto"),
    (Late, "auto"),
]


@pytest.mark.usefixtures("auto_prioritizes_early")
@pytest.mark.parametrize(("model", "prioritize"), CASES, ids=str)
def test_a_model_with_several_backwards_trains_as_torchrec_does(model: type[toy.Model], prioritize: Any) -> None:
    synchronous, tried = (run_ranks(fit, args=(model, wanted)) for wanted in (False, prioritize))
    for rank, (plain, other) in enumerate(zip(synchronous, tried, strict=True)):
        assert "error" not in other, other
        assert other["reasons"] == [SEVERAL_BACKWARDS]
        assert len(other["messages"]) == (1 if rank == 0 else 0)
        assert other["losses"] == plain["losses"]
        assert toy.same(other["weights"], plain["weights"])


@pytest.mark.usefixtures("auto_prioritizes_early")
@pytest.mark.parametrize("prioritize", ["auto", True])
def test_the_gradient_of_rows_is_no_backward_through_them(prioritize: Any) -> None:
    synchronous, ahead = (run_ranks(fit, args=(GradientOfRows, wanted)) for wanted in (False, prioritize))
    for plain, other in zip(synchronous, ahead, strict=True):
        assert other["reasons"] == [None]
        assert other["losses"] == plain["losses"]
        assert toy.same(other["weights"], plain["weights"])


def test_a_second_backward_in_the_middle_of_a_prioritized_training_is_an_error() -> None:
    for found in run_ranks(fit, args=(Late, True)):
        assert "backward ran twice through the embeddings of one step" in found["error"]


def fit_with_closures(rank: int) -> tuple[str, int]:
    model = Lbfgs()
    trainer = toy.trainer(FreeScaleStrategy(prioritize=False), 2, max_steps=3)
    with pytest.raises(ConfigurationError) as error:
        trainer.fit(model, toy.loader(16))
    return str(error.value), len(model.losses)


def test_an_optimizer_that_computes_the_gradients_again_is_refused() -> None:
    """The tables would take a step in each of its backwards."""
    for message, losses in run_ranks(fit_with_closures):
        assert message.startswith("LBFGS computes the gradients several times in a step")
        assert losses == 1
