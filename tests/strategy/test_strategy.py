"""The strategy under the settings of Lightning's Trainer: prefetching changes no batch and no loss."""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lightning_freescale import FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks
from tests.slow import slow


class Plain(FreeScaleStrategy):
    """The same strategy without prefetching and without the prioritized exchange. It is the slow path of the comparison."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "prioritize": False, "balance": "off"})

    def process_dataloader(self, dataloader: object) -> Any:
        return dataloader


class Prioritized(FreeScaleStrategy):
    """Leaves on the model what became of each embedding module."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "prioritize": True, "balance": "off"})

    def teardown(self) -> None:
        if self.schedule is not None:
            self.lightning_module.lanes = {
                scheduled.name: scheduled.synchronous_reason or "prioritized" for scheduled in self.schedule.modules
            }
        super().teardown()


def fit(rank: int, strategy: type, world: int, options: dict[str, Any], model: type = toy.Model) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module = model()
    trainer = toy.trainer(strategy(embedding_optimizer={"optimizer": "adam", "lr": 0.1}), world, **options)
    trainer.fit(module, toy.loader(32), toy.loader(8, shuffle=False))
    return {
        "seen": module.seen,
        "losses": module.losses,
        "steps": trainer.global_step,
        "weights": toy.weights(module),
        "lanes": getattr(module, "lanes", None),
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"limit_train_batches": 5, "gradient_clip_val": 0.1},
        slow({"limit_train_batches": 0.5}),
        slow({"max_epochs": -1, "max_steps": 11}),
        {"limit_val_batches": 2, "val_check_interval": 0.25},
        slow({"limit_val_batches": 2, "val_check_interval": 3, "check_val_every_n_epoch": None}),
        slow({"reload_dataloaders_every_n_epochs": 1}),
        {"overfit_batches": 3},
        slow({"fast_dev_run": 2}),
        {"precision": "bf16-mixed"},
    ],
    ids=str,
)
def test_prefetching_and_the_prioritized_exchange_change_nothing(options: dict[str, Any]) -> None:
    for plain, ahead in zip(
        run_ranks(fit, args=(Plain, 2, options)), run_ranks(fit, args=(Prioritized, 2, options)), strict=True
    ):
        assert ahead["lanes"] == {"embeddings": "prioritized"}
        assert ahead["steps"] == plain["steps"] > 0
        assert ahead["seen"] == plain["seen"]
        assert ahead["losses"] == plain["losses"]
        assert toy.same(ahead["weights"], plain["weights"])


@pytest.mark.parametrize("world", [1, 3, 4])
def test_number_of_ranks(world: int) -> None:
    for plain, ahead in zip(
        run_ranks(fit, world, args=(Plain, world, {"max_steps": 6})),
        run_ranks(fit, world, args=(Prioritized, world, {"max_steps": 6})),
        strict=True,
    ):
        assert ahead["losses"] == plain["losses"]
        assert toy.same(ahead["weights"], plain["weights"])


def test_ranks_hold_the_same_dense_weights_and_their_own_batches() -> None:
    first, second = run_ranks(fit, args=(FreeScaleStrategy, 2, {}))
    assert toy.same(first["weights"], second["weights"])
    assert not {i for batch in first["seen"][:8] for i in batch} & {i for batch in second["seen"][:8] for i in batch}


# ---- models ----------------------------------------------------------------------------------------------------------
class MetaTables(toy.Model):
    def __init__(self) -> None:
        super().__init__(device="meta")


class TwoCollections(toy.Model):
    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingConfig(name="other", embedding_dim=toy.DIM, num_embeddings=96, feature_names=["clicks"])
        self.more = EmbeddingCollection(tables=[config])

    def loss(self, batch: toy.Batch) -> torch.Tensor:
        return super().loss(batch) + self.more(batch.features)["clicks"].values().square().mean()


