"""The benchmark of the CUDA graphs runs, and both of its sides train the same model."""

from __future__ import annotations

from pathlib import Path

from benchmarks import layer_graphs
from tests.benchmarks.command import run_benchmark


def test_both_sides_have_the_same_losses(tmp_path: Path) -> None:
    printed, _ = run_benchmark("layer_graphs", tmp_path, "--quick", "--device", "cpu", "--rounds", "1")
    rows = printed["rows"]
    assert [(row["variant"], row["layers"]) for row in rows] == [
        ("dense alone", "with graphs"),
        ("dense alone", "without graphs"),
        ("all", "with graphs"),
        ("all", "without graphs"),
    ]
    for name in ("dense alone", "all"):
        assert len({row["last loss"] for row in rows if row["variant"] == name}) == 1
    assert all(row["step_ms"] > 0 for row in rows)


def test_ratios_are_to_the_side_without_graphs() -> None:
    def training(step: float) -> dict:
        return {"step_ms": {"mean": step}, "host_late": 0.5, "peak_bytes": 2**30, "losses": [3.0, 2.0]}

    found = {("all", "with graphs"): [training(10.0), training(14.0)], ("all", "without graphs"): [training(24.0)]}
    first, second = layer_graphs.summarise(found)
    assert (first["step_ms"], first["lowest"], first["highest"], first["ratio"]) == (12.0, 10.0, 14.0, 0.5)
    assert (second["ratio"], second["peak_gib"], second["last loss"]) == (1.0, 1.0, 2.0)
