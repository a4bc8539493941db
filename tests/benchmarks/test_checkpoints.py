"""``benchmarks.checkpoints``: every variant saves and resumes, and incremental saves write less."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.benchmarks.command import run_benchmark


@pytest.mark.slow
def test_every_variant_is_measured(tmp_path: Path) -> None:
    found = run_benchmark("checkpoints", tmp_path, "--quick", "--steps", "2", "--ranks", "2", "--device", "cpu").json
    rows = {row["save"]: row for row in found["rows"]}
    assert list(rows) == [
        "full",
        "full, asynchronous",
        "incremental",
        "incremental, asynchronous",
        "copy in host memory",
    ]
    assert all(0 < row["stall_ms"] <= row["complete_ms"] for row in rows.values())
    assert all(row["load_ms"] > 0 for row in rows.values())
    assert rows["copy in host memory"]["load_without_a_host_ms"] > 0
    assert rows["copy in host memory"]["written_mib"] > 1.9 * rows["full"]["written_mib"]  # Each part is on two hosts.
    changed = found["parameters"]["changed_percent"] / 100
    assert 0.1 < changed < 0.9
    for kind in ("incremental", "incremental, asynchronous"):
        assert rows[kind]["written_mib"] < (changed + 0.1) * rows["full"]["written_mib"]


@pytest.mark.slow
def test_the_delay_of_each_save_is_measured(tmp_path: Path) -> None:
    options = ("--quick", "--ranks", "2", "--device", "cpu", "--saves", "2", "--period", "12")
    found = run_benchmark("save_delay", tmp_path, *options).json
    assert [row["save"] for row in found["rows"]] == [1, 2]
    for row in found["rows"]:
        assert 0 <= row["steps_beside"] <= 12  # The next save begins after 12 steps, and waits for the one before.
        assert row["call_ms"] > 0
        assert math.isfinite(
            row["delay_ms"]
        )  # A busy machine may slow the steps without a save, which makes it negative.
    assert found["saved_bytes"] > 20_000 * 32 * 4
    assert found["delay_ms"] == sum(row["delay_ms"] for row in found["rows"]) / 2
