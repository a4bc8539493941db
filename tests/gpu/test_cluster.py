"""Tests on one GPU that stands for several nodes, each with SMs of its own.

The prioritized exchange, and HSTU in the Trainer, are compared with the synchronous exchange; the monitor with the profiler.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_freescale.transport.groups import fitting_ctas
from tests.gpu.clusters import Run, result_of, started_early

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.mark.alone
def test_ranks_have_sms_of_their_own(tmp_path: Path) -> None:
    apart = result_of(Run("reserved_sms.py", ranks=2, alone=True), tmp_path)
    same = result_of(Run("reserved_sms.py", ("same",), ranks=2, alone=True), tmp_path)  # the check can fail
    for ranks, beside in ((apart, True), (same, False)):
        assert all(rank["own"] == rank["sms"] < rank["default"] for rank in ranks), ranks
        assert 2 * ranks[0]["sms"] <= ranks[0]["default"], ranks
        assert (ranks[0]["held"] and ranks[1]["ran"]) is beside, ranks


@started_early(Run("prioritized.py", ("nccl",)), Run("prioritized.py", ("freescale",)))
def test_prioritized_equals_synchronous(results: Any) -> None:
    """Losses agree within 1e-6, weights and optimizer state within 1e-5 of their size, also in bfloat16 on the wire."""
    check_exchanges(results, cases=14)
    assert results["unordered_micro_batches"] > 1e-3  # the comparison can fail
    for case in results["cases"]:
        assert (case["saved"] > 0) == (case["options"] == ["use_index_dedup"]), case


@started_early(Run("bags.py", ("nccl",)), Run("bags.py", ("freescale",)))
def test_prioritized_bags_equal_synchronous_ones(results: Any) -> None:
    """The same for sums, means and weighted sums. Each of two tables has its own width, and two features share one of them."""
    check_exchanges(results, cases=19)
    assert all(case["saved"] == 0 for case in results["cases"])


@started_early(Run("moment_optimizers.py", ("nccl",)))
def test_optimizers_with_moments(results: Any) -> None:
    """The same for each of them, without and with weight decay."""
    check_exchanges(results, cases=8)


@started_early(Run("host_tables.py", ("nccl", "rows")))
def test_tables_in_host_memory(results: Any) -> None:
    """The same for tables in host memory, with a cache on the GPU for 20 % of their rows and without one."""
    check_exchanges(results, cases=7)
    assert results["past_the_cache"] > 1e-3


@started_early(Run("host_tables.py", ("nccl", "bags")))
def test_tables_of_bags_in_host_memory(results: Any) -> None:
    check_exchanges(results, cases=2)


def check_exchanges(results: Any, cases: int) -> None:
    assert results["unordered"] > 1e-3  # the comparison can fail
    assert len(results["cases"]) == cases
    for case in results["cases"]:
        assert case["lane"] == "prioritized", case
        assert 0 < case["collisions"] < case["rows"], case
        assert case["loss"] <= 1e-6, case
        assert case["weights"] <= 1e-5 * case["moved"], case


@started_early(Run("zero_collision.py", ("freescale",)))
def test_zero_collision_ids(results: Any) -> None:
    """Ids, ages and slots are those of the CPU, exactly. The exchanges agree within 1e-6, and with the CPU within 1e-5."""
    assert [case["optimizer"] for case in results["cases"]] == [
        "rowwise_adagrad",
        "rowwise_adagrad",
        "sgd",
        "adagrad",
        "adam",
    ]
    for case in results["cases"]:
        assert all(count > 0 for count in case["counts"]), case  # inserted, evicted, without a row
        for found, tolerance in ((case["synchronous"], 1e-6), (case.get("cpu"), 1e-5)):
            if found is not None:
                assert found["integers"] == 0, case
                assert found["losses"] <= tolerance, case
                assert found["rows"] <= tolerance, case
    # With dedup TorchRec adds the gradients of repeated ids with atomic operations, in any order.
    assert results["dedup"]["integers"] == 0
    assert max(results["dedup"]["losses"], results["dedup"]["rows"]) <= 1e-5
    # The comparison can fail.
    assert results["never_undo"]["integers"] > 0
    assert results["write_all_fresh_rows_early"]["rows"] > 1e-3
    assert results["unordered"]["rows"] > 1e-3


@started_early(Run("raw_ids.py", ("20",)))
def test_hstu_on_raw_ids(results: Any) -> None:
    """Both exchanges give the same ids and ages, exactly, and losses within 1 %, because of bf16. The checkpoint is exported."""
    assert results["differ"] == 0
    assert results["ids"] > 4000  # of 8,192 rows
    assert len(results["True"]["losses"]) == 20
    assert results["True"]["losses"] == pytest.approx(results["False"]["losses"], rel=0.01)
    assert results["True"]["val"]["val/loss"] == pytest.approx(results["False"]["val"]["val/loss"], rel=0.01)


@started_early(Run("hstu.py", ("40",)))
def test_hstu_has_the_same_losses_in_both_modes(results: Any) -> None:
    """Losses agree within 1 %, also over the SM-free transport, and over NCCL with a limit of its CTAs.

    With bf16, the order of sums changes the rounding.
    """
    expected = results["synchronous"]
    for name in ("nccl", "host", "nccl, 1 CTA"):
        got = results[name]
        assert got["losses"] == pytest.approx(expected["losses"], rel=0.01), name
        assert got["losses"][-1] < 0.7 * got["losses"][0]
        assert got["checkpoint"]
        assert got["planned"] > 20
    assert expected["planned"] == 0  # a synchronous exchange does not know the next batch
    assert results["nccl, 1 CTA"]["most_ctas"] == 1
    assert results["nccl"]["most_ctas"] == fitting_ctas(results["sms"])  # the kernels of all groups fit on the GPU
    assert results["host"]["most_ctas"] is None  # another transport


@started_early(Run("late_copies.py", alone=True))
def test_saves_beside_the_training_are_exact(results: Any) -> None:
    """Tables that are copied beside the backward are those of the save, bit for bit, though the copy takes long."""
    assert results["in time"] == [True] * 4
    assert not any(results["late"])  # the comparison can fail


@started_early(Run("shared_experts.py", ("nccl",)), Run("shared_experts.py", ("freescale",)))
def test_shared_experts_equal_one_rank(results: Any, request: pytest.FixtureRequest) -> None:
    """Output and gradients of four ranks in one to three micro-chunks are within 2e-5 of one rank in float32, by their norm."""
    assert results["backend"] in request.node.name
    assert results["chunks"].keys() == {"1", "2", "3"}
    for errors in (results["chunks"].values(), [results["late"]]):
        assert all(error <= 2e-5 for error in errors), results
    # The comparison can fail.
    assert results["unordered"] > 1e-3
    assert results["changed weight"] > 1e-4


@started_early(Run("bubbles.py", alone=True))
def test_the_monitor_agrees_with_the_profiler(results: Any) -> None:
    """On every rank, useful work of the monitor is when the trace of a synchronous run has kernels of the model.

    In 2 % of a step at most, the model computes in what the monitor counts as bubble. In 2 % at most, there is an exchange in
    what it counts as useful. The rest of the difference is time in which the host launches kernels.
    """
    assert [one["rank"] for one in results] == [0, 1, 2, 3]
    for one in results:
        assert one["steps"] == 10
        assert one["wall_ms"] == pytest.approx(one["wall_ms_by_hand"], rel=0.01), one
        assert 0.05 < one["by_hand"] < 0.95, one  # there is a bubble, and there is useful work
        assert one["model_in_bubble"] < 0.02, one
        assert one["exchange_in_compute"] < 0.02, one
        assert one["idle_in_compute"] < 0.1, one
        explained = one["exchange_in_compute"] + one["idle_in_compute"] - one["model_in_bubble"]
        assert one["by_hand"] == pytest.approx(one["monitor"] + explained, abs=0.005, rel=0), one
        # The check can fail: a monitor that counts all time as bubble, or as useful.
        assert min(one["model"], one["exchange_if_all_is_compute"]) > 0.02, one


@started_early(
    Run("learning.py", ("40",), alone=True)
)  # the time of a rank must not depend on the samples of the others
def test_all_ranks_fit_the_same_costs(results: Any) -> None:
    """Measured with CUDA events, in both exchange modes. Losses are within 1 % of the unbalanced run, because of bf16."""
    first = results.pop("off")
    expected, needs = first["losses"], first["most_bytes"] - first["bytes"]
    for name, found in results.items():
        learnt = found["learnt"]
        assert all(rank == learnt[0] for rank in learnt), name
        # The initial model has only a quadratic term.
        assert learnt[0]["linear"] + learnt[0]["candidate"] > 0, (name, learnt[0])
        assert learnt[0]["error"] < 0.5, (name, learnt[0])
        assert found["losses"] == pytest.approx(expected, rel=0.01), name
        # The model and the batches of the training before are freed. A batch takes most of the memory.
        assert found["bytes"] - first["bytes"] < needs / 4, (name, found["bytes"], first)
