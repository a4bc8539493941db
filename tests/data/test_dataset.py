"""Samples: leave-one-out equals a reference in plain Python, and negatives depend on the user, not on the batch."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torchrec import EmbeddingCollection, EmbeddingConfig

from lightning_freescale.balance.sampler import BatchIndices
from lightning_freescale.data import Histories, HistoryDataset, NegativeSampler, SeqBatch, Synthetic
from lightning_freescale.data.negatives import random_bits
from lightning_freescale.runtime.errors import ConfigurationError, InputError

HISTORIES = Synthetic(
    users=40, items=50, clusters=5, mean_length=12, feature_sizes={"action": 3, "place": 5}
).generate()


def dataset(negatives: int | None = 4, max_history: int = 10, skip: int = 0, **options: object) -> HistoryDataset:
    sampler = None if negatives is None else NegativeSampler(50, negatives, **options)  # type: ignore[arg-type]
    return HistoryDataset(HISTORIES, max_history, sampler, skip)


def rows(batch: SeqBatch, key: str) -> list[list[int]]:
    return [part.tolist() for part in batch.features[key].to_dense()]


@pytest.mark.parametrize("max_history", [1, 2, 10, 1000])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("skip", [0, 1])
def test_leave_one_out(max_history: int, training: bool, skip: int) -> None:
    users = [3, 0, 39, 3, 17]
    batch = dataset(4 if training else None, max_history, skip)[users]
    batch.validate()
    own = [slice(HISTORIES.offsets[user], HISTORIES.offsets[user + 1] - skip) for user in users]
    assert rows(batch, "history") == [HISTORIES.items[span].tolist()[:-1][-max_history:] for span in own]
    for name in ("action", "place"):
        expected = [HISTORIES.features[name][span].tolist()[:-1][-max_history:] for span in own]
        assert rows(batch, name) == expected
    times = [time for span in own for time in HISTORIES.timestamps[span].tolist()[:-1][-max_history:]]
    assert batch.timestamps.tolist() == times
    assert batch.lengths.tolist() == [min(max_history, span.stop - span.start - 1) for span in own]
    assert batch.lengths.tolist() == dataset(None, max_history, skip).lengths[users].tolist()
    if training:
        assert batch.targets is None
        assert batch.features["negatives"].lengths().tolist() == [4] * 5
    else:
        assert batch.targets is not None
        assert batch.targets.tolist() == [HISTORIES.items[span][-1] for span in own]
        assert batch.features["negatives"].lengths().tolist() == [0] * 5
    assert batch.features.keys() == ["history", "negatives", "action", "place"]


def test_one_embedding_collection_accepts_training_and_validation_batches() -> None:
    table = EmbeddingConfig(name="item", num_embeddings=50, embedding_dim=4, feature_names=["history", "negatives"])
    collection = EmbeddingCollection(tables=[table])
    for batch in (dataset(4)[[1, 2]], dataset(None)[[1, 2]]):
        embedded = collection(batch.features)
        assert len(embedded["history"].values()) == int(batch.lengths.sum())
        assert len(embedded["negatives"].values()) == int(batch.features["negatives"].lengths().sum())


@pytest.mark.parametrize("held_out", [1, 2])
def test_item_counts_do_not_include_held_out_events(held_out: int) -> None:
    expected = np.zeros(50, dtype=np.int64)
    for user in range(40):
        for item in HISTORIES.items[HISTORIES.offsets[user] : HISTORIES.offsets[user + 1] - held_out]:
            expected[item] += 1
    assert np.array_equal(HISTORIES.training_item_counts(held_out), expected)
    if held_out == 1:
        assert np.array_equal(HISTORIES.item_counts, expected)


@pytest.mark.parametrize("distribution", ["uniform", "popularity"])
def test_negatives_depend_only_on_user_and_epoch(distribution: str) -> None:
    data = dataset(6, distribution=distribution, item_counts=HISTORIES.item_counts, seed=5)

    def drawn(users: list[int], epoch: int) -> dict[int, list[int]]:
        return dict(zip(users, rows(data[BatchIndices(users, epoch)], "negatives"), strict=True))

    together = drawn(list(range(40)), epoch=1)
    for part in ([7], [39, 0, 3], list(range(39, 9, -2))):
        assert drawn(part, epoch=1) == {user: together[user] for user in part}
    assert all(together[user] != other for user, other in drawn(list(range(40)), epoch=2).items())
    assert len({tuple(own) for own in together.values()}) == 40
    reseeded = dataset(6, distribution=distribution, item_counts=HISTORIES.item_counts, seed=6)
    assert rows(reseeded[BatchIndices([0], 1)], "negatives") != [together[0]]


def test_the_first_negatives_do_not_depend_on_their_number() -> None:
    users = np.arange(10)
    few, many = NegativeSampler(50, 3), NegativeSampler(50, 8)
    assert np.array_equal(few.draw(users, 2), many.draw(users, 2)[:, :3])


def test_long_histories_have_several_sets_of_negatives() -> None:
    """One set for every 32 positions, at most ``sets``. The first set is that of a sampler with one set."""
    sampler = NegativeSampler(50, 3, sets=4)
    lengths = np.array([1, 2, 33, 34, 65, 66, 500])
    assert sampler.counts(lengths).tolist() == [3, 3, 3, 6, 6, 9, 12]
    users = np.arange(7)
    drawn = np.split(sampler.draw(users, 1, sampler.counts(lengths)), np.cumsum(sampler.counts(lengths))[:-1])
    first = NegativeSampler(50, 3).draw(users, 1)
    assert all(np.array_equal(own[:3], alone) for own, alone in zip(drawn, first, strict=True))
    assert not np.array_equal(drawn[-1][:3], drawn[-1][3:6])
    long = Synthetic(users=20, items=50, clusters=5, mean_length=60, min_length=4).generate()
    data = HistoryDataset(long, 100, sampler)
    batch = data[[3, 7, 11, 19]]
    batch.validate()
    assert batch.negatives_per_position == 3
    counts = batch.features["negatives"].lengths()
    assert counts.tolist() == sampler.counts(batch.lengths.numpy()).tolist()
    assert len(counts.unique()) > 1
    assert batch.candidates.tolist() == data.candidates[[3, 7, 11, 19]].tolist()
    assert rows(data[[11]], "negatives") == [rows(batch, "negatives")[2]]
    batch.negatives_per_position = 2
    with pytest.raises(InputError, match="each sample needs whole sets of negatives_per_position=2"):
        batch.validate()


@pytest.mark.parametrize("distribution", ["uniform", "popularity"])
def test_distribution_of_negatives(distribution: str) -> None:
    counts = np.array([0, 1, 2, 3, 0, 4])
    sampler = NegativeSampler(6, 100, distribution, counts)  # type: ignore[arg-type]
    share = np.bincount(sampler.draw(np.arange(5000), 0).reshape(-1), minlength=6) / 500_000
    expected = counts / counts.sum() if distribution == "popularity" else np.full(6, 1 / 6)
    assert np.abs(share - expected).max() < 0.003
    assert (share[expected == 0] == 0).all()


def test_random_bits_look_random() -> None:
    bits = random_bits(0, 0, np.arange(1000), 32)
    assert len(np.unique(bits)) == bits.size
    ones = (bits[..., None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(ones.mean(axis=(0, 1)) - 0.5).max() < 0.01
    signs = ones.reshape(-1, 64).astype(np.float64) - 0.5
    correlation = np.corrcoef(signs[:-1].T, signs[1:].T)
    assert np.abs(correlation - np.eye(128)).max() < 0.04  # neither between bits nor between neighbours
    for seed, epoch in ((1, 0), (0, 1), (-1, 0)):
        assert not np.isin(random_bits(seed, epoch, np.arange(2000), 64), bits).any()


def test_a_batch_moves_and_pickles() -> None:
    batch = dataset()[[1, 2, 3]]
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.features.values(), batch.features.values())
    assert moved.num_samples == 3
    assert moved.negatives_per_position == pickle.loads(pickle.dumps(batch)).negatives_per_position == 4


def test_bad_requests() -> None:
    with pytest.raises(IndexError, match="there are 40"):
        dataset()[[40]]
    with pytest.raises(IndexError, match="there are 40"):
        dataset()[[-1]]
    with pytest.raises(ConfigurationError, match="max_history"):
        dataset(max_history=0)
    with pytest.raises(ConfigurationError, match="num_negatives"):
        NegativeSampler(5, -1)
    with pytest.raises(ConfigurationError, match="negative_sets: must be at least 1"):
        NegativeSampler(5, 1, sets=0)
    with pytest.raises(ConfigurationError, match="'often' is unknown"):
        NegativeSampler(5, 1, "often")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="'popularity' needs"):
        NegativeSampler(5, 1, "popularity")
    lonely = Histories(np.array([0, 0]), np.array([0, 1]), np.array([0, 2]), np.array([0]), np.array([0]))
    with pytest.raises(InputError, match="a user has 2 events"):
        HistoryDataset(lonely, 5, None)
