"""``freescale recommend``, ``freescale evaluate`` and ``trainer.predict``: from a checkpoint and a file to ids of items."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch

import lightning_freescale as fs
from lightning_freescale.cli.main import main
from lightning_freescale.models import HSTU
from tests import toy
from tests.ranks import run_ranks

USERS, ITEMS, K = 21, 30, 4


def write_events(path: Path, users: int = USERS, items: int = ITEMS, prefix: str = "") -> Path:
    """Each user goes around a circle of items, from a start of its own."""
    rows = ["user_id,item_id,timestamp"]
    for user in range(users):
        for at in range(4 + user % 5):
            rows.append(f"user-{user},{prefix}item-{(user * 7 + at) % items},{1000 * user + 60 * at}")
    path.write_text("\n".join(rows) + "\n")
    return path


def data_of(folder: str) -> fs.SeqRecDataModule:
    return fs.SeqRecDataModule(
        f"{folder}/events.csv", batch_size=4, max_history=6, num_negatives=8, cache_dir=f"{folder}/cache"
    )


def train(rank: int, folder: str) -> dict[str, Any]:
    """Train on two ranks, save both formats, and predict over the sharded tables."""
    pl.seed_everything(1, verbose=False)
    data = data_of(folder)
    model = HSTU(data.num_items, embedding_dim=8, num_layers=1, max_history=6, filter_seen=True, top_k=K)
    for kind in ("file", "sharded"):
        trainer = toy.trainer(fs.FreeScaleStrategy(checkpoint=kind), 2, max_epochs=1, limit_val_batches=0)
        if kind == "file":
            trainer.fit(model, datamodule=data)
            trainer.save_checkpoint(f"{folder}/file.ckpt")
        else:
            trainer.fit(model, datamodule=data, ckpt_path=f"{folder}/file.ckpt")
            trainer.save_checkpoint(f"{folder}/sharded.ckpt")
    predictions = trainer.predict(model, datamodule=data)
    tested = trainer.test(model, datamodule=data, verbose=False)[0]
    assert predictions is not None
    return {"predictions": predictions, "tested": tested}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("recommend")
    write_events(folder / "events.csv")
    return folder, run_ranks(train, args=(str(folder),))


def brute_force(folder: Path) -> dict[str, dict[str, float]]:
    """By user, the scores of all items that are not in the history, from the exported model on one process."""
    data = data_of(str(folder))
    model = HSTU.load_from_checkpoint(folder / "sharded.ckpt").eval()
    rows = torch.nn.functional.normalize(model.state_dict()["embedding.embeddings.item.weight"], dim=1)
    found = {}
    with torch.no_grad():
        for batch in data.predict_dataloader():
            outputs = model(batch)[batch.lengths.cumsum(0) - 1]
            for user, history, scores in zip(batch.users, batch.history.to_dense(), outputs @ rows.T, strict=True):
                scores[history] = -torch.inf
                found[str(data.user_ids[user])] = dict(zip(data.item_ids.tolist(), scores.tolist(), strict=True))
    return found


def check(found: dict[str, list[tuple[str, float]]], folder: Path) -> None:
    """Every list has the best items of its user. Scores may differ in the last bits, so only they are compared."""
    expected = brute_force(folder)
    assert found.keys() == expected.keys()
    for user, ranked in found.items():
        best = sorted(expected[user].values(), reverse=True)[:K]
        assert [score for _, score in ranked] == pytest.approx(best, abs=1e-5)
        assert [expected[user][item] for item, _ in ranked] == pytest.approx(best, abs=1e-5)
        assert len({item for item, _ in ranked}) == K


def test_predict_over_sharded_tables_equals_brute_force(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    found: dict[str, list[tuple[str, float]]] = {}
    for result in trained[1]:
        for part in result["predictions"]:
            for user, items, scores in zip(part.users, part.items, part.scores, strict=True):
                found[str(user)] = list(zip(items.tolist(), scores.tolist(), strict=True))
    check(found, trained[0])


@pytest.mark.parametrize("kind", ["file", "sharded", "exported"])
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_the_command_writes_the_best_items(
    trained: tuple[Path, list[dict[str, Any]]], tmp_path: Path, kind: str, suffix: str
) -> None:
    folder, _ = trained
    checkpoint, output = folder / f"{kind}.ckpt", tmp_path / f"out.{suffix}"
    if kind == "exported":
        checkpoint = tmp_path / "exported.ckpt"
        assert main(["export", str(folder / "sharded.ckpt"), str(checkpoint), "--lightning"]) == 0
    command = ["recommend", str(checkpoint), str(folder / "events.csv"), "--k", str(K), "--output", str(output)]
    assert main([*command, "--cache-dir", str(tmp_path)]) == 0
    table = pyarrow.parquet.read_table(output) if suffix == "parquet" else pyarrow.csv.read_csv(output)
    assert table.column_names == ["user", "rank", "item", "score"]
    rows = table.to_pylist()
    assert [row["rank"] for row in rows] == list(range(1, K + 1)) * USERS
    found: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        found.setdefault(row["user"], []).append((row["item"], row["score"]))
    check(found, folder)


def test_users_and_items_of_another_file(trained: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """A user with one event is served. Items that the model does not know are left out; a file with no others is refused."""
    folder, _ = trained
    other = tmp_path / "other.csv"
    other.write_text("user_id,item_id,timestamp\nnew,item-3,1\nnew,unknown,2\nlost,unknown,3\n")
    output = tmp_path / "out.csv"
    command = [
        "recommend",
        str(folder / "sharded.ckpt"),
        str(other),
        "--output",
        str(output),
        "--cache-dir",
        str(tmp_path),
    ]
    assert main(command) == 0
    rows = pyarrow.csv.read_csv(output).to_pylist()
    assert {row["user"] for row in rows} == {"new"}
    assert len(rows) == 10
    assert "item-3" not in {row["item"] for row in rows}
    assert main([*command, "--keep-seen"]) == 0
    strange = write_events(tmp_path / "strange.csv", prefix="other-")
    assert main(["recommend", str(folder / "sharded.ckpt"), str(strange), "--cache-dir", str(tmp_path)]) == 1


def test_evaluate_equals_the_test_of_the_trainer(
    trained: tuple[Path, list[dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, results = trained
    command = ["evaluate", str(folder / "sharded.ckpt"), str(folder / "events.csv"), "--cache-dir", str(tmp_path)]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["users"], found["items"]) == (USERS, ITEMS)
    metrics = found["metrics"]
    for name in ("hr@10", "ndcg@10", "mrr"):
        assert metrics[name]["model"] == pytest.approx(results[0]["tested"][f"test/{name}"], rel=1e-6)
    assert 0 < metrics["coverage@10"]["popularity"] <= metrics["coverage@10"]["model"] <= 1
    assert metrics["hr@50"] == {"model": 1.0, "popularity": 1.0}  # there are only 30 items
    assert main(command) == 0
    assert "coverage@10" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "31"], "--k: must be from 1 to 30"),
        (["--output", "out.txt"], "output: out.txt must end with .parquet or .csv"),
        (["--column", "shop=x"], "--column: 'shop=x' is not ROLE=NAME"),
    ],
)
def test_bad_arguments_are_named(
    trained: tuple[Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    folder, _ = trained
    assert main(["recommend", str(folder / "sharded.ckpt"), str(folder / "events.csv"), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_checkpoints_that_cannot_recommend_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = write_events(tmp_path / "events.csv")
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=0, logger=False, enable_checkpointing=False)
    model = HSTU(5, embedding_dim=8, num_layers=1)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "no_data.ckpt")
    assert main(["recommend", str(tmp_path / "no_data.ckpt"), str(events)]) == 1
    assert "does not hold the ids of the items" in capsys.readouterr().err
    torch.save({"state_dict": {}, "epoch": 0, "global_step": 0}, tmp_path / "other.ckpt")
    assert main(["recommend", str(tmp_path / "other.ckpt"), str(events)]) == 1
    assert "other.ckpt" in capsys.readouterr().err
