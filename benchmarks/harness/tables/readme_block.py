"""The four results in the top-level README."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import mean
from typing import Any

from benchmarks.harness.gpu_cluster.transports import HOST, NCCL
from benchmarks.harness.results import StoredResult, command, of_rounds
from benchmarks.harness.tables import markdown
from benchmarks.harness.tables.claims import GOAL_RATE, at_goal_rate, sm_free_rows
from benchmarks.harness.training.rounds import mean_and_spread
from benchmarks.harness.variant_names import ALL, ALL_OVER_NCCL, PRIORITIZED, TORCHREC_BASE

NOTE = (
    "Measured on one NVIDIA H200 that acts as four nodes. [All results](docs/results.md), with settings, controls and what the "
    "figures do not show; [next to the paper's](docs/paper.md)."
)


def block(results: Mapping[str, StoredResult]) -> str:
    """The table, and where to read more."""
    return f"{markdown.table(list(rows(results)))}\n\n{NOTE}"


def rows(results: Mapping[str, StoredResult]) -> Iterator[dict[str, Any]]:
    """The rows whose results exist."""
    for name, make in (
        ("end_to_end_h200_long", _bubble),
        ("straggler_h200", _idle),
        ("exposed_h200", _exposed),
        ("sm_free_h200", _slow_down),
    ):
        if name in results:
            claim, before, after = make(results[name])
            yield {"claim": claim, "before": before, "after": after, "command": f"`{command(results[name])}`"}


def _bubble(found: StoredResult) -> tuple[str, str, str]:
    def gone(side: str) -> str:
        return f"-{mean(of_rounds(found, side, f'gone of {TORCHREC_BASE}')):.0%}"

    def of_step(side: str) -> str:
        bubble, step = (mean_and_spread(of_rounds(found, side, name)) for name in ("bubble_ms", "step_ms"))
        return f"{bubble} of {step} ms"

    same_link = f"; {gone(ALL_OVER_NCCL)} over TorchRec's own link" if ALL_OVER_NCCL in found["sides"] else ""
    return (
        f"bubble of a step, histories up to {found['workload']['longest']:,} events",
        f"{of_step(TORCHREC_BASE)} (TorchRec)",
        f"{of_step(ALL)} ({gone(ALL)}{same_link})",
    )


def _idle(found: StoredResult) -> tuple[str, str, str]:
    rows = {row["balance"]: row for row in found["straggler"]}
    off, flops, online = (rows[name] for name in ("off", "fixed, cost by FLOPs", "fixed, fitted online"))
    return (
        "idle time per step caused by stragglers",
        f"{off['idle ms']:.1f} ms ({off['straggler %']:.1f}%), no balancing",
        f"{flops['idle ms']:.1f} ms ({flops['straggler %']:.1f}%); {online['idle ms']:.1f} ms with `fit_costs=True`",
    )


def _exposed(found: StoredResult) -> tuple[str, str, str]:
    ms = at_goal_rate(found)["beyond_dense_ms"]
    return (
        f"exposed embedding exchange at {GOAL_RATE:.0%} collisions, with lookups and updates",
        f"{ms[TORCHREC_BASE]:.1f} ms per step (TorchRec)",
        f"{ms[PRIORITIZED]:.1f} ms per step",
    )


def _slow_down(found: StoredResult) -> tuple[str, str, str]:
    rows = sm_free_rows(found)

    def cell(mode: str) -> str:
        gemm, hstu = (rows[compute, mode] for compute in ("gemm", "hstu"))
        return f"{gemm['slowdown']:.2f}x and {hstu['slowdown']:.2f}x at {gemm['gb_per_s_per_rank']:.1f} GB/s per rank"

    return (
        "time of matrix products and of HSTU layers beside an all-to-all, relative to alone",
        f"{cell(NCCL)} (NCCL)",
        f"{cell(HOST)} (SM-free)",
    )
