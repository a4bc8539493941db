"""``benchmarks.exposed`` on its emulated machine. Time is virtual, so the figures are exact and can be tested."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import exposed
from benchmarks.harness.emulation.clock import RealClock, VirtualClock
from benchmarks.harness.emulation.device import EmulatedDevice, EmulatedTimes
from benchmarks.harness.exchange.measurement import ExchangeOptions, measure
from benchmarks.harness.exchange.summary import describe, line_through, summarise
from benchmarks.harness.variant_names import (
    COMPUTE_ONLY,
    DENSE_ONLY,
    PRIORITIZED,
    SYNC,
    TORCHREC_BASE,
    TORCHREC_SPARSE_DIST,
)
from benchmarks.harness.workload import EqualCostWorkload
from lightning_freescale.embedding import collisions, prioritized
from tests.benchmarks.command import run_benchmark
from tests.ranks import run_ranks

SECONDS = 0.05  # of one exchange of all rows, see make_machine


def options(*rates: float, tail: float = 0.05) -> ExchangeOptions:
    return ExchangeOptions("cpu", 2, rates, rounds=1, warm=3, steps=2, clock="counted", tail=tail, transport="auto")


def figures_of(rank: int, chosen: ExchangeOptions, sabotage: Callable[[], None] | None = None) -> dict[str, Any]:
    if sabotage is not None:
        sabotage()
    return summarise(measure(chosen))


def every_row_collides() -> None:
    def detect(self: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones_like(first, dtype=torch.bool), torch.ones_like(second, dtype=torch.bool)

    collisions._fused_indices = lambda tables, group: []  # the fused index work calls no detector
    collisions.CollisionDetector.__call__ = detect  # type: ignore[method-assign]


def one_row_goes_wrong() -> None:
    inverse = prioritized.inverse_permutation
    prioritized.inverse_permutation = lambda order: inverse(order).roll(1)


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    first, second = run_ranks(figures_of, args=(options(0.0, 0.12, 0.4),))
    assert first == second  # the result is the same on every rank
    return first


def test_all_variants_train_alike(figures: dict[str, Any]) -> None:
    losses = figures["losses"]
    assert losses["equal"]
    assert losses["apart"] == {TORCHREC_BASE: 0.0, TORCHREC_SPARSE_DIST: 0.0, SYNC: 0.0, PRIORITIZED: 0.0}
    assert losses["last"] < losses["first"] / 2  # something was trained
    assert figures["lane"] == PRIORITIZED


def test_dense_compute_takes_the_given_time(figures: dict[str, Any]) -> None:
    for row in figures["results"]:
        assert row["step_ms"][DENSE_ONLY] == pytest.approx(1e3 * SECONDS * 3.6 * 1.05)
        assert row["step_ms"][COMPUTE_ONLY] == pytest.approx(
            row["step_ms"][DENSE_ONLY]
        )  # lookups take no emulated time


def test_torchrec_exposes_both_exchanges_at_every_collision_rate(figures: dict[str, Any]) -> None:
    for row in figures["results"]:
        times = row["exposed_ms"]
        assert (
            1.95e3 * SECONDS < times[TORCHREC_SPARSE_DIST] < times[TORCHREC_BASE] < 2.2e3 * SECONDS
        )  # rows and gradients; base also ids
        assert times[SYNC] == pytest.approx(times[TORCHREC_BASE])


def test_prioritized_exposes_collisions_only(figures: dict[str, Any]) -> None:
    tail = 1e3 * SECONDS * 3.6 * 0.05
    for row in figures["results"]:
        one_way = row["collisions_measured"] * 1e3 * SECONDS
        expected = one_way + max(0.0, one_way - tail)  # gradients, then the rows that do not fit behind the tail
        assert row["exposed_ms"][PRIORITIZED] == pytest.approx(expected, abs=0.06 * one_way + 1.0)
        assert abs(row["collisions_measured"] - row["collisions"]) < 0.01


def test_goal(figures: dict[str, Any]) -> None:
    assert figures["goal"]["reached"] >= 0.903


def test_rows_of_one_batch_are_prefetched(figures: dict[str, Any]) -> None:
    assert figures["memory"]["extra_batches"] == 1.0


def test_nothing_hides_behind_compute_when_all_rows_collide() -> None:
    chosen = options(0.12, tail=0.0)
    row = run_ranks(figures_of, args=(chosen, every_row_collides))[0]["results"][0]
    assert row["collisions_measured"] == 1.0
    assert row["exposed_ms"][PRIORITIZED] == pytest.approx(row["exposed_ms"][TORCHREC_SPARSE_DIST], rel=0.05)


def test_wrong_rows_are_detected() -> None:
    result = run_ranks(figures_of, args=(options(0.12), one_row_goes_wrong))[0]
    assert not result["losses"]["equal"]
    assert result["losses"]["apart"][SYNC] == 0.0 < result["losses"]["apart"][PRIORITIZED]
    assert "DIFFERENT" in describe(result)


def test_text_contains_what_was_measured(figures: dict[str, Any]) -> None:
    text = describe(figures)
    for word in (TORCHREC_BASE, TORCHREC_SPARSE_DIST, SYNC, PRIORITIZED, "R2", "1.00 of a batch", "equal", "reached"):
        assert word in text


# ---- parts -----------------------------------------------------------------------------------------------------------------
def test_line() -> None:
    line = line_through([0.0, 1.0, 2.0], [1.0, 3.0, 5.0])
    assert line == pytest.approx({"intercept": 1.0, "slope": 2.0, "r2": 1.0})
    assert line_through([0.0, 1.0, 2.0], [0.0, 1.0, 0.0])["r2"] == pytest.approx(0.0)


def test_emulated_device_works_while_the_host_continues() -> None:
    clock = VirtualClock()
    device = EmulatedDevice(clock)
    device.launch(2.0)
    device.launch(3.0)
    assert clock.now() == 0.0
    device.synchronize()
    assert clock.now() == 5.0
    clock.wait_until(9.0)
    device.launch(1.0)
    device.synchronize()
    assert clock.now() == 10.0


def test_real_time_passes() -> None:
    clock = RealClock()
    moment = clock.now() + 0.02
    clock.wait_until(moment)
    assert clock.now() >= moment
    clock.wait_until(moment - 1.0)


def test_the_emulated_exchange_takes_the_given_time() -> None:
    workload = EqualCostWorkload(64, 3.6, 0.8, 400, rows=60_000, dim=128)
    emulation = EmulatedTimes.for_exchange(0.05, workload, 4, 0.05)
    assert workload.row_bytes * 3 / 4 / emulation.bandwidth == pytest.approx(0.05)
    assert emulation.optimizer == pytest.approx(0.05 * (emulation.forward + emulation.backward))


def test_one_rank_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        exposed.parse(["--ranks", "1", "--device", "cpu"])
    assert "a single rank exchanges nothing" in capsys.readouterr().err


def test_command_prints_json_and_writes_it(tmp_path: Path) -> None:
    output = tmp_path / "exposed.json"
    words = ["--device", "cpu", "--rates", "12", "--steps", "1", "--rounds", "2", "--output", str(output)]
    printed = run_benchmark("exposed", tmp_path, *words).json
    assert printed == json.loads(output.read_text())
    assert printed["results"][0]["exposed_ms"].keys() == {TORCHREC_BASE, TORCHREC_SPARSE_DIST, SYNC, PRIORITIZED}
    first, second = printed["goal"]["reached_by_round"]
    assert first == pytest.approx(second, rel=0.01)
    assert first == pytest.approx(printed["goal"]["reached"], rel=0.01)
    assert printed["command"].startswith("python -m benchmarks.exposed --device cpu --rates 12")
    assert {"machine", "versions", "date", "parameters", "losses", "memory", "goal"} <= printed.keys()
