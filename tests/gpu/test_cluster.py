"""One GPU as several nodes, each with its own cores; the prioritized exchange and HSTU through the Trainer, against the
synchronous path; its bubbles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.gpu_cluster import launcher

HERE = Path(__file__).resolve().parent
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


def result_of(
    script: str, *arguments: str, folder: Path | None = None, ranks: int = 4, reserve_sms: bool = False
) -> Any:
    """The JSON that rank 0 of ``script`` prints."""
    env = {} if folder is None else {"FOLDER": str(folder)}
    argv = [str(HERE / script), *arguments]
    output = launcher.run(ranks, argv, timeout=300, reserve_sms=reserve_sms, env=env)[0]
    return json.loads(next(line for line in output.splitlines() if line.startswith("RESULT "))[len("RESULT ") :])


def test_ranks_have_cores_of_their_own() -> None:
    apart = result_of("reserved_sms.py", ranks=2, reserve_sms=True)
    same = result_of("reserved_sms.py", "same", ranks=2, reserve_sms=True)  # the check is able to fail
    for ranks, beside in ((apart, True), (same, False)):
        assert all(rank["own"] == rank["cores"] < rank["default"] for rank in ranks), ranks
        assert 2 * ranks[0]["cores"] <= ranks[0]["default"], ranks
        assert (ranks[0]["held"] and ranks[1]["ran"]) is beside, ranks


@pytest.mark.parametrize("backend", ["nccl", "freescale"])
def test_prioritized_equals_synchronous(backend: str) -> None:
    """Losses within 1e-6, weights and optimizer state within 1e-5 of their size; seen so far: no difference at all."""
    results = result_of("prioritized.py", backend)
    assert results["unordered"] > 1e-3  # the comparison is able to fail
    assert len(results["cases"]) == 20
    for case in results["cases"]:
        assert case["mode"] == "prioritized", case
        assert case["loss"] <= 1e-6, case
        assert case["weights"] <= 1e-5 * case["moved"], case
        assert (case["saved"] > 0) == case["dedup"], case


def test_hstu_trains_alike_on_both_paths(tmp_path: Path) -> None:
    """bf16 and sums in another order: losses within 1 %, also over the SM-free transport."""
    results = result_of("hstu.py", "40", folder=tmp_path)
    synchronous = {name: results[name]["False"] for name in ("rowwise_adagrad", "adam")} | {
        "host": results["adam"]["False"]
    }
    for name, expected in synchronous.items():
        got = results[name]["True"]
        assert got["losses"] == pytest.approx(expected["losses"], rel=0.01), name
        assert got["losses"][-1] < 0.7 * got["losses"][0]
        assert got["checkpoint"]


def test_the_monitor_agrees_with_the_profiler(tmp_path: Path) -> None:
    """The bubble of the synchronous run, within 3 points of wall minus busy from a trace of the same steps, on every rank."""
    results = result_of("bubbles.py", folder=tmp_path)
    assert [one["rank"] for one in results] == [0, 1, 2, 3]
    for one in results:
        assert one["steps"] == 10
        assert one["wall_ms"] == pytest.approx(one["wall_ms_by_hand"], rel=0.01), one
        assert 0.05 < one["by_hand"] < 0.95, one  # there is a bubble, and there is work
        assert one["monitor"] == pytest.approx(one["by_hand"], abs=0.03, rel=0), one
        # The check is able to fail: there is more than that to get wrong.
        assert one["monitor"] != pytest.approx(one["with_nccl_as_busy"], abs=0.03, rel=0), one


def test_costs_are_learnt_alike_on_all_ranks(tmp_path: Path) -> None:
    """By CUDA events, with the synchronous and the prioritized exchange; bf16: losses within 1 % of the unbalanced run."""
    results = result_of("learning.py", "60", folder=tmp_path)
    expected = results.pop("off")["losses"]
    for name, found in results.items():
        learnt = found["learnt"]
        assert all(rank == learnt[0] for rank in learnt), name
        assert learnt[0]["linear"] + learnt[0]["candidate"] > 0, name  # it began with nothing but squares
        assert learnt[0]["error"] < 0.5, name
        assert found["losses"] == pytest.approx(expected, rel=0.01), name
