"""The exported file and the ``Recommender``, compared with TorchRec's tables; also in a process that has no TorchRec."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

from lightning_freescale.cli.main import main
from lightning_freescale.inference import Recommender, model_file
from lightning_freescale.runtime.errors import CheckpointError, ConfigurationError, FreeScaleError, InputError
from tests.inference.trained import USERS, Trained, train

ROOT = Path(__file__).resolve().parents[2]
# Runs commands in a process in which TorchRec and FBGEMM cannot be imported.
WITHOUT_TORCHREC = """
import json, sys
sys.modules["torchrec"] = sys.modules["fbgemm_gpu"] = None
from lightning_freescale.cli.main import main
codes = [main(command) for command in json.loads(sys.argv[1])]
import lightning, lightning_freescale as fs
messages = []
for use in (lambda: fs.SeqRecDataModule, lambda: lightning.Trainer(strategy="freescale", accelerator="cpu")):
    try:
        use()
    except ImportError as error:
        messages.append(str(error))
loaded = [name for name in sys.modules if name.split(".")[0] in ("torchrec", "fbgemm_gpu") and sys.modules[name]]
print(json.dumps({"codes": codes, "messages": messages, "loaded": loaded}))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """A model, one with personal tokens, and one with experts."""
    options: dict[str, Any] = {"plain": {}, "tokens": {"tokens": True}, "experts": {"experts": True}}
    return {name: train(tmp_path_factory.mktemp(name), **chosen) for name, chosen in options.items()}


@pytest.fixture
def trained(models: dict[str, Trained]) -> Trained:
    return models["plain"]


def rows_of(path: Path) -> dict[str, list[tuple[Any, float]]]:
    found: dict[str, list[tuple[Any, float]]] = {}
    for row in pyarrow.parquet.read_table(path).to_pylist():
        found.setdefault(row["user"], []).append((row["item"], row["score"]))
    return found


def recommended(model: Path, trained: Trained, output: Path) -> list[str]:
    cache = str(output.parent / "cache")
    files = ["recommend", str(model), str(trained.events), "--output", str(output), "--cache-dir", cache]
    return [*files, "--k", "5", "--batch-size", "5"]


@pytest.mark.timeout(300)  # a process that imports everything anew takes long on a busy machine
def test_a_process_without_torchrec_recommends_the_same(models: dict[str, Trained], tmp_path: Path) -> None:
    """The same items with the same scores as TorchRec's tables in ``trainer.predict``, and as from the checkpoint."""
    exported = [recommended(m.exported, m, tmp_path / f"{name}.parquet") for name, m in models.items()]
    checkpoint = [recommended(m.checkpoint, m, tmp_path / f"{name}_.parquet") for name, m in models.items()]
    path = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    cannot_listen = ["serve", str(models["tokens"].exported), "--host", "256.1.1.1"]  # it ends when all is loaded
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCHREC, json.dumps([*exported, *checkpoint, cannot_listen])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *path]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["codes"] == [0, 0, 0, 1, 1, 1, 1]  # a checkpoint needs TorchRec, and the message says so
    assert report["loaded"] == []
    assert "trained.ckpt: it is not an exported model" in done.stderr
    assert "freescale export --inference" in done.stderr
    assert "cannot listen on 256.1.1.1:8000" in done.stderr
    assert len(report["messages"]) == 2
    assert all("pip install --no-deps torchrec" in message for message in report["messages"])
    assert [main(command) for command in checkpoint] == [0, 0, 0]
    for name, model in models.items():
        found = rows_of(tmp_path / f"{name}.parquet")
        assert found == rows_of(tmp_path / f"{name}_.parquet") == model.predicted
        assert len(found) == USERS
        assert len({item for ranked in found.values() for item, _ in ranked}) > 5  # the users have different lists


def test_other_weights_recommend_something_else(trained: Trained, tmp_path: Path) -> None:
    """Negative control of the comparison."""
    content = dict(model_file.read(trained.exported))
    weights = dict(content["weights"])
    weights["layers.0.f2.weight"] = weights["layers.0.f2.weight"] + 0.5
    changed = model_file.contents(content["hyper_parameters"], weights, content["catalogue"], content["reading"])
    assert changed["fingerprint"] != content["fingerprint"]
    model_file.write(tmp_path / "other.pt", changed)
    assert main(recommended(tmp_path / "other.pt", trained, tmp_path / "out.parquet")) == 0
    assert rows_of(tmp_path / "out.parquet") != trained.predicted


