"""``benchmarks.timeline_picture``: the image and its figures from real runs over the emulated network."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import timeline_picture
from benchmarks.timeline_picture import STRATEGIES, show, train
from lightning_freescale.bubbles.records import RecordedRun, read_run
from lightning_freescale.bubbles.spans import ENGINE
from tests.ranks import run_ranks

WARM_UP, STEPS = 3, 7


def train_both(rank: int, folder: Path) -> None:
    os.environ.update(LOCAL_RANK="0", NODE_RANK=str(rank))  # as on machines with one device each
    timeline_picture.FORWARD, timeline_picture.BACKWARD, timeline_picture.EXCHANGE = 0.03, 0.06, 0.02
    for name in STRATEGIES:
        train(name, Namespace(device="cpu", ranks=2, steps=STEPS, folder=folder))


def kinds(run: RecordedRun, engine: bool) -> set[str]:
    spans = (span for index in run.indices for step in run.step(index) for span in step.spans)
    return {span.kind.value for span in spans if (span.track == ENGINE) is engine}


def test_the_image_and_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_picture, "WARM_UP", WARM_UP)
    image = pytest.importorskip("PIL.Image")
    run_ranks(train_both, args=(tmp_path,))
    options = Namespace(device="cpu", ranks=2, folder=tmp_path, json=False)
    show(Namespace(**vars(options), picture=tmp_path / "new" / "a.png", output=tmp_path / "a.json"))
    assert image.open(tmp_path / "new" / "a.png").width == 1500
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["steps"] == STEPS - WARM_UP
    assert figures["drawn"] >= WARM_UP
    assert set(figures["results"]) == set(STRATEGIES)
    assert 0 < figures["collision_rate"] < 0.5
    for values in figures["results"].values():
        assert 0 < values["bubble_ms"] < values["wall_ms"]
    # Rows and gradients of a step each take at least this long on the emulated network, so they did travel over it.
    assert figures["results"]["freescale_sync"]["exposed_embedding_ms"] > 1e3 * 0.02
    assert "freescale_sync" in capsys.readouterr().out

    before, after = (read_run(tmp_path / name) for name in STRATEGIES)
    assert "row_exchange" in kinds(before, engine=True)
    assert not {"row_exchange_exclusive", "row_exchange_collision"} & kinds(before, engine=False)
    assert {"row_exchange_exclusive", "gradient_exchange"} <= kinds(after.only(range(WARM_UP, STEPS)), engine=False)
    assert "row_exchange" not in kinds(after.only(range(WARM_UP, STEPS)), engine=True)
