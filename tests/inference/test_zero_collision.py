"""Commands on a model with zero-collision ids: they recommend what ``trainer.predict`` recommends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pyarrow.csv
import pytest
import torch

import lightning_freescale as fs
from lightning_freescale.cli.main import main
from lightning_freescale.data.raw_ids import raw_item_ids
from lightning_freescale.models import HSTU
from tests import toy
from tests.ranks import run_ranks

USERS, EVENTS, ITEMS, K = 24, 10, 60, 5
NAMES = ("users", "items", "scores")
IDENTITIES = "embedding._managed_collision_collection._managed_collision_modules.item._hash_zch_identities"


class RawHSTU(HSTU):
    def __init__(self, rows: int, **options: Any) -> None:
        super().__init__(rows, **options)
        ids = fs.ZeroCollision(buckets=4, insert=["history"], std=0.02)
        self.embedding = fs.zero_collision(self.embedding, {"item": ids})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the events of a catalogue of strings, a checkpoint, and the recommendations of the trained model."""
    folder = tmp_path_factory.mktemp("raw")
    chance = np.random.default_rng(0)
    walks = [[(4 * user + time) % ITEMS for time in range(4)] for user in range(USERS)]  # Every item is in training.
    walks = [[*walk, *chance.integers(ITEMS, size=EVENTS - 4)] for walk in walks]
    lines = [f"u{user},film {item},{time}" for user, walk in enumerate(walks) for time, item in enumerate(walk)]
    (folder / "events.csv").write_text("\n".join(["user,item,time", *lines]) + "\n")
    run_ranks(train, 1, (folder,))  # In a process of its own: no rank can be forked from a process that has used gloo.
    return folder


def train(rank: int, folder: Path) -> None:
    pl.seed_everything(0, verbose=False)
    data = fs.SeqRecDataModule(
        str(folder / "events.csv"), batch_size=6, max_history=12, num_negatives=4, ids="raw", cache_dir=folder / "cache"
    )
    model = RawHSTU(256, embedding_dim=16, num_layers=1, max_history=16, filter_seen=True, top_k=K)
    trainer = toy.trainer("freescale", 1, max_epochs=2)
    trainer.fit(model, datamodule=data)
    trainer.save_checkpoint(folder / "raw.ckpt")
    predicted: Any = trainer.predict(model, datamodule=data)
    users, items, scores = (np.concatenate([getattr(part, name) for part in predicted]) for name in NAMES)
    np.savez(folder / "predicted.npz", users=users, items=items, scores=scores)


def recommended(folder: Path, model: str) -> dict[str, list[tuple[str, float]]]:
    """By user, the items and scores that the command writes."""
    output = folder / "recommended.csv"
    assert (
        main(["recommend", str(folder / model), str(folder / "events.csv"), "--k", str(K), "--output", str(output)])
        == 0
    )
    found: dict[str, list[tuple[str, float]]] = {}
    for row in pyarrow.csv.read_csv(output).to_pylist():
        found.setdefault(row["user"], []).append((row["item"], row["score"]))
    return found


@pytest.mark.parametrize("exported", [False, True])
def test_commands_recommend_what_the_trained_model_does(files: Path, exported: bool) -> None:
    model = "raw.ckpt"
    if exported:
        model = "model.pt"
        assert main(["export", "--inference", str(files / "raw.ckpt"), str(files / model)]) == 0
    found, expected = recommended(files, model), np.load(files / "predicted.npz")
    assert found.keys() == set(expected["users"].tolist())
    for user, items, scores in zip(*(expected[name] for name in NAMES), strict=True):
        assert [item for item, _ in found[user]] == items.tolist()
        assert [score for _, score in found[user]] == pytest.approx(scores.tolist(), abs=1e-5)


def test_items_that_own_no_row_are_left_out(files: Path) -> None:
    checkpoint = torch.load(files / "raw.ckpt", weights_only=False)
    best = next(iter(recommended(files, "raw.ckpt").values()))[0][0]
    owners = checkpoint["state_dict"][IDENTITIES]
    owners[owners == int(raw_item_ids(np.array([best]))[0])] = -1
    torch.save(checkpoint, files / "evicted.ckpt")
    assert best not in {item for rows in recommended(files, "evicted.ckpt").values() for item, _ in rows}


def test_evaluate_reads_raw_ids(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(files / "raw.ckpt"), str(files / "events.csv")]) == 0
    assert "mrr" in capsys.readouterr().out
