"""Activation checkpointing: rows that are taken out before train alike. The output of a collection ends in an error."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torchrec import JaggedTensor, KeyedJaggedTensor

from lightning_freescale import FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks


class Checkpointed(toy.Model):
    reentrant = False

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = self.embeddings(features)
        lengths = {key: rows[key].lengths() for key in toy.FEATURES}

        def score(*values: Tensor) -> Tensor:
            parts = zip(lengths.values(), values, strict=True)
            return self.scores([JaggedTensor(part, lengths=counts) for counts, part in parts])

        taken = [rows[key].values() for key in toy.FEATURES]
        return checkpoint(score, *taken, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    def scores(self, rows: list[Any]) -> Tensor:
        scores: Tensor = self.head(torch.cat([toy.mean(part) for part in rows], dim=1)).squeeze(-1)
        return scores


class Reentrant(Checkpointed):
    reentrant = True


class PassesOutput(Checkpointed):
    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        def score(rows: Any) -> Tensor:
            return self.scores([rows[key] for key in toy.FEATURES])

        return checkpoint(score, self.embeddings(features), use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class PassesOutputReentrant(PassesOutput):
    reentrant = True


def fit(rank: int, kind: type[toy.Model], prioritize: bool) -> Any:
    pl.seed_everything(1, verbose=False)
    model = kind()
    strategy = FreeScaleStrategy(prioritize=prioritize, balance="off")
    try:
        toy.trainer(strategy, 2, max_epochs=1).fit(model, toy.loader(24))
    except RuntimeError as error:
        return str(error)
    return toy.weights(model)


@pytest.mark.parametrize("prioritize", [True, False])
def test_rows_that_are_taken_out_before_train_alike(prioritize: bool) -> None:
    plain = run_ranks(fit, args=(toy.Model, prioritize))[0]
    for kind in (Checkpointed, Reentrant):
        assert toy.same(run_ranks(fit, args=(kind, prioritize))[0], plain)


def test_the_output_of_a_collection_ends_in_an_error() -> None:
    cases = {PassesOutput: "A different number of tensors was saved", PassesOutputReentrant: "does not require grad"}
    for kind, words in cases.items():
        for message in run_ranks(fit, args=(kind, True)):
            assert words in message
