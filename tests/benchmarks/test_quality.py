"""``benchmarks.quality``: both strategies train alike on two CPU ranks, and a difference would be reported."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quality
from benchmarks.harness.variant_names import FREESCALE, SYNC
from benchmarks.quality import METRICS
from tests.ranks import run_ranks

EVENTS = [(user, (user + step) % 9, step) for user in range(40) for step in range(3 + user % 17)]


def figures_of(rank: int, argv: list[str]) -> dict[str, Any]:
    os.environ.update(NODE_RANK=str(rank), LOCAL_RANK="0", OMP_NUM_THREADS="1")
    return quality.measure(quality.parse(argv), rank)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("quality") / "events.csv"
    path.write_text("user,item,time\n" + "".join(f"{user},{item},{time}\n" for user, item, time in EVENTS))
    first, second = run_ranks(figures_of, args=([str(path), "--device", "cpu", "--quick", "--epochs", "2"],))
    assert first == second  # the result is the same on every rank
    return first


@pytest.mark.parametrize("name", ["synthetic", "events.csv"])
def test_both_train_alike(figures: dict[str, Any], name: str) -> None:
    found = figures["data"][name]
    assert found["prioritized"] == {SYNC: False, FREESCALE: True}
    curves = found["curves"]
    assert len(curves[SYNC]["losses"]) == len(curves[FREESCALE]["losses"]) == found["steps"] > 2
    assert found["loss"]["apart"]["largest"] < 1e-4  # balancing moves samples: the same sums in another order
    for metric in METRICS:
        assert len(curves[SYNC]["metrics"][metric]) == 2
        assert found["metrics"][metric]["within_noise"]


def test_files_are_read(figures: dict[str, Any]) -> None:
    assert figures["data"]["events.csv"]["users"] == 40
    assert figures["data"]["events.csv"]["items"] == 9
    assert figures["data"]["synthetic"]["users"] == 120


def test_image_and_text(figures: dict[str, Any], tmp_path: Path) -> None:
    quality.draw(figures, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    text = quality.describe(figures)
    for word in ("synthetic: 120 users", "events.csv: 40 users", SYNC, FREESCALE, *METRICS, "equal within noise"):
        assert word in text


def test_the_result_contains_no_folder_names(
    figures: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--device", "cpu", "--json", "--output", str(tmp_path / "quality.json")]
    monkeypatch.setattr(sys, "argv", ["quality.py", *argv])
    quality.publish(figures, quality.parse(argv))
    printed = capsys.readouterr().out
    assert json.loads(printed) == json.loads((tmp_path / "quality.json").read_text())
    assert str(tmp_path) not in printed


def run(losses: list[float], hit_rate: float, users: int = 100) -> dict[str, Any]:
    metrics = {"HR@10": [0.1, hit_rate], "NDCG@10": [0.05, 0.2]}
    return {"users": users, "items": 5, "losses": losses, "metrics": metrics, "prioritized": False}


def test_a_difference_is_reported() -> None:
    found = quality.compare({SYNC: run([3.0, 2.0], 0.5), FREESCALE: run([3.0, 2.5], 0.56)})
    assert found["loss"]["apart"] == {"first_step": 0.0, "mean": 0.25, "largest": 0.5}
    assert found["metrics"]["HR@10"]["noise"] == pytest.approx(0.05)
    assert found["metrics"]["HR@10"]["difference"] == pytest.approx(0.06)
    assert not found["metrics"]["HR@10"]["within_noise"]
    assert found["metrics"]["NDCG@10"]["within_noise"]
    figures = {"parameters": {"epochs": 2, "ranks": 2}, "machine": "none", "data": {"made up": found}}
    assert "DIFFERENT: HR@10" in quality.describe(figures)


def test_a_missing_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quality.parse(["no/such/file.csv", "--device", "cpu"])
    assert "no/such/file.csv: no such file" in capsys.readouterr().err