class Thrice(toy.Model):
    """Asks for the rows anew for every feature."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.head(torch.cat([toy.mean(self.embeddings(features)[key]) for key in toy.FEATURES], dim=1)).squeeze(
            -1
        )


class SometimesTwice(toy.Model):
    """Keeps to one call a step for a while, then makes a second."""

    def loss(self, batch: toy.Batch) -> torch.Tensor:
        loss = super().loss(batch)
        if self.training and self.global_step >= 5:
            loss = loss + self.embeddings(batch.features)["carts"].values().square().sum()
        return loss


class OwnFeatures(toy.Model):
    """Builds its KeyedJaggedTensor inside the step."""

    def loss(self, batch: toy.Batch) -> torch.Tensor:
        features = KeyedJaggedTensor(batch.features.keys(), batch.features.values(), lengths=batch.features.lengths())
        return torch.nn.functional.binary_cross_entropy_with_logits(self(features), batch.label)


class PeeksWithoutGradient(toy.Model):
    """Looks at the rows once more for a metric."""

    def loss(self, batch: toy.Batch) -> torch.Tensor:
        loss = super().loss(batch)
        with torch.no_grad():
            norm = self.embeddings(batch.features)["clicks"].values().norm()
        return loss + 0 * norm


class SkipsSteps(toy.Manual):
    """Takes no step in some of the batches, after the forward pass."""

    def training_step(self, batch: toy.Batch, batch_idx: int) -> None:  # type: ignore[override]
        if batch_idx % 4 == 2:
            toy.Model.training_step(self, batch, batch_idx)
        else:
            super().training_step(batch, batch_idx)


class IgnoresATable(toy.Model):
    """The loss does not depend on the table-wise sharded one."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.embeddings(features)
        return self.head(
            torch.cat([toy.mean(rows["clicks"]), toy.mean(rows["carts"]), toy.mean(rows["carts"])], dim=1)
        ).squeeze(-1)


ON = {"embeddings": "prioritized"}
TWICE = {"embeddings": "called more than once a step"}


