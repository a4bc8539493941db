"""Parts of a batch that have one row for each sample, and values that would be wrong after samples have moved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_freescale.balance import CostModel, Planner
from lightning_freescale.balance.exchange import ExchangeLoader
from lightning_freescale.balance.exchange.split_batch import map_tensors, split_batch, tensors_of_places
from tests.balance.batches import seq_batch
from tests.balance.test_exchange import Loader, connect
from tests.ranks import run_ranks


@dataclass(frozen=True, slots=True)
class SlottedBatch:
    features: Any
    label: torch.Tensor


def test_the_parts_of_a_class_with_slots_are_found() -> None:
    batch = SlottedBatch(seq_batch([3, 5]).features, torch.ones(2))
    assert [part.name for part in split_batch(batch).tensors][-1] == "batch.label"
    twin = map_tensors(lambda name, leaf: leaf + 1 if isinstance(leaf, torch.Tensor) else leaf, "batch", batch)
    assert twin.label.tolist() == [2.0, 2.0]
    assert batch.label.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("places", ["samples", "segments", "starts", "ends", None])
def test_values_that_are_places_in_the_batch_are_found(places: str | None) -> None:
    features = seq_batch([3, 5, 9, 4]).features
    lengths = features.lengths().view(len(features.keys()), -1)[0]
    values = {
        "samples": torch.arange(4),
        "segments": torch.repeat_interleave(torch.arange(4), lengths),
        "starts": lengths.cumsum(0) - lengths,
        "ends": lengths.cumsum(0).int(),
        None: torch.tensor([3, 5, 9, 4]),
    }
    found = tensors_of_places(split_batch(SlottedBatch(features, values[places])))
    assert found == (frozenset() if places is None else {"batch.label"})


class SegmentLoader(Loader):
    """Batches with the number of the sample of each event, or with a number of the sample that is the same everywhere."""

    def __iter__(self) -> Iterator[Any]:
        for step in range(self.steps):
            indices = [1000 * step + 100 * self.rank + at for at in range(4)]
            features = seq_batch(indices).features
            lengths = features.lengths().view(len(features.keys()), -1)[0]
            number = torch.arange(4) if self.fails_at is None else torch.tensor(indices)
            yield {"features": features, "segment": torch.repeat_interleave(number, lengths)}


def samples_stay(rank: int) -> list[bool]:
    group, stays = connect(rank), []
    for fails_at in (None, 99):
        loader = SegmentLoader(rank, 2, seq_batch, fails_at=fails_at)
        exchange = ExchangeLoader(loader, group=group, planner=Planner("fixed", CostModel(1.0, 1.0)))
        pairs = zip(loader, exchange, strict=True)
        stays.append(all(torch.equal(a["features"].values(), b["features"].values()) for a, b in pairs))
        exchange.close()
    return stays


def test_samples_of_batches_with_places_stay_on_their_rank() -> None:
    assert run_ranks(samples_stay) == [[True, False]] * 2
