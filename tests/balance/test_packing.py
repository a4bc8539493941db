"""Split batches of any type into samples, pack the samples, and build new batches from them: all values stay the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from lightning_freescale.balance.exchange import CannotBalance
from lightning_freescale.balance.exchange.packing import build_batch, pack_samples, packed_sizes
from lightning_freescale.balance.exchange.split_batch import (
    ONE_ROW_PER_SAMPLE,
    LengthColumns,
    SplitBatch,
    agree,
    check_layout,
    split_batch,
)
from lightning_freescale.balance.sample_sizes import sample_sizes
from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch
from lightning_freescale.runtime.errors import InputError
from tests.balance.batches import Ad, ad_batch, contents, lengths_of, seq_batch
from tests.toy import Batch, Samples, collate

KINDS = {"user's": ad_batch, "SeqBatch": seq_batch}


def repacked(split: SplitBatch, columns: list[LengthColumns], order: NDArray[np.int64]) -> Any:
    """Return a batch of the samples ``order``, which were packed in between."""
    sizes = packed_sizes(split, columns)[order]
    return build_batch(split, columns, pack_samples(split, columns, order, sizes.sum()), sizes)


@settings(max_examples=60, deadline=None)
@given(
    first=st.lists(st.integers(0, 200), max_size=8),
    second=st.lists(st.integers(0, 200), max_size=8),
    kind=st.sampled_from(sorted(KINDS)),
    data=st.data(),
)
def test_samples_of_two_batches_make_a_third_batch(first: list[int], second: list[int], kind: str, data: Any) -> None:
    make = KINDS[kind]
    both = [split_batch(make(indices)) for indices in (first, second)]
    columns = agree([split.layout for split in both]).columns
    orders = [data.draw(st.permutations(range(len(indices)))) for indices in (first, second)]
    kept = [np.array(order[: data.draw(st.integers(0, len(order)))], dtype=np.int64) for order in orders]
    sizes = [packed_sizes(split, columns)[order] for split, order in zip(both, kept, strict=True)]
    packed = [
        pack_samples(split, columns, order, own.sum()) for split, order, own in zip(both, kept, sizes, strict=True)
    ]
    third = build_batch(both[0], columns, np.concatenate(packed), np.concatenate(sizes))
    indices = [source[at] for source, order in zip((first, second), kept, strict=True) for at in order]
    assert contents(third) == contents(make(indices))
    assert type(third) is type(make([]))


def test_types_dtypes_and_shapes_stay() -> None:
    batch = ad_batch([3, 1, 4])
    split = split_batch(batch)
    columns = agree([split.layout]).columns
    twin = repacked(split, columns, np.arange(3))
    assert isinstance(twin, Ad)
    assert twin.nothing is None
    for field in ("index", "event_time", "image"):
        assert torch.equal(getattr(twin, field), getattr(batch, field))
        assert getattr(twin, field).dtype == getattr(batch, field).dtype
    assert twin.labels.vector.dtype == torch.bfloat16
    assert torch.equal(twin.labels.vector, batch.labels.vector)
    assert twin.features.lengths().dtype == torch.int32
    assert torch.equal(twin.features.values(), batch.features.values())
    assert torch.equal(twin.features.weights(), batch.features.weights())
    assert twin.features.stride() == 3


def test_usual_batch_types() -> None:
    """A plain dataclass from a DataLoader's collate function, a list, and a mapping."""
    data = Samples(8)
    batch = collate([data[at] for at in range(8)])
    for nested in (batch, [batch.index, batch.features], {"x": batch.features, "y": (batch.label, batch.index)}):
        split = split_batch(nested)
        columns = agree([split.layout]).columns
        order = [5, 0, 7]
        part = repacked(split, columns, np.array(order))
        expected = collate([data[at] for at in order])
        features = {Batch: lambda b: b.features, list: lambda b: b[1], dict: lambda b: b["x"]}[type(part)](part)
        assert features.to_dict().keys() == expected.features.to_dict().keys()
        assert torch.equal(features.values(), expected.features.values())
        assert torch.equal(features.lengths(), expected.features.lengths())
        # Known before the batch moves to a GPU, where the host would wait for it.
        assert features.length_per_key_or_none() == expected.features.length_per_key()


def test_timestamps_are_per_event_even_if_one_row_per_sample_would_fit() -> None:
    batch = seq_batch([1])
    one = dataclasses.replace(batch, features=batch.features, timestamps=batch.timestamps)
    (at,) = [at for at, tensor in enumerate(split_batch(one).tensors) if tensor.name == "batch.timestamps"]
    assert split_batch(one).tensors[at].columns == ((0,),)


