"""``benchmarks.learning``: variants train, and the defaults learn faster than the earlier defaults."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import learning
from tests.ranks import run_ranks

TRAINED = ("relative", "input", "earlier")


def train_all(rank: int) -> dict[str, list[dict[str, Any]]]:
    torch.set_num_threads(1)
    arguments = learning.parse(["--quick"])
    return {variant: learning.train(arguments, "synthetic", variant, seed=0) for variant in TRAINED}


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, Any]]]:
    (found,) = run_ranks(train_all, world=1, timeout=150)
    return found


def test_every_variant_has_a_row_for_the_last_epoch(rows: dict[str, list[dict[str, Any]]]) -> None:
    for variant, found in rows.items():
        assert [(row["variant"], row["epoch"]) for row in found] == [(variant, 2)]
        assert all(0 <= row[metric] <= 1 for row in found for metric in learning.LOGGED)
        assert found[0]["seconds"] > 0


def test_the_defaults_learn_faster_than_the_earlier_ones(rows: dict[str, list[dict[str, Any]]]) -> None:
    earlier = rows["earlier"][-1]["NDCG@10"]
    assert min(rows[variant][-1]["NDCG@10"] for variant in ("relative", "input")) > 5 * earlier


@pytest.mark.slow
def test_a_training_runs_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result names the file and no folder."""
    path = tmp_path / "events.csv"
    events = [(user, (user + step) % 9, step) for user in range(40) for step in range(3 + user % 17)]
    path.write_text("user,item,time\n" + "".join(f"{user},{item},{time}\n" for user, item, time in events))
    argv = [str(path), "--quick", "--epochs", "1", "--seeds", "3", "--variants", "relative", "--jobs", "2"]
    monkeypatch.setattr(sys, "argv", ["learning.py", *argv, "--output", str(tmp_path / "result.json")])
    assert learning.main() == 0
    text = (tmp_path / "result.json").read_text()
    assert str(tmp_path) not in text
    found = json.loads(text)
    assert [(row["data"], row["seed"], row["epoch"]) for row in found["rows"]] == [("events.csv", 3, 1)]
    assert found["parameters"]["jobs"] == 2


def test_trainings_stop_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["learning.py", "--quick", "--limit", "0"])
    assert learning.main() == 1
