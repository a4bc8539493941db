"""``benchmarks.end_to_end`` on two CPU ranks: all variants train alike. Its arithmetic is tested on invented time stamps."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import end_to_end
from benchmarks.harness.gpu_cluster import matrix_product_check
from benchmarks.harness.training import all_variants, bubble, bubble_report, shapes, steadiness, variants
from benchmarks.harness.training.bubble import PARTS
from benchmarks.harness.training.sent_bytes import SentBytes
from benchmarks.harness.training.variants import TrainingJob
from benchmarks.harness.variant_names import (
    ALL,
    ALL_OVER_NCCL,
    ALL_OVER_TCP,
    BALANCE,
    DENSE_ONLY,
    PRIORITIZE,
    SM_FREE,
    SYNC,
    TORCHREC_BASE,
    TORCHREC_SPARSE_DIST,
    TRAINING_VARIANTS,
)
from benchmarks.harness.workload import LongTailWorkload, collision_rate
from tests.benchmarks.command import run_benchmark, start_interpreter
from tests.gpu.clusters import Call, started_early
from tests.ranks import run_ranks

QUICK = ["--device", "cpu", "--quick"]


def figures_of(
    rank: int,
    argv: list[str],
    sabotage: Callable[[], None] | None = None,
    known: dict[str, Any] | None = None,
    keep: Path | None = None,
) -> dict[str, Any]:
    os.environ.update(NODE_RANK=str(rank), LOCAL_RANK="0")  # as the launcher sets it: every rank is a node
    if sabotage is not None:
        sabotage()
    return end_to_end.finish(
        all_variants.run(end_to_end.parse(argv), keep=None if rank else keep, known=known, wait=30.0)
    )


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    kept = tmp_path_factory.mktemp("end_to_end") / "figures.json"
    first, second = run_ranks(figures_of, args=(QUICK, None, None, kept))
    for figures in (first, second):
        for side in figures["sides"].values():
            del side["took_seconds"]
    assert first == second  # the result is the same on every rank
    on_file = json.loads(kept.read_text())
    assert on_file["sides"].keys() == first["sides"].keys()
    assert on_file["under_way"] is None
    return first


def test_all_variants_train_alike(figures: dict[str, Any]) -> None:
    losses = figures["losses"]
    assert losses["equal"]
    assert losses["apart"].keys() == set(TRAINING_VARIANTS) - {DENSE_ONLY}
    for name in (TORCHREC_BASE, TORCHREC_SPARSE_DIST, SYNC, PRIORITIZE, SM_FREE):
        assert losses["apart"][name] == 0.0  # bit for bit
    for name in (BALANCE, ALL_OVER_NCCL, ALL_OVER_TCP):
        assert losses["apart"][name] == losses["apart"][ALL] < 1e-6  # the same sums in another order


def test_every_variant_uses_its_techniques(figures: dict[str, Any]) -> None:
    notes = {name: side["notes"] for name, side in figures["sides"].items()}
    for name in (SYNC, BALANCE, SM_FREE):
        assert notes[name]["prioritized"] == []
    for name in (PRIORITIZE, ALL_OVER_NCCL, ALL_OVER_TCP, ALL):
        assert notes[name]["prioritized"] == ["embedding"]
    assert notes[ALL]["strategy"] == {"balance": "fixed", "prioritize": True, "transport": "host"}
    assert figures["collisions"] == pytest.approx(0.12, abs=0.02)


def test_figures_of_a_variant(figures: dict[str, Any]) -> None:
    for name, side in figures["sides"].items():
        assert len(side["losses"]) == figures["steps"]
        assert len(side["step_ms"]["steps"]) == figures["counted"] == 3
        assert side["busy_cores"] > 0
        if name != DENSE_ONLY:
            assert side["bubble_ms"] == pytest.approx(side["step_ms"]["mean"] - figures["dense_ms"])
            assert sum(side["parts_ms"][part] for part in PARTS) == pytest.approx(side["bubble_ms"])
            assert side["samples_per_second"] == pytest.approx(8e3 / side["step_ms"]["mean"])
    text = bubble_report.describe(figures)
    for word in ("dense compute alone", *TRAINING_VARIANTS[1:], *PARTS, "equal"):
        assert word in text


def weight_all_ranks_equally() -> None:
    build = variants.JobBatches.__init__

    def without_scales(self: Any, job: Any) -> None:
        build(self, job)
        self.scales = [1.0] * len(self)

    variants.JobBatches.__init__ = without_scales  # type: ignore[method-assign]


def test_different_losses_are_detected_and_known_variants_are_not_trained_again() -> None:
    sabotage, argv = weight_all_ranks_equally, [*QUICK, "--sides", TORCHREC_BASE, TORCHREC_SPARSE_DIST, SYNC]
    wrong = run_ranks(figures_of, args=([*argv[:-1]], sabotage))[0]
    assert wrong["losses"]["apart"] == {TORCHREC_BASE: 0.0, TORCHREC_SPARSE_DIST: 0.0}
    wrong["failed"] = {TORCHREC_SPARSE_DIST: "made up"}
    del wrong["sides"][TORCHREC_SPARSE_DIST]
    result = run_ranks(figures_of, args=(argv, None, wrong))[0]
    assert list(result["sides"]) == [TORCHREC_BASE, SYNC]
    assert result["sides"][TORCHREC_BASE] == wrong["sides"][TORCHREC_BASE]
    assert not result["losses"]["equal"]
    (first, expected), *_, (last, right) = zip(
        *(result["sides"][name]["losses"] for name in (TORCHREC_BASE, SYNC)), strict=True
    )
    assert first == pytest.approx(expected)  # the factors change the gradients only,
    assert abs(last - right) > 1e-3  # and the gradients train the model
    text = bubble_report.describe(result)
    assert "DIFFERENT" in text
    assert f"{TORCHREC_SPARSE_DIST}: FAILED, made up" in text


def test_wrong_products_are_detected() -> None:
    right = torch.eye(3)
    matrix_product_check.compare("made up", right.bfloat16(), right, rank=1)
    matrix_product_check.check_products(torch.device("cpu"), rank=1, width=8, rows=50)
    for wrong in (1.02 * right, right.where(right == 0, torch.nan)):
        with pytest.raises(
            RuntimeError, match="rank 1: a matrix product is wrong on this machine \\(made up, \\[3, 3\\]"
        ):
            matrix_product_check.compare("made up", wrong, right, rank=1)


# ---- parts -------------------------------------------------------------------------------------------------------------------
def test_account_of_known_time_stamps() -> None:
    # batch, arrived, forward, begun, gradient, graph, backward, optimizer, end
    fast = [1.0, 3.0, 6.0, 6.5, 10.5, 17.0, 19.0, 20.0, 21.0]  # waits 3 ms for the slow rank in backward
    slow = [1.0, 3.0, 6.0, 6.5, 13.5, 17.0, 19.0, 20.0, 21.0]
    steps = np.array([[[21.0 * step + moment for moment in rank] for step in range(3)] for rank in (fast, slow)])
    figures = bubble.account(steps / 1e3, slice(1, 3))
    assert figures["step_ms"]["mean"] == figures["step_ms"]["median"] == pytest.approx(21.0)
    assert figures["step_ms"]["spread"] == pytest.approx(0.0)
    assert figures["rank_ms"] == pytest.approx([20.0, 20.0])
    assert figures["compute_ms"] == pytest.approx(8.5)
    expected = {"straggler": 1.5, "exposed embedding": 2 + 0.5 + 3.5 + 1, "exposed dense": 2.0, "input": 1.0}
    assert figures["parts_ms"] == pytest.approx(expected)


def variant(step: float, straggler: float = 0.0) -> dict[str, Any]:
    parts = {"straggler": straggler, "exposed embedding": 4.0, "exposed dense": 0.0, "input": 0.0}
    times = {"mean": step, "median": step, "spread": 0.0, "steps": [step]}
    kept = {"losses": [1.0], "notes": {}, "peak_bytes": 2**30, "compute_rank_ms": [[6.0], [8.0]]}
    kept |= {"sent_bytes": 5e6, "warm_up": {"steps": 3, "steady": True}}
    return {"step_ms": times, "rank_ms": [6.0, 10.0], "compute_ms": 7.0, "parts_ms": parts} | kept


def made_up(**sides: dict[str, Any]) -> dict[str, Any]:
    parameters = {"device": "cpu", "ranks": 2, "strict": True}
    head = {"title": "made up", "parameters": parameters, "machine": "none", "global_batch": 8}
    empty: dict[str, Any] = {"workload": {}, "model": {}, "versions": {}, "failed": {}}
    return head | empty | {"steps": 1, "counted": 1, "collisions": 0.12, "sides": sides}


def test_removed_share_of_the_bubble() -> None:
    sides = {
        DENSE_ONLY: variant(9.0),
        TORCHREC_BASE: variant(28.0, 10.0),
        TORCHREC_SPARSE_DIST: variant(18.0),
        ALL: variant(9.0),
    }
    figures = bubble.summarise(made_up(**sides))
    assert figures["dense_ms"] == 8.0  # the mean of the ranks
    assert [figures["sides"][name]["bubble_ms"] for name in (TORCHREC_BASE, TORCHREC_SPARSE_DIST, ALL)] == [
        20.0,
        10.0,
        1.0,
    ]
    assert figures["sides"][ALL]["gone"] == {TORCHREC_BASE: 0.95, TORCHREC_SPARSE_DIST: 0.9}
    assert figures["goal"] == {"gone": 0.903, "reached": 0.9}  # of the better baseline
    assert figures["sides"][TORCHREC_BASE]["parts_ms"]["other"] == pytest.approx(6.0)
    assert figures["sides"][TORCHREC_BASE]["straggler_percent"] == pytest.approx(1000 / 28)
    assert "missed, 90.0%" in bubble_report.describe(figures)


def test_noise_of_the_compute_of_the_same_batch() -> None:
    dense, base, balanced = ({"compute_rank_ms": times} for times in ([[9.0, 11.0]], [[22.0, 18.0]], [[1.0, 99.0]]))
    assert bubble.repeatability({DENSE_ONLY: dense, TORCHREC_BASE: dense}) == 0.0
    assert bubble.repeatability({DENSE_ONLY: dense, TORCHREC_BASE: base}) == pytest.approx(
        0.1 * 2**0.5
    )  # 0.9 and 1.1 of the mean
    assert bubble.repeatability({DENSE_ONLY: dense, ALL: balanced}) is None  # balancing moves samples


def test_no_removed_share_without_a_bubble() -> None:
    figures = bubble.summarise(made_up(**{DENSE_ONLY: variant(9.0), TORCHREC_BASE: variant(7.0), ALL: variant(6.0)}))
    assert figures["sides"][ALL]["gone"] == {}
    assert "goal" not in figures


def test_no_bubble_if_the_compute_of_the_same_batches_differs() -> None:
    """As it happened: the counted steps of the first variant compiled kernels on three of four ranks."""
    sides = {DENSE_ONLY: variant(9.0), TORCHREC_BASE: variant(28.0), SYNC: variant(30.0), ALL: variant(10.0)}
    sides[DENSE_ONLY]["compute_rank_ms"] = [[6.0], [24.0]]
    sides[ALL]["compute_rank_ms"] = [[60.0], [80.0]]  # balancing moves samples: not compared
    figures = bubble.summarise(made_up(**sides))
    assert figures["compute_apart"] == pytest.approx({TORCHREC_BASE: -2 / 3, SYNC: -2 / 3})
    assert len(figures["doubts"]) == 2
    assert all("bubble_ms" not in side for side in figures["sides"].values())
    text = bubble_report.describe(figures)
    assert "No bubble is given" in text
    assert f"{SYNC}: the compute of the same batches takes -66.7% compared with 'dense alone'" in text
    assert "Parts of the bubble" not in text
    assert end_to_end._status(figures) == 1
    figures["parameters"]["strict"] = False
    loose = bubble.summarise(figures)
    assert loose["sides"][ALL]["bubble_ms"] == pytest.approx(2.0)
    assert "Do not trust the bubbles" in bubble_report.describe(loose)


def test_no_bubble_if_steps_are_not_steady() -> None:
    sides = {DENSE_ONLY: variant(9.0), TORCHREC_BASE: variant(28.0)}
    sides[TORCHREC_BASE]["warm_up"] = {"steps": 30, "steady": False}
    figures = bubble.summarise(made_up(**sides))
    assert figures["doubts"] == [f"{TORCHREC_BASE}: its steps did not become steady in 30 warm-up steps"]
    assert "bubble_ms" not in figures["sides"][TORCHREC_BASE]
    assert "30, not steady" in bubble_report.describe(figures)


def test_limit_of_a_step_is_the_longer_of_compute_and_transfers() -> None:
    sides = {DENSE_ONLY: variant(9.0), TORCHREC_BASE: variant(28.0), ALL_OVER_TCP: variant(12.0), ALL: variant(10.0)}
    sides[DENSE_ONLY]["dense_bytes"] = 2_000_000
    figures = made_up(**sides) | {"link_gb_per_s": {"nccl": 0.4, "freescale": 2.5, "freescale over TCP": 1.0}}
    found = bubble.summarise(figures)["sides"]
    # 5 MB for the tables, and 2 MB in an AllReduce of two ranks, which is always over NCCL. Host memory is another link.
    assert [found[name]["transfers_ms"] for name in (TORCHREC_BASE, ALL_OVER_TCP, ALL)] == pytest.approx([17.5, 10, 5])
    assert [found[name]["of_limit"] for name in (TORCHREC_BASE, ALL_OVER_TCP, ALL)] == pytest.approx([1.6, 1.2, 1.25])
    del figures["link_gb_per_s"]["nccl"]
    for each in found.values():
        each.pop("of_limit", None)
    assert not any("of_limit" in each for each in bubble.summarise(figures)["sides"].values())


def test_steady_steps_are_found_after_a_compilation_and_beside_one_disturbed_step() -> None:
    steady = [20.0, 33.0, 20.5, 32.0, 19.5, 33.5]
    assert steadiness.steady_after(steady) == 0
    assert steadiness.steady_after([900.0, 400.0, 80.0, *steady]) == 2  # one slow step of six is a disturbance
    assert steadiness.steady_after([*steady[:3], 90.0, *steady[4:]]) == 0
    assert steadiness.steady_after([20.0, 90.0, 20.5, 32.0, 19.5, 60.0]) is None
    assert steadiness.steady_after(steady[:5]) is None  # too few steps to judge
    assert steadiness.steady_after([30.0 * 0.8**step for step in range(9)]) is None  # still getting faster


def test_warm_up_alternates_between_the_lengths_of_the_first_two_batches_that_count() -> None:
    workload = LongTailWorkload(2, 800, 60_000, 2)
    job = TrainingJob(torch.device("cpu"), 0, 2, workload, {}, 11, 30.0, warm_up=7, alternating=5)
    batches = list(variants.JobBatches(job))
    lengths = [tuple(batch.lengths.tolist()) for batch in batches]
    assert lengths == [*lengths[7:9], *[lengths[8], lengths[7]] * 2, lengths[8], *lengths[7:]]
    assert len(set(lengths[7:])) == 4  # those that count have lengths of their own
    ids = [tuple(batch.features.values().tolist()) for batch in batches]
    assert len(set(ids)) == len(ids)  # the model would overfit a batch that is trained twice


def test_flops_of_a_step_are_those_of_the_model() -> None:
    workload, model = LongTailWorkload(2, 8, 600, 3), {"embedding_dim": 8, "num_layers": 2, "num_heads": 2}
    job = TrainingJob(torch.device("cpu"), 0, 2, workload, model, 9, 30.0)
    a, b, c = job.make_model(job.timestamps("")).cost_coefficients()
    lengths = [int(n) for rank in range(2) for n in workload.lengths(rank, 4)]
    assert job.flops([4]) == pytest.approx(sum(a * n + b * n * n + c * 3 * (n - 1) for n in lengths))
    figures = made_up(**{DENSE_ONLY: variant(9.0), SYNC: variant(20.0)}) | {"flops": 4e9, "peak_flops": 1e12}
    assert bubble.summarise(figures)["sides"][SYNC]["mfu"] == pytest.approx(0.2)


def sent_by(rank: int) -> int:
    torch.distributed.init_process_group("gloo")
    sent = SentBytes()
    with sent.counting():
        to_each = [1 + rank, 2]  # rows of 4 bytes; each rank keeps its own share
        from_each = [1 + peer if rank == 0 else 2 for peer in range(2)]
        rows = torch.zeros(sum(to_each), dtype=torch.float32)
        torch.distributed.all_to_all_single(torch.empty(sum(from_each)), rows, from_each, to_each)
        torch.distributed.all_gather([torch.empty(5), torch.empty(5)], torch.zeros(5))
    torch.distributed.all_gather([torch.empty(5), torch.empty(5)], torch.zeros(5))  # not counted
    return sent.total


def test_bytes_that_leave_a_rank() -> None:
    assert run_ranks(sent_by) == [2 * 4 + 20, 2 * 4 + 20]


@pytest.mark.slow
def test_one_table_of_all_shapes(tmp_path: Path) -> None:
    """Two rounds of two shapes: an HSTU with pooled features, and a DLRM."""
    sides = [DENSE_ONLY, TORCHREC_BASE, ALL]
    words = [*QUICK, "--rounds", "2", "--steps", "2", "--shapes", "context", "dlrm", "--sides", *sides]
    done = run_benchmark("end_to_end", tmp_path, *words)
    shapes_found = done.json["shapes"]
    assert list(shapes_found) == ["context", "dlrm"]
    assert shapes_found["dlrm"]["workload"]["clicks"] == 5
    assert shapes_found["dlrm"]["sides"][ALL]["notes"]["prioritized"] == ["embedding"]
    for name, found in shapes_found.items():
        assert found["losses"]["equal"]
        assert found["workload"].get("context", 0) == (2 if name == "context" else 0)
        for side in sides:
            assert len(found["rounds"][side]["step_ms"]) == 2
        assert found["rounds"][TORCHREC_BASE]["sent_bytes"][0] == found["rounds"][TORCHREC_BASE]["sent_bytes"][1] > 0
        assert min(found["rounds"][ALL]["sent_bytes"]) > 0
        assert found["rounds"][DENSE_ONLY]["sent_bytes"] == [0, 0]
    text = shapes.describe(done.json)
    for word in (
        "context",
        "dlrm",
        "MFU %",
        "MB sent",
        "peak GiB",
        *PARTS,
        "% of TrainPipelineBase gone",
        " to ",
    ):
        assert word in text


def test_losses_are_weighted_by_predicted_positions() -> None:
    losses = bubble.global_losses(np.array([[1.0, 2.0], [4.0, 2.0]]), np.array([[2.0, 5.0], [1.0, 1.0]]))
    assert losses == [2.0, 2.0]


def test_different_losses() -> None:
    curves = {"a": [2.0, 4.0, 0.02], "b": [2.0, 4.00002, 0.02001], "c": [2.0, 4.02, 0.02]}
    assert bubble.compare_losses({name: curves[name] for name in "ab"}, "cpu")["equal"]
    result = bubble.compare_losses(curves, "cpu")
    assert not result["equal"]
    assert result["apart"] == pytest.approx({"a": 0.0, "b": 5e-6, "c": 5e-3})


@pytest.mark.parametrize("longest", [512, 8192])
def test_the_workload_has_long_histories_and_the_requested_collisions(longest: int) -> None:
    workload = LongTailWorkload(64, longest, 2_000_000)
    lengths = torch.stack([workload.lengths(rank, step) for rank in range(2) for step in range(8)])
    assert 2 <= lengths.min() < lengths.max() == longest
    events = lengths.sum(dim=1).double()
    assert events.max() > 1.1 * events.min()  # unequal work
    batches = [[workload.ids(rank, step, 2) for rank in range(2)] for step in (3, 4)]
    assert collision_rate(*batches) == pytest.approx(0.12, abs=0.01)
    batch = workload.batch(1, 3, 2)
    batch.validate()
    assert torch.equal(batch.features.values(), workload.ids(1, 3, 2))
    assert workload.predicted(1, 3) == int((batch.lengths - 1).sum())


def test_command_prints_json_and_writes_it(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    output = tmp_path / "end_to_end.json"
    traces = tmp_path / "traces"
    sides = DENSE_ONLY, TORCHREC_BASE, SYNC
    words = ["--steps", "1", "--sides", *sides, "--output", str(output), "--traces", str(traces)]
    printed = run_benchmark("end_to_end", tmp_path_factory.mktemp("streams"), *QUICK, *words).json
    assert printed == json.loads(output.read_text())
    assert set(tmp_path.iterdir()) == {output, traces}
    for side in sides:
        assert json.loads((traces / f"{side.replace(' ', '_')}.json").read_text())["traceEvents"]
    assert printed["command"].startswith("python -m benchmarks.end_to_end --device cpu --quick")
    assert str(tmp_path) not in printed["command"]
    assert list(printed["sides"]) == [DENSE_ONLY, TORCHREC_BASE, SYNC]
    assert printed["losses"]["apart"] == {TORCHREC_BASE: 0.0, SYNC: 0.0}
    assert {"machine", "versions", "date", "parameters", "workload", "model", "dense_ms"} <= printed.keys()


def small_benchmark() -> subprocess.CompletedProcess[str]:
    # Kernels of this size take no longer than their launches, so the times are not judged.
    small = ["--longest", "512", "--rows", "100000", "--batch-size", "16", "--steps", "4", "--no-strict"]
    return start_interpreter("end_to_end", "--device", "cuda", *small, "--json", timeout=500)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@started_early(Call(small_benchmark))
def test_all_variants_on_one_gpu_as_four_nodes(results: Any) -> None:
    assert results.stdout, results.stderr
    printed = json.loads(results.stdout)
    assert printed["losses"]["equal"], printed["losses"]
    assert results.returncode == 0, results.stderr
    assert list(printed["sides"]) == list(TRAINING_VARIANTS)
    assert printed["sides"][ALL]["notes"]["prioritized"] == ["embedding"]
    assert all(side["peak_bytes"] > 0 for side in printed["sides"].values())