def test_the_file_holds_what_inference_needs(trained: Trained) -> None:
    recommender = Recommender.load(trained.exported)
    assert recommender.catalogue.item_ids[0] == "film-0é"
    assert recommender.reading["time_unit"] == "s"
    assert recommender.reading["times"] is True
    assert "top_k" not in model_file.read(trained.exported)["hyper_parameters"]
    with pytest.raises(ConfigurationError, match="k: must be from 1 to 40"):
        recommender.check_k(41)


# ---- files that are refused ----------------------------------------------------------------------------------------
def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.pop(name)


def lose_a_weight(content: dict[str, Any]) -> None:
    content["weights"] = {name: weight for name, weight in content["weights"].items() if name != "layers.1.f1.bias"}
    content["fingerprint"] = model_file.fingerprint_of(content)


def change_a_weight(content: dict[str, Any]) -> None:
    content["weights"] = {name: weight.clone() for name, weight in content["weights"].items()}
    content["weights"]["layers.1.f1.bias"][3] += 1


def lose_an_item(content: dict[str, Any]) -> None:
    content["catalogue"] = {**content["catalogue"], "item_ids": torch.arange(39)}
    content["fingerprint"] = model_file.fingerprint_of(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("format"), "it is not an exported model"),
        (without("weights"), "incomplete, because it has no entry 'weights'"),
        (without("catalogue"), "incomplete, because it has no entry 'catalogue'"),
        (without("reading"), "incomplete, because it has no entry 'reading'"),
        (without("hyper_parameters"), "incomplete, because it has no entry 'hyper_parameters'"),
        (without("fingerprint"), "damaged"),
        (lambda content: content.update(version=99), "version is 99, but this package reads version 1"),
        (lose_a_weight, "layers.1.f1.bias"),
        (change_a_weight, "damaged, because its content does not have the fingerprint"),
        (lose_an_item, "40 rows of items, but 39 ids in the catalogue"),
    ],
)
def test_incomplete_files_are_refused(
    trained: Trained, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    content = torch.load(trained.exported, weights_only=True)
    change(content)
    torch.save(content, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match=r"bad\.pt") as caught:
        Recommender.load(tmp_path / "bad.pt")
    assert message in str(caught.value)


def test_foreign_and_truncated_files_are_refused(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.pt").write_text("no model")
    whole = trained.exported.read_bytes()
    (tmp_path / "short.pt").write_bytes(whole[: len(whole) // 2])
    torch.save(object, tmp_path / "object.pt")  # a class, which must not be imported by reading a file
    for name in ("text.pt", "short.pt", "object.pt"):
        with pytest.raises(CheckpointError, match=rf"{name}: it cannot be read as an exported model"):
            Recommender.load(tmp_path / name)
        assert main(["recommend", str(tmp_path / name), str(trained.events)]) == 1
        assert name in capsys.readouterr().err
    with pytest.raises(FreeScaleError, match=r"nowhere\.pt: there is no such file"):
        Recommender.load(tmp_path / "nowhere.pt")


def test_raw_ids_without_their_table_are_refused(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = torch.load(trained.checkpoint, weights_only=True)
    checkpoint["SeqRecDataModule"]["reading"]["ids"] = "raw"
    torch.save(checkpoint, tmp_path / "raw.ckpt")
    assert main(["export", "--inference", str(tmp_path / "raw.ckpt"), str(tmp_path / "model.pt")]) == 1
    assert "raw.ckpt: its ids are raw, and this command reads models with one table" in capsys.readouterr().err
    assert not (tmp_path / "model.pt").exists()


# ---- ids -----------------------------------------------------------------------------------------------------------
def test_integer_ids_and_events_without_times(tmp_path: Path) -> None:
    trained = train(tmp_path, tokens=False, text_ids=False, times=False)
    recommender = Recommender.load(trained.exported)
    assert recommender.reading["times"] is False
    assert main(recommended(trained.exported, trained, tmp_path / "out.parquet")) == 0
    assert rows_of(tmp_path / "out.parquet") == trained.predicted
    rows = recommender.catalogue.rows([0, 10, "10", "010", 5, -1, 2**70, "x", 390])
    assert rows.tolist() == [0, 1, 1, -1, -1, -1, -1, -1, 39]
    assert recommender.catalogue.rows(["drama", "comedy", "news", 3], "genre").tolist() == [1, 0, -1, -1]
    samples = next(recommender.batches(recommender.read_events(trained.events, cache_dir=tmp_path), 3))
    with pytest.raises(ConfigurationError, match="states: the model has no personal tokens"):
        recommender.compress(samples)
    strange = tmp_path / "strange.csv"
    strange.write_text("user_id,item_id,genre\na,7,drama\n")
    with pytest.raises(InputError, match="no user has 1 events with items of the model's catalogue"):
        recommender.read_events(strange, cache_dir=tmp_path)