def test_the_ranks_together_find_out_whether_rows_are_per_sample_or_per_event() -> None:
    """On the first rank a tensor of one row fits both. On the second rank only one row per event fits."""
    alone = {"f": KeyedJaggedTensor(["k"], torch.tensor([5]), lengths=torch.tensor([1])), "time": torch.tensor([9])}
    pair = {
        "f": KeyedJaggedTensor(["k"], torch.tensor([5, 6, 7]), lengths=torch.tensor([1, 2])),
        "time": torch.tensor([9, 8, 7]),
    }
    one, two = split_batch(alone), split_batch(pair)
    assert agree([one.layout]).columns[1] == ONE_ROW_PER_SAMPLE
    assert agree([one.layout, two.layout]).columns[1] == agree([two.layout, one.layout]).columns[1] == (0,)
    check_layout(two, agree([one.layout, two.layout]))
    with pytest.raises(InputError, match=r"batch\['time'\]: 3 rows; earlier batches have one row per sample"):
        check_layout(two, agree([one.layout]))


def test_sample_sizes() -> None:
    lengths, candidates = sample_sizes(seq_batch([3, 4, 5]))
    assert lengths.tolist() == [1 + lengths_of(index)[1] for index in (3, 4, 5)]
    assert candidates.tolist() == [2 * (length - 1) for length in lengths]
    lengths, candidates = sample_sizes(ad_batch([3, 4, 5]))
    assert lengths.tolist() == [sum(lengths_of(index)[:2]) for index in (3, 4, 5)]
    assert candidates.tolist() == [0, 0, 0]
    assert [part.shape for batch in (ad_batch([]), seq_batch([])) for part in sample_sizes(batch)] == [(0,)] * 4
    assert sample_sizes(ad_batch([3, 4, 5]), key="a")[0].tolist() == [lengths_of(index)[0] for index in (3, 4, 5)]
    with pytest.raises(CannotBalance, match="a dict without a KeyedJaggedTensor has no lengths to balance by"):
        sample_sizes({"x": torch.zeros(3)})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("negatives", [True, False])
@pytest.mark.parametrize("per_position", [None, 2])
def test_sample_sizes_are_the_lengths_and_candidates_of_a_batch(
    dtype: torch.dtype, negatives: bool, per_position: int | None
) -> None:
    keys = [HISTORY, NEGATIVES] if negatives else [HISTORY]
    lengths = torch.tensor([0, 1, 5, 4, 4, 6][: 3 * len(keys)], dtype=dtype)
    features = KeyedJaggedTensor(keys, torch.arange(int(lengths.sum())), lengths=lengths, stride=3)
    batch = SeqBatch(features, torch.arange(6), negatives_per_position=per_position)
    for sizes, expected in zip(sample_sizes(batch), (batch.lengths, batch.candidates), strict=True):
        assert sizes.dtype == np.int64
        assert sizes.tolist() == expected.tolist()
    assert batch.candidates.any() == (negatives or per_position is not None)  # not all of them are 0


def test_a_wrong_number_of_bytes_is_an_error() -> None:
    split = split_batch(ad_batch([3, 1, 4]))
    columns, order = agree([split.layout]).columns, np.arange(3)
    sizes = packed_sizes(split, columns)
    for wrong in (-1, 1):
        with pytest.raises(ValueError, match="bytes do not fit the samples"):
            pack_samples(split, columns, order, sizes.sum() + wrong)
    packed = pack_samples(split, columns, order, sizes.sum())
    with pytest.raises(ValueError, match=r"starts\[2\] = \d+: the sample is not within the \d+ bytes"):
        build_batch(split, columns, packed[:-1], sizes)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"user": [1, 2]}, r"batch\['user'\]\[0\]: of type int, not a tensor with a row per sample"),
        ({"x": torch.zeros(2), "y": torch.tensor(1.0)}, r"batch\['y'\]: a scalar belongs to no sample"),
        ({"x": torch.zeros(2), "y": torch.zeros(3)}, r"batch\['y'\]: 3 rows, neither one for each of 2 samples"),
        ({}, "a dict without tensors has no samples"),
        (
            [JaggedTensor(torch.arange(2), lengths=torch.tensor(n)) for n in ([1, 1], [2])],
            r"batch\[1\]: 1 samples, but batch\[0\] has 2",
        ),
        ({"x": torch.zeros(2, device="meta")}, r"batch\['x'\]: on meta, but samples are exchanged on the host"),
    ],
)
def test_a_part_that_cannot_be_split_is_named(batch: Any, message: str) -> None:
    with pytest.raises(CannotBalance, match=message):
        split_batch(batch)


def test_a_batch_with_wrong_lengths_is_an_input_error() -> None:
    features = KeyedJaggedTensor(["k"], torch.arange(3), lengths=torch.tensor([1, 1]), stride=2)
    with pytest.raises(InputError, match="lengths sum to 2 but there are 3 values") as raised:
        split_batch({"x": features})
    assert not isinstance(raised.value, CannotBalance)


def test_batches_of_different_layout_cannot_be_balanced() -> None:
    plain, featured = (split_batch(seq_batch([1, 2], feature=feature)) for feature in (False, True))
    with pytest.raises(CannotBalance, match=r"the batches of ranks 0 and 1 differ in batch.features\[action\]"):
        agree([plain.layout, featured.layout])
    with pytest.raises(CannotBalance, match=r"batch: this batch and earlier ones differ in batch.features\[action\]"):
        check_layout(featured, agree([plain.layout]))
