"""A batch size that varies by feature: exchanged synchronously, and trained as the same batches with a single size."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from lightning_freescale import ConfigurationError, FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks

Trained = tuple[list[float], dict[str, Tensor]]


def whole(samples: list[Any]) -> toy.Batch:
    """All samples have the shops of the first one."""
    index, (*others, _), label = samples[0]
    shops = samples[0][1][2]
    return toy.collate([(index, [*others, shops], label)] + [(i, [*v[:2], shops], y) for i, v, y in samples[1:]])


def varying(samples: list[Any]) -> toy.Batch:
    """The same, with the shops once. ``inverse_indices`` says which sample uses which of them."""
    batch, size = whole(samples), len(samples)
    features, keys = batch.features, list(toy.FEATURES)
    shops = samples[0][1][2]
    values = torch.cat([features["clicks"].values(), features["carts"].values(), shops])
    lengths = torch.cat([features.lengths()[: 2 * size], torch.tensor([len(shops)])])
    of_sample = torch.stack([torch.arange(size), torch.arange(size), torch.zeros(size, dtype=torch.int64)])
    batch.features = KeyedJaggedTensor(
        keys,
        values,
        lengths=lengths,
        stride_per_key_per_rank=[[size], [size], [1]],
        inverse_indices=(keys, of_sample),
    )
    return batch


def fit(collate: Any, kind: str, prioritize: bool, optimizer: str = "rowwise_adagrad") -> Trained:
    pl.seed_everything(1, verbose=False)
    model = toy.Model(bags=True)
    tables = {"optimizer": optimizer, "lr": 0.1}
    strategy = FreeScaleStrategy(balance="off", sharding=kind, prioritize=prioritize, embedding_optimizer=tables)
    data = DataLoader(toy.Samples(32), batch_size=2, collate_fn=collate)
    toy.trainer(strategy, 2, max_epochs=1).fit(model, data)
    return model.losses, toy.weights(model)


def fits(rank: int) -> tuple[list[Trained], str]:
    found = []
    for kind in ("table_wise", "row_wise"):
        found += [fit(whole, kind, True), fit(varying, kind, False), fit(varying, kind, True)]
    try:
        fit(varying, "table_wise", True, "adam")
    except ConfigurationError as error:
        return found, str(error)
    return found, "trained"


def test_varying_batch_sizes_train_as_equal_ones() -> None:
    for found, refused in run_ranks(fits):
        for expected, synchronous, ahead in (found[:3], found[3:]):
            assert synchronous[0] == ahead[0]
            assert toy.same(synchronous[1], ahead[1])
            for name, value in expected[1].items():  # the gradients of a row are added in another order
                torch.testing.assert_close(value, ahead[1][name], rtol=1e-4, atol=1e-5)
        assert "a batch size that varies by feature" in refused
