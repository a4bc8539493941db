"""User code that takes the weights of a sharded table as a tensor, and modules of TorchRec that are not supported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule

from lightning_freescale import ConfigurationError, FreeScaleStrategy
from lightning_freescale.embedding.plan import embedding_modules
from tests import toy
from tests.ranks import run_ranks

SGD = {"optimizer": "sgd", "lr": 0.05}
ROW_WISE = {"item": "row_wise", "shop": "row_wise"}


class Penalized(toy.Model):
    factor = 0.01

    def loss(self, batch: toy.Batch) -> Tensor:
        return super().loss(batch) + self.factor * sum(value.square().sum() for value in self.parameters())


class TouchesAll(Penalized):
    """Adds nothing, so that DDP finds no unused parameter."""

    factor = 0.0


class ScoresAll(toy.Model):
    """A softmax over all items, as models with an nn.Embedding compute it."""

    def loss(self, batch: toy.Batch) -> Tensor:
        rows = self.embeddings(batch.features)
        states = toy.mean(rows["clicks"])
        return nn.functional.cross_entropy(states @ self.embeddings.embeddings["item"].weight.T, batch.index)


class ReadsItsTable(toy.Model):
    def on_train_start(self) -> None:
        self.rows_read = len(self.embeddings.embeddings["item"].weight)


class CallsItsTable(toy.Model):
    def loss(self, batch: toy.Batch) -> Tensor:
        table: Any = self.embeddings.embeddings["item"]
        assert (table.num_embeddings, table.embedding_dim) == (96, 8)
        return super().loss(batch) + table(batch.index % 96).sum()


class LooksAllUp(toy.Model):
    def on_validation_epoch_start(self) -> None:
        lengths = torch.tensor([toy.ROWS["item"], 0, 0])
        features = KeyedJaggedTensor(list(toy.FEATURES), torch.arange(toy.ROWS["item"]), lengths=lengths)
        self.rows_read = self.embeddings(features)["clicks"].values().clone()


class Frozen(ScoresAll):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))

    def loss(self, batch: toy.Batch) -> Tensor:
        unused = sum(value.sum() for value in self.head.parameters())  # DDP wants all parameters to be used
        return self.scale * super().loss(batch) + 0.0 * unused


def fit(
    rank: int, world: int, make: Callable[[], Any], prioritize: bool, sharding: Any = ROW_WISE
) -> tuple[str, list[float], Any, list[str]]:
    """The error, the losses, the weights and the warnings."""
    torch.manual_seed(1)
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_freescale").addHandler(handler)
    model = make()
    strategy = FreeScaleStrategy(prioritize=prioritize, balance="off", sharding=sharding, embedding_optimizer=SGD)
    trainer = toy.trainer(strategy, world, max_epochs=1, limit_val_batches=1, num_sanity_val_steps=0)
    try:
        trainer.fit(model, toy.loader(shuffle=False), toy.loader(shuffle=False))
    except ConfigurationError as error:
        return str(error), model.losses, None, warnings
    return "", model.losses, toy.weights(model) | {"read": getattr(model, "rows_read", None)}, warnings


@pytest.mark.parametrize("prioritize", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_a_gradient_of_a_whole_table_is_an_error(world: int, prioritize: bool) -> None:
    """FBGEMM updates looked-up rows, so this gradient would be lost."""
    for error, losses, _, _ in run_ranks(fit, world, args=(world, Penalized, prioritize)):
        assert error.startswith("embeddings.embeddings['item'].weight, embeddings.embeddings['shop'].weight: the loss")
        assert "weight_decay" in error
        assert len(losses) == 1


def test_scores_of_all_items_are_an_error() -> None:
    """The scores would be those of the items on this rank."""
    for error, _, _, warnings in run_ranks(fit, args=(2, ScoresAll, True)):
        assert error.startswith("embeddings.embeddings['item'].weight: the loss depends on all rows")
        assert "'An output layer over a table'" in error
        assert any("not the table of shape [96, 8], but the part" in line and "[48, 8]" in line for line in warnings)


def test_a_call_of_one_table_says_what_to_call() -> None:
    for error, _, _, _ in run_ranks(fit, args=(2, CallsItsTable, True)):
        assert error.startswith("embeddings.embeddings['item'].weight: a sharded table cannot be called by itself")


def test_all_rows_of_a_table_can_be_looked_up() -> None:
    for _, _, weights, warnings in run_ranks(fit, args=(2, LooksAllUp, True)):
        assert torch.equal(weights["read"], weights["embeddings.embeddings.item.weight"])
        assert not warnings


def test_zero_times_all_parameters_is_no_error() -> None:
    for (error, losses, weights, _), (_, plain_losses, plain, _) in zip(
        run_ranks(fit, args=(2, TouchesAll, True)), run_ranks(fit, args=(2, toy.Model, True)), strict=True
    ):
        assert not error
        assert losses == plain_losses
        assert toy.same(
            {key: value for key, value in weights.items() if key != "read"},
            {key: value for key, value in plain.items() if key != "read"},
        )


@pytest.mark.parametrize(
    ("sharding", "rows"), [(ROW_WISE, [48, 48]), ({"item": "table_wise", "shop": "table_wise"}, None)]
)
def test_whoever_reads_a_part_of_a_table_is_warned(sharding: dict[str, str], rows: list[int] | None) -> None:
    results = run_ranks(fit, args=(2, ReadsItsTable, False, sharding))
    read = [weights["read"] for _, _, weights, _ in results]
    assert sorted(read) == (rows or [0, 96])
    for (error, _, _, warnings), own in zip(results, read, strict=True):
        assert not error
        assert any("the part that this rank holds" in line for line in warnings) == (own != 96)


def test_whole_tables_and_trainings_that_read_none_warn_nobody() -> None:
    assert run_ranks(fit, 1, args=(1, ReadsItsTable, False))[0][3] == []
    assert [warnings for _, _, _, warnings in run_ranks(fit, args=(2, toy.Model, True))] == [[], []]


def test_a_frozen_table_may_be_used_whole() -> None:
    ((error, losses, _, _),) = run_ranks(fit, 1, args=(1, Frozen, False))
    assert not error
    assert len(losses) == 12


def test_modules_that_would_train_wrongly_are_refused() -> None:
    config = EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=96, feature_names=["clicks"])
    fused = FusedEmbeddingBagCollection(tables=[config], optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 0.1})
    pruned = ITEPEmbeddingBagCollection(EmbeddingBagCollection(tables=[config]), GenericITEPModule({"item": 200}))
    with pytest.raises(ConfigurationError, match=r"^a is a FusedEmbeddingBagCollection: .*embedding_optimizer"):
        embedding_modules(nn.ModuleDict({"a": fused}))
    with pytest.raises(ConfigurationError, match=r"^a is a ITEPEmbeddingBagCollection: it prunes rows only if"):
        embedding_modules(nn.ModuleDict({"a": pruned}))
    plain = EmbeddingCollection(
        tables=[EmbeddingConfig(name="item", embedding_dim=8, num_embeddings=96, feature_names=["clicks"])]
    )
    assert list(embedding_modules(nn.ModuleDict({"a": plain}))) == ["a"]
