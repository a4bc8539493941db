"""The search for parts of a batch, and features that a hook of the user replaces after the batch was prepared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.batch.contents import find_parts
from lightning_freescale.batch.seq_batch import SeqBatch
from lightning_freescale.embedding.schedule import ExchangeSchedule
from tests import toy
from tests.balance.batches import seq_batch
from tests.ranks import run_ranks


# ---- the search ------------------------------------------------------------------------------------------------------
def search_without_shortcuts(batch: Any, kinds: type | tuple[type, ...]) -> Iterable[Any]:
    """The definition of ``find_parts``: it tests every object with ``isinstance``."""
    seen: set[int] = set()
    stack = [batch]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, kinds):
            yield item
        elif isinstance(item, (Tensor, type)):
            continue
        elif isinstance(item, Mapping):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, (list, tuple)):
            stack.extend(reversed(item))
        elif isinstance(item, Slotted):
            stack.append(item.part)
        elif hasattr(item, "__dict__"):
            stack.extend(reversed(list(vars(item).values())))


class OwnTensor(Tensor):
    pass


class OwnJagged(KeyedJaggedTensor):
    pass


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Holder:
    part: Any


class Slotted:
    __slots__ = ("part",)

    def __init__(self, part: Any):
        self.part = part


def nested() -> list[Any]:
    shared = torch.ones(2)
    jagged = seq_batch([3]).features
    own = OwnJagged(jagged.keys(), jagged.values(), lengths=jagged.lengths(), stride=1)
    return [
        {"b": shared, "a": [None, 1, "text", b"bytes", True, 2.5, shared, jagged]},
        Pair(OwnTensor(torch.ones(1)), MappingProxyType({"x": own, "y": nn.Parameter(torch.ones(1))})),
        Holder((seq_batch([1, 2]), Holder(jagged), Slotted(shared))),
        np.ones(2),
        Tensor,
        nn.Linear(2, 1),
    ]


@pytest.mark.parametrize(
    "kinds", [KeyedJaggedTensor, Tensor, SeqBatch, (Tensor, KeyedJaggedTensor), (SeqBatch, Tensor)]
)
def test_the_search_finds_what_its_definition_finds(kinds: Any) -> None:
    for batch in (parts := nested(), *parts, None, (parts, parts)):
        expected = list(search_without_shortcuts(batch, kinds))
        found = list(find_parts(batch, kinds))
        assert [id(part) for part in found] == [id(part) for part in expected]
    assert len(list(find_parts(nested(), kinds))) > 0


# ---- replaced features -----------------------------------------------------------------------------------------------
def mirrored(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same features with other ids of the same tables."""
    parts = [part.max() - part if len(part) else part for part in features.values().split(features.length_per_key())]
    return KeyedJaggedTensor(features.keys(), torch.cat(parts), lengths=features.lengths())


class ReplacesFeatures(toy.Model):
    """Replaces the features of every second batch when its step begins."""

    def on_train_batch_start(self, batch: toy.Batch, batch_idx: int) -> None:
        if batch_idx % 2:
            batch.features = mirrored(batch.features)


def fit_replaced(rank: int, prioritize: bool) -> tuple[Any, list[tuple[bool, bool, bool]]]:
    """The weights, and for each step: are the features of the schedule those of the step, were they prepared, are the next?"""
    pl.seed_everything(3, verbose=False)
    module, noted = ReplacesFeatures(), list[tuple[bool, bool, bool]]()
    strategy = FreeScaleStrategy(prioritize=prioritize, balance="off", sharding="row_wise")
    pipeline, begin_step = strategy._pipeline, ExchangeSchedule.begin_step
    training_step, given = module.training_step, list[tuple[list[Any], list[Any]]]()

    def noting_begin(self: ExchangeSchedule, batch: Any, following: Any, *others: Any) -> None:
        given.append((batch, following))
        begin_step(self, batch, following, *others)

    def noting_step(batch: toy.Batch, batch_idx: int) -> Tensor:
        if prioritize:
            current, follower = pipeline.current[0], pipeline.current[0].follower()
            (features,), following = given[-1]
            expected = [] if follower is None else list(follower.features)
            same = [id(part) for part in following] == [id(part) for part in expected]
            noted.append((features is batch.features, current.features[0] is batch.features, same))
        return training_step(batch, batch_idx)

    module.training_step = noting_step  # type: ignore[method-assign]
    ExchangeSchedule.begin_step = noting_begin  # type: ignore[method-assign]
    try:
        toy.trainer(strategy, 2, max_epochs=1).fit(module, toy.loader(24, shuffle=False))
    finally:
        ExchangeSchedule.begin_step = begin_step  # type: ignore[method-assign]
    return toy.weights(module), noted


def test_features_that_a_hook_replaces_are_those_of_the_step() -> None:
    (truth, _), *_ = run_ranks(fit_replaced, args=(False,))
    for weights, noted in run_ranks(fit_replaced, args=(True,)):
        assert len(noted) == 6
        assert all(own for own, _, _ in noted)
        assert all(following for _, _, following in noted)
        # Negative control: the features that were noted when the batch was prepared would be the wrong ones.
        assert [prepared for _, prepared, _ in noted] == [True, False] * 3
        for name, value in truth.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=0)


def test_the_ids_by_key_are_those_of_the_present_features() -> None:
    batch, other = seq_batch([2, 3]), seq_batch([1, 4])
    first = batch.by_key
    assert batch.by_key is first is batch.features.to_dict()
    batch.features = other.features
    assert batch.by_key is other.features.to_dict()
    assert batch.by_key is not first
