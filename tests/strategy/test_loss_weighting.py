"""What is logged with ``sync_dist=True`` is a mean over the global batch, however many samples each rank holds."""

from __future__ import annotations

import doctest
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.runtime.errors import InputError
from lightning_freescale.strategy import loss_weighting as means
from tests import toy
from tests.ranks import run_ranks
from tests.slow import slow

STEPS = 5
OPTIONS: dict[str, Any] = {
    "balance": "off",
    "prioritize": False,
    "embedding_optimizer": {"optimizer": "sgd", "lr": 0.1},
}


class Shares:
    """Global batches of six samples, of which rank r has ``sizes[r]``. Those of rank ``bare`` have no ids."""

    def __init__(self, rank: int, sizes: list[int], bare: int | None = None):
        self.start, self.size, self.bare = sum(sizes[:rank]), sizes[rank], bare == rank
        self.samples = toy.Samples(6 * STEPS)

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Any:
        for step in range(STEPS):
            own = [self.samples[6 * step + self.start + i] for i in range(self.size)]
            if self.bare:
                own = [(index, [ids[:0] for ids in values], label) for index, values, label in own]
            yield toy.collate(own)


class Logging(toy.Model):
    def on_train_start(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.ids: list[Tensor] = []

    def training_step(self, batch: toy.Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.ids.append(batch.features.values())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("most", loss, reduce_fx="max", on_step=True, on_epoch=False, sync_dist=True)
        self.log("id", batch.features.values().float().mean(), on_step=True, on_epoch=False, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        metrics = self.trainer.callback_metrics
        self.logged.append({name: metrics[name].item() for name in ("loss_step", "most", "id")})


class AsLightning(FreeScaleStrategy):
    """Logs as Lightning does."""

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return DDPStrategy.reduce(self, tensor, group, reduce_op)


def fit(
    rank: int,
    sizes: list[int],
    strategy: type[FreeScaleStrategy] = FreeScaleStrategy,
    bare: int | None = None,
    reduction: str = "sample",
) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    model = Logging()
    own = strategy(**OPTIONS, loss_reduction=reduction)  # type: ignore[arg-type]
    trainer = toy.trainer(own, len(sizes), max_epochs=1, limit_val_batches=1.0)
    trainer.fit(model, Shares(rank, sizes, bare))
    epoch = trainer.callback_metrics["loss_epoch"]
    trainer.validate(model, Shares(rank, sizes), verbose=False)
    return {
        "steps": model.logged,
        "own": model.losses,
        "ids": [ids.tolist() for ids in model.ids],
        "epoch": epoch.item(),
        "val": trainer.callback_metrics["val_loss"].item(),
    }


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return run_ranks(fit, 1, args=([6],))[0]


@pytest.mark.parametrize("sizes", [[1, 5], slow([1, 2, 3]), [2, 4]])
def test_unequal_shares_log_what_one_rank_with_the_whole_batch_logs(sizes: list[int], whole: dict[str, Any]) -> None:
    ranks = run_ranks(fit, len(sizes), args=(sizes,))
    expected = [step["loss_step"] for step in whole["steps"]]
    for run in ranks:
        assert [step["loss_step"] for step in run["steps"]] == pytest.approx(expected, rel=1e-5)
        assert run["epoch"] == pytest.approx(whole["epoch"], rel=1e-5)
        assert run["val"] == pytest.approx(whole["val"], rel=1e-5)
        assert [step["most"] for step in run["steps"]] == [
            max(own) for own in zip(*(r["own"] for r in ranks), strict=True)
        ]
    lightning = run_ranks(fit, len(sizes), args=(sizes, AsLightning))[0]  # negative control
    assert [step["loss_step"] for step in lightning["steps"]] != pytest.approx(expected, rel=1e-3)


def test_a_mean_of_counts_is_not_cut() -> None:
    (alone,) = run_ranks(fit, 1, args=([3],))
    sizes = [1, 2]  # five steps: 5 and 10 samples, 7.5 on average
    assert run_ranks(fit, args=(sizes,))[0]["val"] == pytest.approx(alone["val"], rel=1e-5)
    assert run_ranks(fit, args=(sizes, AsLightning))[0]["val"] == pytest.approx(alone["val"] * 7.5 / 7, rel=1e-5)


def test_equal_shares_log_what_lightning_logs_bit_for_bit() -> None:
    for ours, lightning in zip(run_ranks(fit, args=([3, 3],)), run_ranks(fit, args=([3, 3], AsLightning)), strict=True):
        assert ours == lightning


def test_a_rank_without_tokens_counts_for_nothing() -> None:
    (alone,) = run_ranks(fit, 1, args=([3], FreeScaleStrategy, None, "token"))
    ranks = run_ranks(fit, args=([3, 3], FreeScaleStrategy, 1, "token"))
    assert not any(ranks[1]["ids"])  # the mean over them is no number
    assert ranks[0]["own"] == pytest.approx(alone["own"], rel=1e-5)  # nor does it change the training
    for run in ranks:
        for step, ids in zip(run["steps"], ranks[0]["ids"], strict=True):
            assert step["id"] == pytest.approx(sum(ids) / len(ids))


# ---- batches without a KeyedJaggedTensor ----
class Packed(Shares):
    """Plain tensors: the ids of all samples, the lengths of all features and samples, and a label for each sample."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield {"ids": batch.features.values(), "lengths": batch.features.lengths(), "label": batch.label}


class TakesPacked(toy.Model):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        features = KeyedJaggedTensor(list(toy.FEATURES), batch["ids"], lengths=batch["lengths"])
        loss = self.loss(toy.Batch(batch["label"], features, batch["label"]))
        self.losses.append(loss.item())
        return loss


class CountsLabels(TakesPacked):
    def loss_denominator(self, batch: dict[str, Tensor]) -> int:
        return len(batch["label"])


class WithEvents(Shares):
    """Two KeyedJaggedTensors: the first one has a sample for each event, the second one has the samples of the loss."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            ids = batch.features["clicks"].values()
            events = KeyedJaggedTensor(["clicks"], ids, lengths=torch.ones(len(ids), dtype=torch.int64))
            yield {"events": events, "features": batch.features, "label": batch.label}


class TakesEvents(toy.Model):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:  # type: ignore[override]
        loss: Tensor = self.loss(toy.Batch(batch["label"], batch["features"], batch["label"]))
        return loss


class CountsLabelsBesideEvents(TakesEvents):
    def loss_denominator(self, batch: dict[str, Any]) -> int:
        return len(batch["label"])


def fit_packed(
    rank: int, sizes: list[int], kind: type[toy.Model], strategy: str = "", data: type[Shares] = Packed
) -> dict[str, Tensor]:
    pl.seed_everything(1, verbose=False)
    model = kind()
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[method-assign]
    toy.trainer(strategy or FreeScaleStrategy(**OPTIONS), len(sizes), max_epochs=1).fit(model, data(rank, sizes))
    return toy.weights(model)


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.allclose(a[key], b[key], rtol=1e-4, atol=1e-6) for key in a)


def test_batches_of_an_unknown_number_of_samples_are_weighted_as_with_ddp() -> None:
    """The ranks have equally many samples and different numbers of ids, which were taken for numbers of samples."""
    ddp, ours = (run_ranks(fit_packed, args=([3, 3], TakesPacked, name))[0] for name in ("ddp", ""))
    assert close(ours, ddp)


def test_the_model_can_count_what_its_loss_is_a_mean_over() -> None:
    whole = run_ranks(fit_packed, 1, args=([6], TakesPacked, "ddp"))[0]
    assert close(run_ranks(fit_packed, args=([1, 5], CountsLabels))[0], whole)
    assert not close(run_ranks(fit_packed, args=([1, 5], TakesPacked))[0], whole)  # negative control


def test_jagged_tensors_with_different_numbers_of_samples_are_weighted_as_with_ddp() -> None:
    """The first one has as many samples as there are events. These were taken for the samples of the loss."""
    ddp, ours = (run_ranks(fit_packed, args=([3, 3], TakesEvents, name, WithEvents))[0] for name in ("ddp", ""))
    assert close(ours, ddp)
    whole = run_ranks(fit_packed, 1, args=([6], TakesEvents, "ddp", WithEvents))[0]
    assert close(run_ranks(fit_packed, args=([1, 5], CountsLabelsBesideEvents, "", WithEvents))[0], whole)


def test_what_is_counted() -> None:
    jagged = JaggedTensor(torch.arange(7), lengths=torch.tensor([3, 4]))
    assert means.loss_weight({"noise": torch.ones(9), "jagged": jagged}, "sample") == 2
    assert means.loss_weight({"noise": torch.ones(9), "jagged": jagged}, "token") == 7
    assert means.loss_weight((torch.ones(4, 2), torch.tensor(3.0), torch.ones(4)), "sample") == 4
    features, other = (KeyedJaggedTensor(["a"], torch.arange(n), lengths=torch.ones(n).long()) for n in (4, 5))
    for reduction in ("sample", "token"):
        assert means.loss_weight((features, features), reduction) == 4
        assert means.loss_weight((features, other), reduction) == means.UNKNOWN
        assert means.loss_weight((jagged, features["a"]), reduction) == means.UNKNOWN
    for reduction, batch in (("sample", (torch.ones(7, 4), torch.ones(4))), ("token", torch.ones(4, 7))):
        assert means.loss_weight(batch, reduction) == means.UNKNOWN
    assert means.known_weights([4, means.UNKNOWN, 0], [True, True, False]) == [1, 1, 0]
    assert means.known_weights([4, 3, 0], [True, True, False]) == [4, 3, 0]
    model = CountsLabels()
    assert means.loss_weight({"label": torch.ones(5)}, "token", model) == 5
    model.loss_denominator = lambda batch: torch.tensor(2.5)  # type: ignore[assignment, method-assign]
    with pytest.raises(InputError, match=r"loss_denominator: 2\.5"):
        means.loss_weight(None, "sample", model)


def test_examples() -> None:
    assert doctest.testmod(means).failed == 0
    assert means.share([2, 0], 1) == 0.0
    assert means.share([0, 0], 0) == 1.0
    assert means.share([], 0) == 1.0
    assert means.mean_of_counts(torch.tensor(8), 2).dtype == torch.int64
