"""Parts of a batch that have one row for each sample, and values that would be wrong after samples have moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_freescale.balance import CostModel, Planner
from lightning_freescale.balance.errors import CannotBalance
from lightning_freescale.balance.exchange import ExchangeLoader
from lightning_freescale.balance.exchange.packing import build_batch, pack_samples, packed_sizes
from lightning_freescale.balance.exchange.places import FixedTensors, refuse_to_move
from lightning_freescale.balance.exchange.split_batch import agree, map_tensors, split_batch
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


@pytest.mark.parametrize(
    "places",
    ["samples", "segments", "starts", "ends", "events", "order", "column", "same user", "earlier", None, "pairs"],
)
def test_values_that_are_places_in_the_batch_are_found(places: str | None) -> None:
    features = seq_batch([3, 5, 9, 4]).features
    lengths = features.lengths().view(len(features.keys()), -1)[0]
    users = torch.tensor([7, 8, 7, 9])
    values = {
        "samples": torch.arange(4),
        "segments": torch.repeat_interleave(torch.arange(4), lengths),
        "starts": lengths.cumsum(0) - lengths,
        "ends": lengths.cumsum(0).int(),
        "events": torch.arange(int(lengths.sum())),
        "order": torch.tensor([2, 0, 3, 1]),
        "column": torch.tensor([[2], [0], [3], [1]]),
        "same user": users[:, None] == users[None],
        "earlier": torch.rand(4, 4).tril(),
        None: torch.tensor([3, 5, 9, 4]),
        "pairs": torch.rand(4, 4),
    }
    found = FixedTensors.of(split_batch(SlottedBatch(features, values[places]))).places
    assert found == (frozenset() if places in (None, "pairs") else {"batch.label"})


def test_segments_of_two_samples_are_found() -> None:
    features = seq_batch([9, 13]).features
    lengths = features.lengths().view(len(features.keys()), -1)[0]
    segments = torch.repeat_interleave(torch.arange(2), lengths)
    assert len(segments) > 8
    assert FixedTensors.of(split_batch(SlottedBatch(features, segments))).places == {"batch.label"}


def test_values_that_are_equal_on_all_ranks_belong_to_no_sample() -> None:
    """For example the weights of four classes in batches of four samples."""

    def of_rank(first: int, values: torch.Tensor) -> FixedTensors:
        return FixedTensors.of(split_batch(SlottedBatch(seq_batch(list(range(first, first + 4))).features, values)))

    weights = torch.tensor([0.1, 0.2, 0.3, 0.4])
    with pytest.raises(CannotBalance, match=r"batch\.label: equal on all ranks"):
        refuse_to_move([of_rank(0, weights), of_rank(10, weights)])
    refuse_to_move([of_rank(0, weights), of_rank(10, weights + 1)])
    refuse_to_move([of_rank(0, weights > 0.2), of_rank(10, weights > 0.2)])  # labels may be equal by chance
    refuse_to_move([of_rank(0, weights), of_rank(0, weights)])  # both ranks loaded the same samples


# ---- classes of batches ----
class ItemsAreAttributes(dict):
    def __init__(self, *args: Any, **items: Any):
        super().__init__(*args, **items)
        self.__dict__ = self


class Named(list):
    def __init__(self, items: list, name: str):
        super().__init__(items)
        self.name = name


class Custom(Mapping):
    """A mapping whose constructor takes other arguments than a dictionary's."""

    def __init__(self, features: Any, label: Any):
        self.held = {"features": features, "label": label}

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def reordered(batch: Any, order: list[int]) -> Any:
    """The batch with other samples, made as after an exchange."""
    split = split_batch(batch)
    columns = agree([split.layout]).columns
    sizes = packed_sizes(split, columns)[order]
    return build_batch(split, columns, pack_samples(split, columns, np.array(order), int(sizes.sum())), sizes)


@pytest.mark.parametrize("kind", ["attributes", "list", "mapping", "tensordict", "complex"])
def test_classes_of_batches_keep_what_they_hold(kind: str) -> None:
    features, label = seq_batch([3, 5, 9]).features, torch.tensor([1.0, 2.0, 3.0])
    batches: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "attributes": (ItemsAreAttributes(features=features, label=label), lambda batch: batch.label),
        "list": (Named([features, label], "clicks"), lambda batch: batch[1] if batch.name == "clicks" else None),
        "mapping": (Custom(features, label), lambda batch: batch["label"]),
        "tensordict": (
            (features, TensorDict({"label": label, "more": TensorDict({"a": label}, [3])}, [3]).lock_()),
            lambda batch: batch[1]["more", "a"][: batch[1].batch_size[0]],
        ),
        "complex": ({"label": (label * 1j).conj(), "features": features}, lambda batch: -batch["label"].imag),
    }
    batch, label_of = batches[kind]
    made = reordered(batch, [2, 0])
    assert type(made) is type(batch)
    assert label_of(made).tolist() == [3.0, 1.0]
    assert label_of(batch).tolist() == [1.0, 2.0, 3.0]


class Positional(tuple):
    """A tuple that cannot be made of its items alone."""

    def __new__(cls, features: Any, label: Any) -> Positional:
        return super().__new__(cls, (features, label))


class WithTensor(dict):
    """A dictionary with a tensor that is not one of its items."""


@pytest.mark.parametrize("kind", ["sparse", "nested", "quantized", "subclass", "tuple", "attribute", "class"])
def test_batches_that_cannot_be_made_of_other_samples_stay(kind: str) -> None:
    """They are no errors, because they can be trained on."""
    features, label = seq_batch([3, 5, 9]).features, torch.tensor([1.0, 2.0, 3.0])
    beside = WithTensor(features=features)
    beside.label = label  # type: ignore[attr-defined]
    batches = {
        "sparse": (features, torch.eye(3).to_sparse()),
        "nested": (features, torch.nested.nested_tensor([label, label, label[:1]], layout=torch.jagged)),
        "quantized": (features, torch.quantize_per_tensor(label, 0.1, 0, torch.quint8)),
        "subclass": (features, label.as_subclass(type("Image", (torch.Tensor,), {}))),
        "tuple": Positional(features, label),
        "attribute": beside,
        "class": (features, label, type("Options", (), {"size": label})),
    }
    with pytest.raises(CannotBalance):
        split_batch(batches[kind])


# ---- through an exchange ----
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
