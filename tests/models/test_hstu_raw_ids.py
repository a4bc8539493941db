"""HSTU on raw ids, with a zero-collision item table: it learns as on dense ids, and both exchanges give the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor

import lightning_freescale as fs
from lightning_freescale.data import Histories
from lightning_freescale.models import HSTU
from tests import toy
from tests.ranks import run_ranks

ITEMS = 60


class RawHSTU(HSTU):
    """An HSTU whose item table has zero-collision ids, as a user writes it."""

    def __init__(self, rows: int, **options: Any) -> None:
        super().__init__(rows, **options)
        zero_collision = fs.ZeroCollision(buckets=4, insert=["history"], std=0.02)
        self.embedding = fs.zero_collision(self.embedding, {"item": zero_collision})


def cycles() -> Histories:
    """Each user walks through the catalogue, so the last item determines the next one. Item ids are strings."""
    lengths = np.full(64, 12)
    offsets = np.concatenate([[0], lengths.cumsum()])
    items = (np.repeat(np.arange(64) * 7, 12) + np.tile(np.arange(12), 64)) % ITEMS
    names = np.array(sorted(f"item {number}" for number in range(ITEMS)))
    return Histories(items, np.arange(len(items)), offsets, names, np.arange(64))


def fit(rank: int, ids: str, prioritize: bool, corrected: bool) -> tuple[dict[str, float], list[Tensor]]:
    pl.seed_everything(0, verbose=False)
    data = fs.SeqRecDataModule(cycles(), batch_size=8, max_history=12, num_negatives=16, ids=ids)  # type: ignore[arg-type]
    options: dict[str, Any] = {"embedding_dim": 16, "num_layers": 1, "max_history": 16, "lr": 1e-2}
    model: HSTU = RawHSTU(400, **options) if ids == "raw" else HSTU(ITEMS, **options)
    if corrected:
        model.correct_sampling(torch.from_numpy(data.item_counts))
    strategy = fs.FreeScaleStrategy(prioritize=prioritize, embedding_optimizer={"lr": 0.1})
    trainer = toy.trainer(
        strategy, 2, max_epochs=6, check_val_every_n_epoch=3, limit_val_batches=1.0, num_sanity_val_steps=1
    )
    trainer.fit(model, datamodule=data)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    predicted = trainer.predict(model, datamodule=data)
    assert predicted is not None
    names = cycles().item_ids
    for batch in predicted:
        for user, items in zip(batch.users, batch.items, strict=True):  # type: ignore[union-attr]
            assert names[(7 * user + 12) % ITEMS] in items[:10]
    shards = [
        part.tensor.clone()
        for value in model.state_dict().values()
        if hasattr(value, "local_shards")
        for part in value.local_shards()
    ]
    return logged, shards


CASES = [("raw", True, False), ("raw", False, False), ("raw", True, True), ("dense", True, True)]


def fit_all(rank: int) -> list[Any]:
    return [fit(rank, *case) for case in CASES]


@pytest.mark.slow
def test_hstu_learns_on_raw_ids() -> None:
    for results in run_ranks(fit_all):
        prioritized, synchronous, corrected, dense = results
        assert prioritized[0] == synchronous[0]
        assert all(torch.equal(a, b) for a, b in zip(prioritized[1], synchronous[1], strict=True))
        assert corrected[0] != prioritized[0]
        assert all(result[0]["val/hr@10"] > 0.9 for result in (prioritized, corrected, dense))


def test_the_catalogue_is_ranked() -> None:
    """The model scores the items of the catalogue, in any order, and the counts are in its order."""
    model = RawHSTU(400, embedding_dim=16, num_layers=1)
    ids = torch.tensor([2**60, 5, 77])
    model.set_catalogue(ids)
    assert model.item_numbers(ids).tolist() == [0, 1, 2]
    assert model.known_item_numbers(ids).tolist() == [0, 1, 2]
    assert model.known_item_numbers(ids.max() + 1 + ids).tolist() == [-1, -1, -1]
    model.eval()
    with torch.no_grad():
        model._look_up_catalogue()
    assert model._catalogue is not None
    assert model._catalogue[0].tolist() == sorted(ids.tolist())
    assert HSTU(10, embedding_dim=16).item_numbers(ids) is ids


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "not an array of shape"),
        ([[1]], "not an array of shape"),
        ([3, -1], "id -1 is negative"),
        ([3, 3], "1 of the 2 ids are repeated"),
    ],
    ids=str,
)
def test_bad_catalogues_are_named(ids: Any, message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        HSTU(10, embedding_dim=16).set_catalogue(ids)


def test_a_model_that_does_not_know_its_items_says_so(tmp_path: Path) -> None:
    """With raw ids and without a catalogue it would rank items that nobody has seen."""
    data = fs.SeqRecDataModule(cycles(), batch_size=8, max_history=12, num_negatives=4, ids="raw")
    model = RawHSTU(400, embedding_dim=16, num_layers=1)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path, enable_progress_bar=False
    )
    with pytest.raises(fs.InputError, match=r"catalogue: a batch has the item \d+, but .* the items are 0 to 399"):
        trainer.predict(model, data.predict_dataloader())
    trainer.predict(model, datamodule=data)
    assert model.catalogue_size == ITEMS
    # A data module with other items replaces the catalogue, and one that the user has set stays.
    fewer = replace(cycles(), items=cycles().items % 7, item_ids=cycles().item_ids[:7])
    other = fs.SeqRecDataModule(fewer, batch_size=8, max_history=12, num_negatives=4, ids="raw")
    trainer.predict(model, datamodule=other)
    assert model.catalogue_size == 7
    model.set_catalogue(data.catalogue)
    with pytest.raises(fs.InputError, match=rf"the model ranks {ITEMS} items, but the data module has names for 7"):
        trainer.predict(model, datamodule=other)
    assert model.catalogue_size == ITEMS
