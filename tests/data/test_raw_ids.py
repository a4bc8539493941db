"""``ids="raw"``: batches hold the ids of the file, and are otherwise those of ``ids="dense"``."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import lightning_freescale as fs
from lightning_freescale.data import Histories
from lightning_freescale.data import raw_ids as module
from lightning_freescale.data.raw_ids import raw_item_ids

NAMES = np.array(sorted(f"B{number:04d}" for number in range(40)))


def histories(item_ids: Any = NAMES) -> Histories:
    chance = np.random.default_rng(3)
    lengths = chance.integers(3, 9, 30)
    offsets = np.concatenate([[0], lengths.cumsum()])
    items = chance.integers(0, len(item_ids), offsets[-1])
    return Histories(items, np.arange(offsets[-1]), offsets, item_ids, np.arange(30))


def batches(data: Any, **options: Any) -> list[Any]:
    loaders = fs.SeqRecDataModule(data, batch_size=8, max_history=6, num_negatives=4, **options)
    return [*loaders.train_dataloader(), *loaders.val_dataloader()]


@pytest.mark.parametrize("item_ids", [NAMES, np.arange(40) * 2**57], ids=["strings", "integers"])
@pytest.mark.parametrize("negatives", ["uniform", "popularity"])
def test_batches_hold_raw_ids(item_ids: Any, negatives: str) -> None:
    data = histories(item_ids)
    catalogue = torch.from_numpy(fs.SeqRecDataModule(data, batch_size=8, max_history=6, ids="raw").catalogue)
    expected, got = (batches(data, ids=ids, negatives=negatives) for ids in ("dense", "raw"))
    assert len(expected) == len(got) > 4
    for dense, raw in zip(expected, got, strict=True):
        assert torch.equal(catalogue[dense.features.values()], raw.features.values())
        assert torch.equal(dense.features.lengths(), raw.features.lengths())
        assert (dense.targets is None) == (raw.targets is None)
        if dense.targets is not None:
            assert torch.equal(catalogue[dense.targets], raw.targets)
    assert len(catalogue.unique()) == len(catalogue) == 40
    assert (catalogue >= 0).all()


def test_a_string_has_the_same_id_in_every_file() -> None:
    digest = hashlib.blake2b(b"B0007", digest_size=8).digest()
    assert raw_item_ids(NAMES)[7] == raw_item_ids(NAMES[7:8])[0] == int.from_bytes(digest, "little") >> 1


def test_equal_hashes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneByte:
        def __init__(self, value: bytes, digest_size: int):
            self.value = value

        def digest(self) -> bytes:
            return bytes(7) + self.value[-1:]

    monkeypatch.setattr(module.hashlib, "blake2b", OneByte)
    with pytest.raises(fs.InputError, match="have the same 63-bit hash"):
        raw_item_ids(NAMES)


def test_options_that_do_not_fit() -> None:
    with pytest.raises(fs.ConfigurationError, match="ids: 'hashed' is unknown; choose 'dense' or 'raw'"):
        batches(histories(), ids="hashed")
    with pytest.raises(fs.ConfigurationError, match="num_items: 9 does not fit ids='raw'"):
        batches("events.parquet", ids="raw", streaming=True, num_items=9)


def write_rows(path: Path, items: list[list[Any]]) -> Path:
    """A Parquet file with one row per user."""
    times = [list(range(len(row))) for row in items]
    pq.write_table(pa.table({"user": list(range(len(items))), "item": items, "time": times}), path)
    return path


@pytest.mark.parametrize("negatives", ["uniform", "popularity"])
def test_a_stream_of_raw_ids(tmp_path: Path, negatives: str) -> None:
    """The batches are those of a stream of row numbers, with the id of each item in its place."""
    chance = np.random.default_rng(5)
    ids = np.sort(chance.integers(0, 2**63 - 1, 40))
    rows = [chance.integers(0, 40, chance.integers(3, 9)).tolist() for _ in range(30)]
    rows[0] += list(range(40))  # every item occurs
    dense = write_rows(tmp_path / "dense.parquet", rows)
    raw = write_rows(tmp_path / "raw.parquet", [ids[row].tolist() for row in rows])
    options: dict[str, Any] = {"streaming": True, "negatives": negatives, "cache_dir": tmp_path, "shuffle": True}
    expected, got = batches(dense, **options), batches(raw, ids="raw", **options)
    assert len(expected) == len(got) > 4
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(torch.from_numpy(ids)[one.features.values()], other.features.values())
        if one.targets is not None:
            assert torch.equal(torch.from_numpy(ids)[one.targets], other.targets)
    module = fs.SeqRecDataModule(raw, batch_size=8, max_history=6, ids="raw", **options)
    assert module.catalogue.tolist() == module.item_ids.tolist() == ids.tolist()
    assert module.num_items == 40


def test_ids_of_a_stream_that_do_not_fit(tmp_path: Path) -> None:
    negative = write_rows(tmp_path / "negative.parquet", [[2**40, 5, 6], [7, -3, 8]])
    with pytest.raises(fs.InputError, match="item is -3 at row 1; ids must not be negative"):
        batches(negative, ids="raw", streaming=True, cache_dir=tmp_path)
    strings = write_rows(tmp_path / "strings.parquet", [["a", "b", "c"]])
    with pytest.raises(fs.InputError, match=r"string; streaming needs integers from 0 to 2\^63 - 1"):
        batches(strings, ids="raw", streaming=True, cache_dir=tmp_path)
