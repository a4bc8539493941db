"""Models that make rows of the ids of their batches themselves, as the hashing trick does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from lightning_freescale import FreeScaleStrategy, InputError
from tests import toy
from tests.contract.test_loaders import SGD, SgdModel
from tests.ranks import run_ranks

OFFSET = 10**12 + 45  # so raw ids are no rows


def raw(samples: list[Any]) -> toy.Batch:
    batch = toy.collate(samples)
    batch.features = with_ids(batch.features, batch.features.values() + OFFSET)
    return batch


def with_ids(features: KeyedJaggedTensor, ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(features.keys(), ids, lengths=features.lengths())


class Undeclared(SgdModel):
    slots = 30  # fewer than the rows of each table

    def hashed(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return with_ids(features, features.values() % self.slots)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return super().forward(self.hashed(features))


class InStep(Undeclared):
    maps_ids = True


class BeforeTransfer(SgdModel):
    maps_ids = True

    def on_before_batch_transfer(self, batch: toy.Batch, dataloader_idx: int) -> toy.Batch:
        batch.features = Undeclared.hashed(self, batch.features)  # type: ignore[arg-type]
        return batch

    slots = Undeclared.slots


class AfterTransfer(SgdModel):
    maps_ids, slots = True, Undeclared.slots

    on_after_batch_transfer = BeforeTransfer.on_before_batch_transfer


class WrongHash(InStep):
    slots = 80  # The table of the shops has 40 rows.


def fit(rank: int, kind: type[toy.Model], strategy: Any, world: int) -> Any:
    torch.manual_seed(3)
    model = kind()
    if strategy != "ddp":
        strategy = FreeScaleStrategy(prioritize=strategy, embedding_optimizer=SGD)
    loader = DataLoader(toy.Samples(24), 4 // world, collate_fn=raw)
    toy.trainer(strategy, world, limit_val_batches=2).fit(model, loader, loader)
    return model.losses, toy.weights(model)


@pytest.mark.parametrize("kind", [InStep, BeforeTransfer, AfterTransfer])
def test_hashed_ids_train_as_with_ddp(kind: type[toy.Model]) -> None:
    truth = run_ranks(fit, 1, args=(kind, "ddp", 1))[0][1]
    for _, weights in run_ranks(fit, args=(kind, True, 2)):
        for key, value in truth.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-6)


def fail(rank: int, kind: type[toy.Model]) -> str:
    with pytest.raises(Exception) as error:  # noqa: PT011 - the other rank may report the failure of this one
        fit(rank, kind, False, 2)
    return f"{type(error.value).__name__}: {error.value}"


def test_ids_that_are_no_rows_are_refused() -> None:
    for message in run_ranks(fail, args=(Undeclared,)):
        assert message.startswith(InputError.__name__)
        assert "rank 0: batch 0: clicks: id 1000000000" in message
        assert "set its class attribute maps_ids = True" in message
    for message in run_ranks(fail, args=(WrongHash,)):
        assert "shops: id" in message
        assert "is outside its table of 40 rows (0 to 39)" in message
        assert "maps_ids" not in message
