"""Models as other people write them: masked ids, other key orders, 16-bit tables, subclasses, their own backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

from lightning_freescale import ConfigurationError, FreeScaleStrategy, InputError
from tests import toy
from tests.contract.test_loaders import SGD, SgdModel
from tests.ranks import run_ranks

PRIORITIZED = {"embeddings": "prioritized"}


class Noting(FreeScaleStrategy):
    """Leaves on the model how each module was exchanged."""

    def teardown(self) -> None:
        if self.schedule is not None:
            self.lightning_module.exchanged = {
                module.name: module.synchronous_reason or "prioritized" for module in self.schedule.modules
            }
        super().teardown()


def fit(rank: int, models: list[type], prioritize: bool) -> list[Any]:
    results = []
    for model in models:
        pl.seed_everything(3, verbose=False)
        module = model()
        plugin = Noting(prioritize=prioritize, embedding_optimizer=SGD, sharding="row_wise", balance="off")
        trainer = toy.trainer(plugin, 2, max_epochs=1, limit_val_batches=2)
        trainer.fit(module, toy.loader(24, shuffle=False), toy.loader(8, shuffle=False))
        results.append((module.losses, toy.weights(module), getattr(module, "exchanged", None)))
    return results


class Masks(SgdModel):
    """Masks some ids in place, as BERT4Rec does."""

    def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
        if batch_idx >= 2:
            batch.features.values()[::2] = 0
        return super().training_step(batch, batch_idx)


class HalfTables(SgdModel):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(
                name=name,
                embedding_dim=toy.DIM,
                num_embeddings=rows,
                feature_names=[feature for feature, table in toy.FEATURES.items() if table == name],
                data_type=DataType.FP16,
            )
            for name, rows in toy.ROWS.items()
        ]
        self.embeddings = EmbeddingCollection(tables=tables)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows = {key: _float(value) for key, value in self.embeddings(features).items()}
        return self.head(torch.cat([toy.mean(rows[key]) for key in toy.FEATURES], dim=1)).squeeze(-1)


class _Jagged:
    def __init__(self, values: torch.Tensor, lengths: torch.Tensor):
        self._values, self._lengths = values, lengths

    def values(self) -> torch.Tensor:
        return self._values

    def lengths(self) -> torch.Tensor:
        return self._lengths


def _float(jagged: Any) -> _Jagged:
    return _Jagged(jagged.values().float(), jagged.lengths())


class OwnBackward(SgdModel):
    """Calls ``loss.backward()`` in manual optimization, where Lightning asks for ``self.manual_backward(loss)``."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: toy.Batch, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class MyCollection(EmbeddingCollection):
    """A subclass that adds nothing to forward."""


class Subclass(SgdModel):
    def __init__(self) -> None:
        super().__init__()
        old = self.embeddings
        self.embeddings = MyCollection(tables=old.embedding_configs())
        self.embeddings.load_state_dict(old.state_dict())


class Reorders(SgdModel):
    """Its data module changes the order of the features after some batches."""

    def on_after_batch_transfer(self, batch: toy.Batch, dataloader_idx: int) -> toy.Batch:
        self.batches = getattr(self, "batches", 0) + 1
        if self.batches > 4:
            batch.features = batch.features.permute([2, 0, 1])
        return batch


CASES = {
    SgdModel: PRIORITIZED,
    Masks: {"embeddings": "called with ids that were changed in place after the batch was loaded"},
    HalfTables: PRIORITIZED,
    OwnBackward: {"embeddings": "trained with loss.backward(); call self.manual_backward(loss) instead"},
    Subclass: PRIORITIZED,
    Reorders: {"embeddings": "called with its features in another order than in the first step"},
}


def test_models_train_alike_on_both_paths() -> None:
    models = list(CASES)
    synchronous, prioritized = (run_ranks(fit, args=(models, wanted)) for wanted in (False, True))
    for plain, ahead in zip(synchronous, prioritized, strict=True):
        for model, expected, (losses, weights, exchanged) in zip(models, plain, ahead, strict=True):
            assert exchanged == CASES[model], model
            assert losses == expected[0], model
            assert toy.same(weights, expected[1]), model


class Forward(EmbeddingCollection):
    def forward(self, features: KeyedJaggedTensor) -> Any:
        return super().forward(features)


class OverridesForward(SgdModel):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Forward(tables=self.embeddings.embedding_configs())


def refused(rank: int) -> str:
    try:
        toy.trainer(FreeScaleStrategy(), 2, max_steps=1).fit(OverridesForward(), toy.loader())
    except ConfigurationError as error:
        return str(error)
    return "trained"


def test_a_subclass_with_its_own_forward_is_refused() -> None:
    for message in run_ranks(refused):
        assert "Forward overrides the forward of EmbeddingCollection" in message


# ---- the order of features -------------------------------------------------------------------------------------------
class Reordered:
    """The same batches with their features in another order, or with one feature missing."""

    def __init__(self, order: list[str]):
        self.order = order

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[toy.Batch]:
        for batch in list(toy.loader(8, shuffle=False))[:2]:
            keys = batch.features.keys()
            batch.features = batch.features.permute([keys.index(key) for key in self.order])
            yield batch


def validate(rank: int, orders: list[list[str]]) -> list[float]:
    pl.seed_everything(3, verbose=False)
    module = SgdModel()
    plugin = FreeScaleStrategy(embedding_optimizer=SGD, balance="off", prioritize=True)
    trainer = toy.trainer(plugin, 2, max_epochs=1, limit_val_batches=2)
    trainer.fit(module, toy.loader(24, shuffle=False), toy.loader(8, shuffle=False))
    found = []
    for order in orders:
        try:
            found.append(trainer.validate(module, Reordered(order), verbose=False)[0]["val_loss"])
        except InputError as error:
            found.append(float("nan") if "'shops'" in str(error) else 0.0)
    return found


def test_features_in_another_order_read_the_same_rows() -> None:
    keys = list(toy.FEATURES)
    for same, other, missing in run_ranks(validate, args=([keys, keys[::-1], keys[:2]],)):
        assert same == pytest.approx(other, rel=1e-6)
        assert missing != missing


def look_up_too_few(rank: int) -> list[str]:
    """The messages for a first input without a feature, and for a later one."""
    messages: list[str] = []

    class LooksUp(SgdModel):
        def look_up(self) -> None:
            features = KeyedJaggedTensor(["clicks"], torch.arange(4), lengths=torch.tensor([4]))
            with pytest.raises(InputError) as error:
                self.embeddings(features)
            messages.append(str(error.value))

        on_fit_start = on_train_end = look_up

    toy.trainer(FreeScaleStrategy(embedding_optimizer=SGD), 2, max_epochs=1).fit(LooksUp(), toy.loader(8))
    return messages


def test_an_input_without_a_feature_that_a_table_needs_is_refused() -> None:
    for first, later in run_ranks(look_up_too_few):
        assert first.startswith(
            "embeddings: the input has no feature 'carts'; its tables need clicks, carts, shops, this input"
        )
        assert later.startswith(
            "embeddings: the input has no feature 'carts'; its first input had clicks, carts, shops, this"
        )