@pytest.mark.parametrize(
    ("model", "lanes"),
    [
        (MetaTables, ON),
        (toy.Manual, ON),
        (TwoCollections, ON | {"more": "prioritized"}),
        (PeeksWithoutGradient, ON),
        (SkipsSteps, ON),
        (IgnoresATable, ON),
        (Thrice, TWICE),
        (SometimesTwice, TWICE),
        (OwnFeatures, {"embeddings": "called with features that are not part of the batch"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_models(model: type, lanes: dict[str, str]) -> None:
    options = {"limit_val_batches": 1, "val_check_interval": 0.5}
    for plain, ahead in zip(
        run_ranks(fit, args=(Plain, 2, options, model)),
        run_ranks(fit, args=(Prioritized, 2, options, model)),
        strict=True,
    ):
        assert ahead["lanes"] == lanes
        assert all(torch.isfinite(torch.tensor(ahead["losses"])))
        assert ahead["losses"] == plain["losses"]
        assert toy.same(ahead["weights"], plain["weights"])


class OwnOptimizer(toy.Model):
    def __init__(self) -> None:
        super().__init__()
        options = {"lr": 0.1, "weight_decay": 0.01}
        apply_optimizer_in_backward(torch.optim.Adam, self.embeddings.parameters(), options)


def fit_own_optimizer(rank: int, model: type, embedding_optimizer: dict | None) -> dict[str, torch.Tensor]:
    pl.seed_everything(1, verbose=False)
    module = model()
    toy.trainer(FreeScaleStrategy(embedding_optimizer=embedding_optimizer), 2, max_epochs=1).fit(module, toy.loader())
    return toy.weights(module)


def test_optimizer_attached_by_the_user_is_kept() -> None:
    own = run_ranks(fit_own_optimizer, args=(OwnOptimizer, None))
    ours = run_ranks(fit_own_optimizer, args=(toy.Model, {"optimizer": "adam", "lr": 0.1, "weight_decay": 0.01}))
    default = run_ranks(fit_own_optimizer, args=(toy.Model, None))
    assert toy.same(own[0], ours[0])
    assert not toy.same(own[0], default[0])


def validate_after_fit(rank: int) -> tuple[Any, Any]:
    pl.seed_everything(1, verbose=False)
    module = toy.Model()
    first = toy.trainer(FreeScaleStrategy(), 2, max_epochs=1, limit_val_batches=2)
    first.fit(module, toy.loader(), toy.loader(8, shuffle=False))
    again = first.validate(module, toy.loader(8, shuffle=False), verbose=False)
    second = toy.trainer(FreeScaleStrategy(), 2, limit_val_batches=2)
    return again, second.validate(module, toy.loader(8, shuffle=False), verbose=False)


def test_a_trained_model_serves_another_trainer() -> None:
    for again, other in run_ranks(validate_after_fit):
        assert again == other
        assert again[0]["val_loss"] > 0


# ---- user hooks ------------------------------------------------------------------------------------------------------
class Hooked(toy.Model):
    calls = 0

    def on_before_batch_transfer(self, batch: toy.Batch, dataloader_idx: int) -> toy.Batch:
        self.calls += 1
        return batch


def fit_hooked(rank: int) -> int:
    model = Hooked()
    toy.trainer(FreeScaleStrategy(), 2, max_epochs=1, limit_train_batches=4).fit(model, toy.loader())
    return model.calls


def test_transfer_hook_is_called_once_a_batch() -> None:
    assert run_ranks(fit_hooked) == [4, 4]


# ---- SIGTERM -----------------------------------------------------------------------------------------------------------
class Terminated(toy.Model):
    """Rank 1 alone is told to stop, in its fifth step."""

    def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def fit_terminated(rank: int) -> tuple[int, str]:
    model = Terminated()
    trainer = toy.trainer(FreeScaleStrategy(timeout=20), 2)
    try:
        trainer.fit(model, toy.loader())
    except BaseException as error:
        return len(model.losses), type(error).__name__
    return len(model.losses), str(trainer.state.status)


def test_sigterm_on_one_rank_stops_all_at_the_same_step() -> None:
    first, second = run_ranks(fit_terminated)
    assert first == second
    assert 5 <= first[0] <= 8


# ---- shares of the global batch ------------------------------------------------------------------------------------------
class Uneven:
    """Rank r gets r + 1 samples a batch: the same global batches as one rank with all of them."""

    def __init__(self, rank: int, world: int):
        sizes = range(1, world + 1)
        start = sum(sizes[:rank]) if world > 1 else 0
        self.slices = [slice(6 * k + start, 6 * k + start + (sizes[rank] if world > 1 else 6)) for k in range(5)]
        self.samples = toy.Samples(64)

    def __len__(self) -> int:
        return len(self.slices)

    def __iter__(self) -> Any:
        return (toy.collate([self.samples[i] for i in range(s.start, s.stop)]) for s in self.slices)


def fit_uneven(rank: int, world: int, reduction: str | None = "sample") -> dict[str, torch.Tensor]:
    pl.seed_everything(1, verbose=False)
    model = toy.Model()
    model.loss_reduction = reduction
    strategy = FreeScaleStrategy(sharding="row_wise", embedding_optimizer={"optimizer": "sgd", "lr": 0.1})
    toy.trainer(strategy, world, max_epochs=1).fit(model, Uneven(rank, world))
    return toy.weights(model)


def test_unequal_shares_train_as_one_rank_with_the_whole_batch() -> None:
    whole = run_ranks(fit_uneven, 1, args=(1,))[0]
    shared = run_ranks(fit_uneven, 3, args=(3,))[0]
    wrong = run_ranks(fit_uneven, 3, args=(3, "token"))[0]  # negative control: the loss is a mean over samples
    for key, value in whole.items():
        torch.testing.assert_close(shared[key], value, rtol=1e-4, atol=1e-6)
    assert any((wrong[key] - value).abs().max() > 1e-3 for key, value in whole.items())
