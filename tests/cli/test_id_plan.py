"""``freescale plan --ids``: known figures, and the proposals checked by playing the events through a real table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_freescale.cli.id_plan import IdDrift, id_drift
from lightning_freescale.cli.plan import main
from lightning_freescale.embedding.zero_collision.layout import EMPTY, Eviction, Layout
from lightning_freescale.embedding.zero_collision.remap import empty_state, insert
from lightning_freescale.runtime.errors import FreeScaleError

STEP = 50


def drifting(steps: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """Ids of a window that moves by two ids a step, and once in a while an old one."""
    chance = np.random.default_rng(0)
    recent = chance.integers(0, 300, (steps, STEP)) + 2 * np.arange(steps)[:, None]
    old = chance.integers(0, 540, (steps, STEP))
    items = np.where(chance.random((steps, STEP)) < 0.02, old, recent).ravel()
    return np.unique(items, return_inverse=True)[1], np.arange(steps * STEP)


def test_known_figures() -> None:
    drift = id_drift(np.array([0, 1, 0, 2, 3, 3, 0, 4]), np.arange(8), events_per_step=2)
    assert (drift.events, drift.ids, drift.steps) == (8, 5, 4)
    assert drift.new_at_the_end == 0.5  # of the events 0 and 4 in the last step, 4 is new
    shortest, never = drift.proposals[0], drift.proposals[-1]
    assert (shortest.ttl, shortest.lost, shortest.live) == (2, 0.0, 4)  # id 0 returns after 1 and 2 steps, id 1 never
    assert (never.ttl, never.live, never.rows, never.buckets) == (None, 5, 1024, 1)


def test_the_order_of_the_file_does_not_matter() -> None:
    items, times = drifting()
    order = np.random.default_rng(1).permutation(len(items))
    assert id_drift(items[order], times[order], STEP) == id_drift(items, times, STEP)


def test_proposals_hold_in_a_real_table() -> None:
    """Ids that are played through a table of the proposed size all find a row, and as many live as predicted."""
    items, times = drifting()
    drift = id_drift(items, times, STEP)
    assert len(drift.proposals) == 4
    assert sorted(one.live for one in drift.proposals) == [one.live for one in drift.proposals]
    for one in drift.proposals:
        size = one.rows // one.buckets
        layout = Layout(one.buckets, 0, one.buckets, size, size // 100, 256)
        state = empty_state(layout.slots, torch.device("cpu"))
        live = fallback = 0
        for step in range(drift.steps):
            ids = torch.from_numpy(items[step * STEP : (step + 1) * STEP].astype(np.int64)) * 1_000_003
            _, insertion = insert(state, layout, Eviction("ttl", one.ttl) if one.ttl else Eviction(), ids, step)
            alive = state.identities != EMPTY
            if one.ttl:
                alive &= state.seen + one.ttl >= step
            live = max(live, int(alive.sum()))
            fallback += insertion.counts.fallback
        assert live == one.live
        assert fallback == 0


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items, times = drifting(30)
    file = tmp_path / "events.csv"
    rows = [f"{at % 7},id {item},{at}" for item, at in zip(items, times, strict=True)]
    file.write_text("user_id,item_id,timestamp\n" + "\n".join(rows) + "\n")
    assert main([str(file), "--ids", "--events-per-step", str(STEP), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected: IdDrift = id_drift(items, times, STEP)
    assert found["ids"] == expected.ids
    assert [one["ttl"] for one in found["proposals"]] == [one.ttl for one in expected.proposals]
    assert main([str(file), "--ids", "--events-per-step", str(STEP)]) == 0
    text = capsys.readouterr().out
    assert f"{expected.ids:,} distinct item ids" in text
    assert f"{expected.proposals[-1].rows:,}" in text
    assert main(["synthetic", "--ids", "--synthetic", "users=200"]) == 0
    empty = tmp_path / "empty.csv"
    empty.write_text("user_id,item_id,timestamp\n")
    with pytest.raises(FreeScaleError, match=r"empty\.csv"):
        main([str(empty), "--ids"])
