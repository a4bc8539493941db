"""The benchmark of shared experts on two ranks: all variants compute the same loss, and only those that share send events."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import expert_parallel
from benchmarks.harness.expert_step import ExpertStep
from benchmarks.harness.tables.results_blocks import shared_experts
from tests.ranks import run_ranks


def measure_two(rank: int) -> dict[str, dict[str, Any]]:
    dist.init_process_group("gloo")
    shape, device = expert_parallel.CPU_SHAPE._replace(samples=4, layers=1), torch.device("cpu")
    steps = {expert_parallel.ALONE: ExpertStep(shape, device, None, 1)}
    for chunks in (1, 2):
        steps[f"gloo, {chunks}"] = ExpertStep(shape, device, dist.group.WORLD, chunks)
    return expert_parallel.measure(steps, rounds=2, repeats=1)


def test_two_ranks() -> None:
    found, other = run_ranks(measure_two)
    assert [one["loss"] for one in found.values()] == [one["loss"] for one in other.values()]
    rows = expert_parallel.describe(found)
    assert [(row["transport"], row["micro_chunks"]) for row in rows] == [
        (expert_parallel.ALONE, 1),
        ("gloo", 1),
        ("gloo", 2),
    ]
    alone, one, two = rows
    assert alone["sent MB"] == alone["exposed ms"] == 0
    assert one["sent MB"] > 0
    assert two["sent MB"] == pytest.approx(one["sent MB"], rel=0.05)  # the counts travel once for each chunk
    assert max(row["loss difference"] for row in rows) < 1e-6
    stored: Any = {"benchmark": "expert_parallel", "expert_parallel": rows, "ranks": 2, "machine": "2 cores (x)"}
    stored |= {"command": "python -m benchmarks.expert_parallel", "date": "2026-01-01"}
    table = shared_experts({"expert_parallel_cpu": stored})
    assert table.count("| gloo |") == 2
