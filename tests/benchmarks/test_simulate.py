"""``benchmarks.simulate``: simulated steps are close to the stored measurements."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import simulate
from benchmarks.harness import simulator_costs
from benchmarks.harness import simulator_validation as validation
from benchmarks.harness import variant_names as names
from benchmarks.harness.results import load_results
from lightning_freescale.simulate import VARIANTS

SHAPES = "long", "context", "medium", "short"
# Limits in percent of the sides whose steps were irregular. Their fastest steps are as fast as the simulated ones.
IRREGULAR = {
    ("end_to_end_h200_short", names.ALL_OVER_NCCL): 23.0,
    ("end_to_end_h200_short", names.ALL_OVER_TCP): 17.0,
}
# The same of sides whose exchange ran at another rate than the median of all results.
OTHER_RATE = {
    ("end_to_end_h200_medium_newest", names.TORCHREC_BASE): 7.0,
    ("end_to_end_h200_medium_newest", names.TORCHREC_SPARSE_DIST): 16.0,
}
# The same of sides that were measured with older code. The costs are those of the newest code.
OLDER_CODE = {
    ("end_to_end_h200_short", names.TORCHREC_BASE): 9.0,
    ("end_to_end_h200_short", names.ALL): 11.0,
    ("end_to_end_h200_medium", names.ALL_OVER_NCCL): 15.0,
    ("end_to_end_h200_context", names.ALL_OVER_NCCL): 8.0,
    ("end_to_end_h200_context", names.ALL_OVER_TCP): 7.0,
    ("end_to_end_h200_long", names.ALL_OVER_NCCL): 7.0,
    ("end_to_end_h200_share", names.ALL): 6.0,
}
EXCEPTIONS = IRREGULAR | OTHER_RATE | OLDER_CODE


@pytest.mark.slow
def test_simulated_steps_are_close_to_measured_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, plot = tmp_path / "out.json", tmp_path / "out.png"
    monkeypatch.setattr("sys.argv", ["simulate", "--quick", "--json", "--output", str(output), "--plot", str(plot)])
    simulate.main()
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(output.read_text())
    assert plot.read_bytes()[:4] == b"\x89PNG"
    errors = {row["measured in"]: row for row in found["errors"]}
    for name in ("exposed_cpu", "exposed_cpu_2ranks", "exposed_cpu_no_tail"):
        assert errors[name]["largest error %"] < 1.5
    assert errors["straggler_h200"]["largest error %"] < 5
    shapes = [row for row in found["end_to_end"] if row["measured in"].startswith("end_to_end_h200")]
    assert {row["measured in"].rpartition("_")[2] for row in shapes} == {
        "h200",
        "21k",
        "share",
        "newest",
        *SHAPES,
    }
    for row in shapes:
        assert abs(row["error %"]) < EXCEPTIONS.get((row["measured in"], row["side"]), 5.0), row
    assert {row["ranks"] for row in errors.values()} == {1, 2, 4}
    assert [(row["ranks"], row["side"]) for row in found["scaling"]] == [
        (ranks, variant.name) for ranks in (8, 64) for variant in VARIANTS
    ]
    assert [row["efficiency %"] for row in found["scaling"][: len(VARIANTS)]] == pytest.approx([100] * len(VARIANTS))


def test_exposed_times_follow_the_collisions() -> None:
    rows = [row for row in validation.exposed(load_results()["exposed_cpu"], steps=40) if row["side"] == "prioritized"]
    measured, simulated = ([row[name] for row in rows] for name in ("exposed ms", "simulated exposed ms"))
    assert len(rows) == 6
    np.testing.assert_allclose(simulated, measured, rtol=0.07, atol=0.3)


def test_the_measured_batches_are_reproduced() -> None:
    """With the fitted cost, mean and slowest rank take the measured time; in another order of the samples they do not."""
    found = load_results()["straggler_h200"]
    assert found["cost model"][1]["cost"] == "fitted"  # without balancing
    cost, _ = validation.measured_cost(found, row=1)
    batches = validation.measured_batches(found["setting"])
    world, size, steps = (int(found["setting"][name]) for name in ("ranks", "batch_size", "steps"))
    assert [len(batch) for batch in batches] == [world * size] * steps

    def ranks(histories: NDArray[np.int64]) -> NDArray[np.float64]:
        """``[steps, ranks]`` milliseconds."""
        return 1e3 * (cost(histories).reshape(steps, world, size).sum(axis=2) + cost.constant)

    off, drawn = found["straggler"][0], np.concatenate(batches)
    assert ranks(drawn).mean() == pytest.approx(off["compute ms"], rel=0.01)
    assert ranks(drawn).max(axis=1).mean() == pytest.approx(off["slowest ms"], rel=0.01)
    rng = np.random.default_rng(0)
    shuffled = np.array([ranks(rng.permutation(drawn)).max(axis=1).mean() for _ in range(100)])
    assert (np.abs(shuffled / off["slowest ms"] - 1) > 0.01).mean() > 0.7


def test_end_to_end_variants_are_distinguished() -> None:
    """A step that was measured with a technique differs from the step that is simulated without it."""
    found = load_results()["end_to_end_h200"]
    rows = {row["side"]: row for row in validation.end_to_end(found, seeds=1)}
    assert rows.keys() == validation.END_TO_END.keys() & found["sides"].keys()
    for variant in ("+ balance", "+ prioritize", "+ SM-free", "all"):
        assert abs(rows[variant]["error %"]) < 5
        assert abs(rows["TrainPipelineBase"]["simulated ms"] / rows[variant]["step ms"] - 1) > 0.1


def test_irregular_sides_have_fast_steps_as_simulated() -> None:
    results = load_results()
    for result in {name for name, _ in IRREGULAR}:
        rows = {row["side"]: row for row in validation.end_to_end(results[result], seeds=1)}
        for side in [side for name, side in IRREGULAR if name == result]:
            fastest = min(results[result]["sides"][side]["step_ms"]["steps"])
            assert rows[side]["simulated ms"] == pytest.approx(fastest, rel=0.08)  # The code was older, too.


def test_costs_come_from_the_stored_results() -> None:
    costs = simulator_costs.costs()
    for name in (simulator_costs.LARGE, simulator_costs.SMALL):
        found = load_results()[name]
        rows = found["sides"][names.ALL]["sent_bytes"] / 2
        work = 1e3 * (costs.table_seconds + costs.table_seconds_per_byte * rows)
        # A cost that does not depend on the rows would be a little below zero, and is zero instead.
        assert work == pytest.approx(simulator_costs.median_of_rounds(found, names.ALL, "slower compute"), abs=0.1)
    assert costs.nccl_slowdown > 1
    assert min(costs.table_seconds_per_byte, costs.id_seconds, costs.collision_seconds) > 0
    # A round with an outlier does not count. The mean does count it.
    rounds = load_results()["end_to_end_h200_context"]["rounds"][names.ALL_OVER_NCCL]["step_ms"]
    median = simulator_costs.median_of_rounds(load_results()["end_to_end_h200_context"], names.ALL_OVER_NCCL, "step_ms")
    assert median in rounds
    assert np.mean(rounds) > 1.1 * median


def test_a_gpu_uses_the_measured_bandwidth_and_slow_down() -> None:
    found = {
        "machine": {"device": "NVIDIA H200", "exchange": "freescale"},
        "parameters": {"ranks": 4},
        "link_gb_per_s": {"nccl": 2.0, "freescale": 9.0},
    }
    beside = {row["mode"]: row for row in load_results()["sm_free_h200"]["rows"] if row["compute"] == "gemm"}
    for sm_free, mode in ((False, "nccl"), (True, "freescale")):
        cluster, optimizer = validation.machine_of(found, sm_free)
        assert cluster.bandwidth == 1e9 * found["link_gb_per_s"][mode]
        assert cluster.nccl_slowdown == max(1.0, beside[mode]["slowdown"])
        assert not cluster.host_waits
        assert optimizer == 0
