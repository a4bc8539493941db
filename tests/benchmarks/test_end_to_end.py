"""The end-to-end benchmark on two CPU ranks: every side runs and trains alike. Its arithmetic is tested on made-up marks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import end_to_end
from benchmarks.harness.gpu_cluster import matrix_product_check as products
from benchmarks.harness.gpu_cluster.launcher import ClusterFailed
from benchmarks.harness.training import all_variants as all_sides
from benchmarks.harness.training import bubble
from benchmarks.harness.training import variants as trainings
from benchmarks.harness.training.bubble import (
    ALL,
    BALANCE,
    BASE,
    DENSE,
    OVER_NCCL,
    OVER_TCP,
    PARTS,
    PRIORITIZE,
    SIDES,
    SM_FREE,
    SPARSE_DIST,
    SYNC,
)
from benchmarks.harness.workload import LongTail, collision_rate
from tests.benchmarks.command import run_benchmark
from tests.ranks import run_ranks

QUICK = ["--device", "cpu", "--quick"]


def figures_of(
    rank: int,
    argv: list[str],
    sabotage: Callable[[], None] | None = None,
    known: dict[str, Any] | None = None,
    keep: Path | None = None,
) -> dict[str, Any]:
    os.environ.update(NODE_RANK=str(rank), LOCAL_RANK="0")  # as the launcher has it: a node for every rank
    if sabotage is not None:
        sabotage()
    return end_to_end.finish(all_sides.run(end_to_end.parse(argv), keep=None if rank else keep, known=known, wait=30.0))


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    kept = tmp_path_factory.mktemp("end_to_end") / "figures.json"
    first, second = run_ranks(figures_of, args=(QUICK, None, None, kept))
    for figures in (first, second):
        for side in figures["sides"].values():
            del side["took_seconds"]
    assert first == second  # every rank knows the result
    on_file = json.loads(kept.read_text())
    assert on_file["sides"].keys() == first["sides"].keys()
    assert on_file["under_way"] is None
    return first


def test_all_sides_train_alike(figures: dict[str, Any]) -> None:
    losses = figures["losses"]
    assert losses["equal"]
    assert losses["apart"].keys() == set(SIDES) - {DENSE}
    for name in (BASE, SPARSE_DIST, SYNC, PRIORITIZE, SM_FREE):
        assert losses["apart"][name] == 0.0  # bit for bit
    for name in (BALANCE, OVER_NCCL, OVER_TCP):
        assert losses["apart"][name] == losses["apart"][ALL] < 1e-6  # the same sums in another order
    assert losses["last"] < losses["first"] - 1  # something was trained


def test_every_technique_was_on_where_it_should_be(figures: dict[str, Any]) -> None:
    notes = {name: side["notes"] for name, side in figures["sides"].items()}
    for name in (SYNC, BALANCE, SM_FREE):
        assert notes[name]["prioritized"] == []
    for name in (PRIORITIZE, OVER_NCCL, OVER_TCP, ALL):
        assert notes[name]["prioritized"] == ["embedding"]
    assert notes[ALL]["strategy"] == {"balance": "fixed", "prioritize": True, "transport": "host"}
    assert figures["collisions"] == pytest.approx(0.12, abs=0.02)


def test_figures_of_a_side(figures: dict[str, Any]) -> None:
    for name, side in figures["sides"].items():
        assert len(side["losses"]) == figures["steps"]
        assert len(side["step_ms"]["steps"]) == figures["counted"] == 3
        if name != DENSE:
            assert side["bubble_ms"] == pytest.approx(side["step_ms"]["mean"] - figures["dense_ms"])
            assert sum(side["parts_ms"][part] for part in PARTS) == pytest.approx(side["bubble_ms"])
            assert side["samples_per_second"] == pytest.approx(8e3 / side["step_ms"]["mean"])
    text = bubble.describe(figures)
    for word in ("dense compute alone", *SIDES[1:], *PARTS, "equal"):
        assert word in text


def every_rank_counts_the_same() -> None:
    build = trainings.Batches.__init__

    def without_scales(self: Any, job: Any) -> None:
        build(self, job)
        self.scales = [1.0] * len(self)

    trainings.Batches.__init__ = without_scales  # type: ignore[method-assign]


def test_unequal_training_is_noticed_and_known_sides_are_not_trained_again() -> None:
    sabotage, argv = every_rank_counts_the_same, [*QUICK, "--sides", BASE, SPARSE_DIST, SYNC]
    wrong = run_ranks(figures_of, args=([*argv[:-1]], sabotage))[0]
    assert wrong["losses"]["apart"] == {BASE: 0.0, SPARSE_DIST: 0.0}
    wrong["failed"] = {SPARSE_DIST: "made up"}
    del wrong["sides"][SPARSE_DIST]
    result = run_ranks(figures_of, args=(argv, None, wrong))[0]
    assert list(result["sides"]) == [BASE, SYNC]
    assert result["sides"][BASE] == wrong["sides"][BASE]
    assert not result["losses"]["equal"]
    text = bubble.describe(result)
    assert "DIFFERENT" in text
    assert f"{SPARSE_DIST}: FAILED, made up" in text


def test_wrong_products_are_noticed() -> None:
    right = torch.eye(3)
    products.compare("made up", right.bfloat16(), right, rank=1)
    products.check_products(torch.device("cpu"), rank=1, width=8, rows=50)
    for wrong in (1.02 * right, right.where(right == 0, torch.nan)):
        with pytest.raises(RuntimeError, match="rank 1: matrix products are wrong here \\(made up, \\[3, 3\\]"):
            products.compare("made up", wrong, right, rank=1)


# ---- parts -------------------------------------------------------------------------------------------------------------------
def test_account_of_known_marks() -> None:
    # batch, arrived, forward, begun, gradient, graph, backward, optimizer, end
    fast = [1.0, 3.0, 6.0, 6.5, 10.5, 17.0, 19.0, 20.0, 21.0]  # waits 3 for the slow one in backward
    slow = [1.0, 3.0, 6.0, 6.5, 13.5, 17.0, 19.0, 20.0, 21.0]
    steps = np.array([[[21.0 * step + moment for moment in rank] for step in range(3)] for rank in (fast, slow)])
    figures = bubble.account(steps / 1e3, slice(1, 3))
    assert figures["step_ms"]["mean"] == figures["step_ms"]["median"] == pytest.approx(21.0)
    assert figures["step_ms"]["spread"] == pytest.approx(0.0)
    assert figures["rank_ms"] == pytest.approx([20.0, 20.0])
    assert figures["compute_ms"] == pytest.approx(8.5)
    expected = {"straggler": 1.5, "exposed embedding": 2 + 0.5 + 3.5 + 1, "exposed dense": 2.0, "input": 1.0}
    assert figures["parts_ms"] == pytest.approx(expected)


def side(step: float, straggler: float = 0.0) -> dict[str, Any]:
    parts = {"straggler": straggler, "exposed embedding": 4.0, "exposed dense": 0.0, "input": 0.0}
    times = {"mean": step, "median": step, "spread": 0.0, "steps": [step]}
    kept = {"losses": [1.0], "notes": {}, "peak_bytes": 2**30, "compute_rank_ms": [[6.0], [8.0]]}
    return {"step_ms": times, "rank_ms": [6.0, 10.0], "compute_ms": 7.0, "parts_ms": parts} | kept


def made_up(**sides: dict[str, Any]) -> dict[str, Any]:
    head = {"title": "made up", "parameters": {"device": "cpu", "ranks": 2}, "machine": "none", "global_batch": 8}
    empty: dict[str, Any] = {"workload": {}, "model": {}, "versions": {}, "failed": {}}
    return head | empty | {"steps": 1, "counted": 1, "collisions": 0.12, "sides": sides}


def test_what_is_gone_of_the_bubble() -> None:
    sides = {DENSE: side(9.0), BASE: side(28.0, 10.0), SPARSE_DIST: side(18.0), ALL: side(9.0)}
    figures = bubble.summarise(made_up(**sides))
    assert figures["dense_ms"] == 8.0  # the mean of the ranks
    assert [figures["sides"][name]["bubble_ms"] for name in (BASE, SPARSE_DIST, ALL)] == [20.0, 10.0, 1.0]
    assert figures["sides"][ALL]["gone"] == {BASE: 0.95, SPARSE_DIST: 0.9}
    assert figures["goal"] == {"gone": 0.903, "reached": 0.9}  # of the better baseline
    assert figures["sides"][BASE]["parts_ms"]["other"] == pytest.approx(6.0)
    assert figures["sides"][BASE]["straggler_percent"] == pytest.approx(1000 / 28)
    assert "missed, 90.0%" in bubble.describe(figures)


def test_how_much_the_compute_of_one_batch_differs() -> None:
    dense, base, balanced = ({"compute_rank_ms": times} for times in ([[9.0, 11.0]], [[22.0, 18.0]], [[1.0, 99.0]]))
    assert bubble.repeatability({DENSE: dense, BASE: dense}) == 0.0
    assert bubble.repeatability({DENSE: dense, BASE: base}) == pytest.approx(0.1 * 2**0.5)  # 0.9 and 1.1 of the mean
    assert bubble.repeatability({DENSE: dense, ALL: balanced}) is None  # other batches on a rank


def test_nothing_is_gone_of_no_bubble() -> None:
    figures = bubble.summarise(made_up(**{DENSE: side(9.0), BASE: side(7.0), ALL: side(6.0)}))
    assert figures["sides"][ALL]["gone"] == {}
    assert "goal" not in figures


def test_losses_are_weighted_by_what_ranks_predict() -> None:
    losses = bubble.global_losses(np.array([[1.0, 2.0], [4.0, 2.0]]), np.array([[2.0, 5.0], [1.0, 1.0]]))
    assert losses == [2.0, 2.0]


def test_losses_that_differ() -> None:
    curves = {"a": [4.0, 2.0], "b": [4.0, 2.00001], "c": [4.0, 2.01]}
    assert bubble.compare_losses({name: curves[name] for name in "ab"}, "cpu")["equal"]
    result = bubble.compare_losses(curves, "cpu")
    assert not result["equal"]
    assert result["apart"] == pytest.approx({"a": 0.0, "b": 5e-6, "c": 5e-3})


def test_failure_of_a_side_is_noted_and_others_are_not(tmp_path: Path) -> None:
    part, failure = tmp_path / "part.json", ClusterFailed("rank 1 ended with status 1:\n...\nRuntimeError: no luck", 1)
    assert not end_to_end._note_failure(part, failure)  # before the first side
    part.write_text(json.dumps({"under_way": SYNC, "failed": {}}))
    assert end_to_end._note_failure(part, failure)
    assert json.loads(part.read_text())["failed"] == {SYNC: "RuntimeError: no luck"}
    assert not end_to_end._note_failure(part, failure)  # no side was under way: trying again would not help


@pytest.mark.parametrize("longest", [512, 8192])
def test_free_lengths_have_a_tail_and_the_collisions_asked_for(longest: int) -> None:
    workload = LongTail(64, longest, 2_000_000)
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


def test_unknown_side(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        end_to_end.parse([*QUICK, "--sides", "magic"])
    assert "no side 'magic'" in capsys.readouterr().err


def test_command_prints_json_and_writes_it(tmp_path: Path) -> None:
    output = tmp_path / "end_to_end.json"
    traces = tmp_path / "traces"
    sides = DENSE, BASE, SYNC
    words = ["--steps", "1", "--sides", *sides, "--output", str(output), "--traces", str(traces)]
    printed = run_benchmark("end_to_end", *QUICK, *words).json
    assert printed == json.loads(output.read_text())
    assert set(tmp_path.iterdir()) == {output, traces}
    for side in sides:
        assert json.loads((traces / f"{side.replace(' ', '_')}.json").read_text())["traceEvents"]
    assert printed["command"].startswith("python -m benchmarks.end_to_end --device cpu --quick")
    assert str(tmp_path) not in printed["command"]
    assert list(printed["sides"]) == [DENSE, BASE, SYNC]
    assert printed["losses"]["apart"] == {BASE: 0.0, SYNC: 0.0}
    assert {"machine", "versions", "date", "parameters", "workload", "model", "dense_ms"} <= printed.keys()


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_all_sides_on_one_gpu_as_four_nodes() -> None:
    small = ["--longest", "512", "--rows", "100000", "--batch-size", "16", "--steps", "4"]
    printed = run_benchmark("end_to_end", "--device", "cuda", *small).json
    assert list(printed["sides"]) == list(SIDES)
    assert printed["losses"]["equal"]
    assert printed["sides"][ALL]["notes"]["prioritized"] == ["embedding"]
    assert all(side["peak_bytes"] > 0 for side in printed["sides"].values())
