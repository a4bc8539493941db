"""Streaming: every row once over all ranks and workers, equally many batches on each rank, the same samples as map-style."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lightning_freescale.data.stream_index as stream_index
from lightning_freescale.data import Histories, NegativeSampler, SeqBatch, SeqRecDataModule, StreamDataset, Synthetic
from lightning_freescale.data.sources import ParquetSource, open_source
from lightning_freescale.data.stream import StreamLoader
from lightning_freescale.data.stream_index import StreamIndex
from lightning_freescale.runtime.errors import ConfigurationError, InputError

# Start times differ between users, so that the times of a sample identify its user.
HISTORIES = Synthetic(users=53, items=97, clusters=5, mean_length=9, feature_sizes={"action": 3}).generate()


def write(
    path: Path, histories: Histories, row_group_size: int = 10, users: slice = slice(None), **changes: Any
) -> Path:
    def lists(values: np.ndarray) -> list[list[int]]:
        return [part.tolist() for part in np.split(values, histories.offsets[1:-1])][users]

    columns = {
        "items": lists(histories.items),
        "times": lists(histories.timestamps),
        "action": lists(histories.features["action"]),
    }
    pq.write_table(pa.table(columns | changes), path, row_group_size=row_group_size)
    return path


def index_of(path: Path, cache: Path, min_events: int = 3, count_items: bool = False, **options: Any) -> StreamIndex:
    source = open_source(path, **{"feature_columns": ("action",), **options})
    assert isinstance(source, ParquetSource)
    return StreamIndex.of(source, min_events, count_items, cache)


@pytest.fixture
def index(tmp_path: Path) -> StreamIndex:
    return index_of(write(tmp_path / "users.parquet", HISTORIES), tmp_path / "cache")


def samples(batches: list[SeqBatch]) -> list[tuple]:
    """Return each sample as a tuple: times, which identify the user, items, features, negatives, target."""
    result = []
    for batch in batches:
        batch.validate()
        times = batch.timestamps.split(batch.lengths.tolist())
        columns = [batch.features[key].to_dense() for key in batch.features.keys()]  # noqa: SIM118
        targets = [None] * batch.num_samples if batch.targets is None else batch.targets.tolist()
        for row, target in enumerate(targets):
            result.append((times[row].tolist(), *(column[row].tolist() for column in columns), target))
    return [tuple(map(str, sample)) for sample in result]


def expected(max_history: int, negatives: NegativeSampler | None, epoch: int = 0, skip: int = 0) -> list[tuple]:
    """Return all samples in file order, computed with plain slices."""
    result = []
    for user in range(HISTORIES.num_users):
        span = slice(HISTORIES.offsets[user], HISTORIES.offsets[user + 1] - skip)
        cut = [column[span].tolist()[:-1][-max_history:] for column in (HISTORIES.timestamps, HISTORIES.items)]
        drawn = [] if negatives is None else negatives.draw(np.array([user]), epoch)[0].tolist()
        action = HISTORIES.features["action"][span].tolist()[:-1][-max_history:]
        target = HISTORIES.items[span][-1].item() if negatives is None else None
        result.append(tuple(map(str, (*cut, drawn, action, target))))
    return result


NEGATIVES = NegativeSampler(97, 3)


def loaders(index: StreamIndex, world: int, workers: int = 0, **options: Any) -> list[StreamLoader]:
    options = {"negatives": NEGATIVES, "batch_size": 4, "max_history": 6, **options}
    return [
        StreamLoader(StreamDataset(index, num_replicas=world, rank=rank, **options), num_workers=workers)
        for rank in range(world)
    ]


@pytest.mark.parametrize("chunk", [1 << 22, 25])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_sample_once(
    tmp_path: Path, world: int, shuffle: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_index, "CHUNK_EVENTS", chunk)  # with 25, a row group has several slices
    index = index_of(write(tmp_path / "users.parquet", HISTORIES), tmp_path / "cache")
    assert len(index.slices) == 6 if chunk > 25 else len(index.slices) > 15
    batches = [list(loader) for loader in loaders(index, world, shuffle=shuffle, seed=1)]
    per_rank = math.ceil(53 / world)
    assert {len(own) for own in batches} == {math.ceil(per_rank / 4)}
    seen = [sample for own in batches for sample in samples(own)]
    assert sorted(set(seen)) == sorted(expected(6, NEGATIVES))
    assert sum(len(set(samples(own))) for own in batches) == 53  # a rank repeats only its own samples
    assert len(seen) == per_rank * world  # at most one repeat per rank
    if not shuffle and world == 1:
        assert seen == expected(6, NEGATIVES)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_workers_share_a_rank(index: StreamIndex, world: int, workers: int) -> None:
    alone = [list(loader) for loader in loaders(index, world, shuffle=True)]
    shared = [list(loader) for loader in loaders(index, world, workers, shuffle=True)]
    for own, split in zip(alone, shared, strict=True):
        assert len(own) == len(split)
        assert sorted(samples(own)) == sorted(samples(split))
        assert [batch.num_samples for batch in own].count(4) == [batch.num_samples for batch in split].count(4)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("skip", [0, 1, 3, 6])
def test_resume_yields_the_remaining_batches_once(index: StreamIndex, workers: int, skip: int) -> None:
    loader = loaders(index, 2, workers, shuffle=True)[1]
    whole = [samples([batch]) for batch in loader]
    loader.dataset.resume(skip)
    assert [samples([batch]) for batch in loader] == whole[skip:]
    assert [samples([batch]) for batch in loader] == whole


def _ranks(index: StreamIndex, world: int, batch_size: int, **options: Any) -> list[StreamDataset]:
    return [
        StreamDataset(index, batch_size, 20, NEGATIVES, num_replicas=world, rank=rank, shuffle=True, **options)
        for rank in range(world)
    ]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "shapes",  # ranks, batch size, workers
    [
        [(2, 3, 0), (3, 4, 0)],
        [(2, 3, 2), (3, 4, 2)],
        [(4, 2, 0), (1, 5, 2), (2, 3, 0)],
        [(1, 4, 2), (4, 2, 0), (4, 2, 0), (4, 2, 2)],
        [(3, 2, 1), (3, 5, 0)],
    ],
)
def test_other_numbers_of_ranks_continue_without_repeating_or_losing_a_sample(
    index: StreamIndex, shapes: list[tuple[int, int, int]], drop_last: bool
) -> None:
    """Every run except the last trains two batches per rank."""
    seen: list[tuple] = []
    position, done = None, 0
    for number, (world, batch_size, workers) in enumerate(shapes):
        ranks = _ranks(index, world, batch_size, drop_last=drop_last)
        loaders = [StreamLoader(dataset, num_workers=workers) for dataset in ranks]
        left = len(HISTORIES.lengths) - len(set(seen))
        for dataset in ranks:
            if position is not None:
                done = dataset.resume(done, position)
        batches = [list(loader) for loader in loaders]
        assert {len(own) for own in batches} == {len(ranks[0]) - done}
        if number + 1 < len(shapes):
            batches, done = [own[:2] for own in batches], done + 2
            position = ranks[0].position(done)
            assert all(dataset.position(done) == position for dataset in ranks)
            assert len(samples([batch for own in batches for batch in own])) == 2 * world * batch_size
        else:
            size = world * batch_size
            rest = left // size * size if drop_last else -(-left // world) * world
            assert sum(batch.num_samples for own in batches for batch in own) == rest
        new = [sample for own in batches for sample in samples(own)]
        assert not set(new) & set(seen)
        seen += new
    assert len(set(seen)) == len(HISTORIES.lengths) - (left - rest if drop_last else 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_persistent_workers_get_the_next_epoch(index: StreamIndex, workers: int) -> None:
    dataset = StreamDataset(index, 4, 6, NEGATIVES, shuffle=True)
    loader = StreamLoader(dataset, num_workers=workers, persistent_workers=workers > 0)
    first, again = samples(list(loader)), samples(list(loader))
    assert first == again
    dataset.set_epoch(1)
    second = samples(list(loader))
    assert sorted(second) == sorted(expected(6, NEGATIVES, epoch=1))
    assert [sample[0] for sample in second] != [sample[0] for sample in first]  # another order


def test_drop_last(index: StreamIndex) -> None:
    batches = [list(loader) for loader in loaders(index, 3, drop_last=True)]
    assert [[batch.num_samples for batch in own] for own in batches] == [[4] * 4] * 3
    seen = [sample for own in batches for sample in samples(own)]
    assert len(set(seen)) == len(seen) == 48


def test_validation_has_targets(index: StreamIndex) -> None:
    (loader,) = loaders(index, 1, negatives=None)
    assert samples(list(loader)) == expected(6, None)


def test_several_files_and_unordered_times(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    backwards = Histories(
        items=HISTORIES.items.copy(),
        timestamps=HISTORIES.timestamps.copy(),
        offsets=HISTORIES.offsets,
        item_ids=HISTORIES.item_ids,
        user_ids=HISTORIES.user_ids,
        features={"action": HISTORIES.features["action"].copy()},
        feature_values=HISTORIES.feature_values,
    )
    distinct = 0
    for start, stop in zip(HISTORIES.offsets[:-1], HISTORIES.offsets[1:], strict=True):
        if len(set(HISTORIES.timestamps[start:stop])) == stop - start:  # ties would keep the reversed order
            distinct += 1
            for column in (backwards.items, backwards.timestamps, backwards.features["action"]):
                column[start:stop] = column[start:stop][::-1].copy()
    assert distinct > 40
    write(folder / "a.parquet", backwards, users=slice(0, 20))
    write(folder / "b.parquet", backwards, users=slice(20, None), row_group_size=7)
    index = index_of(folder, tmp_path / "cache")
    (loader,) = loaders(index, 1)
    assert samples(list(loader)) == expected(6, NEGATIVES)


def test_short_rows_are_left_out(tmp_path: Path) -> None:
    items = [[1, 2, 3], [], [4], [5, 6, 7, 8], [9, 9]]
    times = [list(range(len(own))) for own in items]
    pq.write_table(pa.table({"items": items, "times": times}), tmp_path / "d.parquet", row_group_size=2)
    index = index_of(tmp_path / "d.parquet", tmp_path / "cache", feature_columns=(), count_items=True)
    assert index.lengths.tolist() == [3, 0, 1, 4, 2]
    assert index.num_items == 10
    assert index.item_counts is not None
    assert index.item_counts.tolist() == [0, 1, 1, 0, 0, 1, 1, 1, 0, 0]
    (batch,) = StreamDataset(index, 4, 6, None)
    assert [row.tolist() for row in batch.history.to_dense()] == [[1, 2], [5, 6, 7]]


def test_item_counts_equal_those_of_the_histories(index: StreamIndex, tmp_path: Path) -> None:
    assert index.item_counts is None
    for held_out in (1, 2):
        counted = StreamIndex.of(index.source, 3, True, tmp_path / "cache", held_out=held_out)
        assert counted.item_counts is not None
        expected_counts = HISTORIES.training_item_counts(held_out)[: counted.num_items]
        assert counted.item_counts.tolist() == expected_counts.tolist()
        assert counted.feature_sizes == {"action": 3}


def test_same_data_through_the_data_module(tmp_path: Path) -> None:
    path = write(tmp_path / "users.parquet", HISTORIES)
    options: dict[str, Any] = {
        "batch_size": 8,
        "max_history": 6,
        "feature_columns": ("action",),
        "num_negatives": 3,
        "cache_dir": tmp_path / "cache",
        "columns": {"user": None, "item": "items", "time": "times"},
    }
    streamed = SeqRecDataModule(path, streaming=True, num_items=97, **options)
    assert (streamed.num_items, streamed.feature_sizes) == (97, {"action": 3})
    assert sorted(samples(list(streamed.train_dataloader()))) == sorted(expected(6, NEGATIVES, skip=1))
    assert samples(list(streamed.val_dataloader())) == expected(6, None, skip=1)
    assert samples(list(streamed.test_dataloader())) == expected(6, None)
    one = SeqRecDataModule(path, streaming=True, num_items=97, held_out=1, **options)
    assert sorted(samples(list(one.train_dataloader()))) == sorted(expected(6, NEGATIVES))
    assert samples(list(one.val_dataloader())) == expected(6, None)


# ---- bad input ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"items": [[0, 1, -2]]}, r"items is -2 at row 0"),
        ({"items": [[0, 1, 2**40]]}, r"items is 1099511627776 at row 0; streaming needs ids"),
        ({"items": [["a", "b", "c"]]}, r"column 'items' has type large_string; streaming needs ids"),
        ({"action": [[0.5, 0.5, 1.0]]}, r"column 'action' has type double; streaming needs ids"),
        ({"times": [[1, 2]]}, r"times has 2 elements at row 0, items has 3"),
        ({"items": [7]}, r"streaming needs one row per user"),
    ],
)
def test_bad_columns(tmp_path: Path, changes: dict, message: str) -> None:
    good = {"user": [1], "items": [[0, 1, 2]], "times": [[1, 2, 3]], "action": [[0, 1, 0]]}
    pq.write_table(pa.table(good | changes), tmp_path / "d.parquet")
    with pytest.raises(InputError, match=message):
        index_of(tmp_path / "d.parquet", tmp_path / "cache")


def test_bad_settings(tmp_path: Path, index: StreamIndex) -> None:
    with pytest.raises(InputError, match="53 samples for 60 ranks"):
        loaders(index, 60)
    with pytest.raises(InputError, match="do not fill one global batch"):
        loaders(index, 2, batch_size=30, drop_last=True)
    none = index_of(tmp_path / "users.parquet", tmp_path / "cache", min_events=1000)
    with pytest.raises(InputError, match="none of 53 rows has 1000 events"):
        loaders(none, 1)
    common: dict[str, Any] = {"batch_size": 2, "max_history": 6, "cache_dir": tmp_path / "cache"}
    with pytest.raises(InputError, match=r"num_items: 5, but .* holds item \d+"):
        _ = SeqRecDataModule(tmp_path / "users.parquet", streaming=True, num_items=5, **common).stream_index
    with pytest.raises(ConfigurationError, match="streaming: needs Parquet files, not 'synthetic'"):
        _ = SeqRecDataModule(streaming=True, **common).num_items
    with pytest.raises(ConfigurationError, match="num_items: needs streaming=True"):
        SeqRecDataModule(num_items=5, **common)
