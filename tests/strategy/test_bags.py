"""Bags in a model, beside sequences: both strategies train alike, bit for bit, and the log says what stays synchronous."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.embedding.shard import shard
from lightning_freescale.embedding.support import reason_against_prioritizing
from lightning_freescale.runtime.errors import ConfigurationError
from tests import toy
from tests.ranks import run_ranks

WIDTHS = {"item": 16, "shop": 8}


def bags(prefix: str, pooling: PoolingType, weighted: bool = False) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(
            name=f"{prefix}_{name}",
            embedding_dim=WIDTHS[name],
            num_embeddings=rows,
            feature_names=[feature for feature, table in toy.FEATURES.items() if table == name],
            pooling=pooling,
        )
        for name, rows in toy.ROWS.items()
    ]
    return EmbeddingBagCollection(tables=tables, is_weighted=weighted)


class Both(toy.Model):
    """A collection of sequences and two collections of bags."""

    def __init__(self) -> None:
        super().__init__()
        self.sums, self.means = bags("sum", PoolingType.SUM), bags("mean", PoolingType.MEAN)
        width = len(toy.FEATURES) * toy.DIM + 2 * sum(WIDTHS[table] for table in toy.FEATURES.values())
        self.head = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = self.embeddings(features)
        sequences = [toy.mean(rows[key]) for key in toy.FEATURES]
        pooled = [collection(features).values() for collection in (self.sums, self.means)]
        return self.head(torch.cat([*sequences, *pooled], dim=1)).squeeze(-1)


def train(rank: int, sharding: Any, prioritize: bool) -> tuple[list[float], dict[str, Tensor], list]:
    pl.seed_everything(1, verbose=False)
    model, seen = Both(), []

    class Watch(pl.Callback):
        def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
            seen.append(trainer.strategy.schedule.prioritized if trainer.strategy.schedule else [])

    strategy = FreeScaleStrategy(sharding=sharding, prioritize=prioritize, balance="off")
    trainer = toy.trainer(strategy, 2, max_epochs=1, callbacks=[Watch()], limit_val_batches=1, val_check_interval=4)
    trainer.fit(model, toy.loader(32), toy.loader(8, shuffle=False))
    return model.losses, toy.weights(model), seen[-1]


def trainings(rank: int, cases: list[tuple[Any, bool]]) -> list[tuple[list[float], dict[str, Tensor], list]]:
    return [train(rank, *case) for case in cases]


def test_sequences_and_bags_in_one_model() -> None:
    cases = [(sharding, prioritize) for sharding in ("table_wise", "column_wise", None) for prioritize in (False, True)]
    for results in run_ranks(trainings, args=(cases,), timeout=120):
        for plain, prioritized in zip(results[::2], results[1::2], strict=True):
            assert plain[0] == prioritized[0]
            assert toy.same(plain[1], prioritized[1])
        assert [result[2] for result in results[1::2]] == [["embeddings", "sums", "means"]] * 3


def uneven(rank: int) -> tuple[str, tuple[int, ...]]:
    """The error of a step in which the ranks have different numbers of samples, and the shape of an output without gradients."""
    torch.distributed.init_process_group("gloo")
    assert torch.distributed.group.WORLD is not None
    model = nn.ModuleDict({"bags": bags("b", PoolingType.SUM)})
    shard(model, torch.distributed.group.WORLD, torch.device("cpu"), sharding="row_wise")
    samples = 1 + rank
    keys, number = list(toy.FEATURES), samples * len(toy.FEATURES)
    features = KeyedJaggedTensor(keys, torch.arange(number) % 5, lengths=torch.ones(number, dtype=torch.int64))
    with pytest.raises(ConfigurationError) as error:
        model["bags"](features)
    with torch.no_grad():
        return str(error.value), tuple(model["bags"](features).values().shape)


def test_uneven_batches_of_row_wise_bags_are_refused_by_name() -> None:
    width = sum(WIDTHS[table] for table in toy.FEATURES.values())
    for rank, (message, shape) in enumerate(run_ranks(uneven)):
        assert message.startswith("bags: the ranks have [1, 2] samples in this step")
        assert shape == (1 + rank, width)


def reasons(rank: int) -> list[str | None]:
    found = []
    for pooling, weighted in ((PoolingType.SUM, True), (PoolingType.MEAN, False), (PoolingType.MEAN, True)):
        model = toy.Model(bags=True)
        model.embeddings = bags("b", pooling, weighted)
        trainer = toy.trainer(FreeScaleStrategy(), 1, limit_val_batches=0)
        trainer.validate(model, toy.loader(), verbose=False)
        found.append(reason_against_prioritizing(model.embeddings))  # type: ignore[arg-type]
    return found


def test_which_bags_stay_synchronous() -> None:
    assert run_ranks(reasons, 1)[0] == [
        None,
        None,
        "pools weighted bags by their mean, and FBGEMM does not divide the gradients of weighted means on a CPU",
    ]
