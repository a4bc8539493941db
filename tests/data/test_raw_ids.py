"""``ids="raw"``: batches hold the ids of the file, and are otherwise those of ``ids="dense"``."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
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
    with pytest.raises(fs.ConfigurationError, match="ids: 'raw' needs streaming=False"):
        batches("events.parquet", ids="raw", streaming=True)
