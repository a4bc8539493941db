"""``benchmarks.plain_ddp``: both strategies train, and the ratios are those of the rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.command import run_benchmark


def test_both_strategies_are_timed_with_and_without_a_logger(tmp_path: Path) -> None:
    rows = run_benchmark("plain_ddp", tmp_path, "--quick", "--ranks", "2", "--device", "cpu").json["rows"]
    assert [row["logger"] for row in rows] == ["none", "CSVLogger"]
    for row in rows:
        for name in ("step", "CPU time"):
            (ratio,) = row[f"{name} ratio, rounds"]
            assert ratio == row[f"{name} ratio"]
            assert ratio == pytest.approx(row[f"{name} ms, freescale"] / row[f"{name} ms, ddp"])
            assert row[f"{name} ms, ddp"] > 0
