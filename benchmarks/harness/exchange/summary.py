"""What follows from the step times of the exchange benchmark, and its table on the console."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.labels import label
from benchmarks.harness.variant_names import (
    COMPUTE_ONLY,
    DENSE_ONLY,
    EXCHANGE_VARIANTS,
    PRIORITIZED,
    TORCHREC_BASE,
    TORCHREC_SPARSE_DIST,
)

EXPOSED_GOAL = {
    "collisions": 0.12,
    "gone": 0.903,
}  # share of TorchRec's exposed time that is removed at this collision rate
# Largest relative difference of the losses. On the CPU they are equal bit for bit. On CUDA the order of sums may vary.
EXCHANGE_LOSS_TOLERANCE = {"cpu": 0.0, "cuda": 1e-4}


def line_through(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """Least squares fit ``y = intercept + slope * x``, and the share of the variance that it explains."""
    slope, intercept = statistics.linear_regression(x, y)
    residual = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    total = sum((b - statistics.mean(y)) ** 2 for b in y)
    return {"intercept": intercept, "slope": slope, "r2": 1.0 - residual / total if total else 1.0}


def summarise(figures: dict[str, Any]) -> dict[str, Any]:
    """Add to the measured figures: removed shares, the linear fit, whether the losses are equal, and the goal."""
    results = figures["results"]
    for row in results:
        row["gone"] = _removed(row["exposed_ms"])
        row["gone_by_round"] = [_removed(one) for one in row["exposed_ms_by_round"]]
        row["gone_beyond_dense"] = _removed(row["beyond_dense_ms"])
    if len(results) > 1:
        rates = [row["collisions_measured"] for row in results]
        figures["line"] = line_through(rates, [row["exposed_ms"][PRIORITIZED] for row in results])
    tolerance = EXCHANGE_LOSS_TOLERANCE[figures["parameters"]["device"]]
    figures["losses"] |= {"tolerance": tolerance, "equal": max(figures["losses"]["apart"].values()) <= tolerance}
    memory = figures["memory"]
    memory["extra_batches"] = memory["rows_prefetched_bytes"] / memory["rows_of_a_batch_bytes"]
    for row in results:
        if row["collisions"] == EXPOSED_GOAL["collisions"]:
            figures["goal"] = EXPOSED_GOAL | {
                "reached": min(row["gone"].values()),
                "reached_by_round": [min(one.values()) for one in row["gone_by_round"]],
                "reached_beyond_dense": min(row["gone_beyond_dense"].values()),
            }
    return figures


def _removed(ms: dict[str, float]) -> dict[str, float]:
    """Share of TorchRec's exposed time that the prioritized exchange removes, for each of TorchRec's pipelines."""
    return {name: 1.0 - ms[PRIORITIZED] / ms[name] for name in (TORCHREC_BASE, TORCHREC_SPARSE_DIST)}


# ---- as text -----------------------------------------------------------------------------------------------------------------
def describe(figures: dict[str, Any]) -> str:
    """The figures as a table."""
    parameters, machine = figures["parameters"], figures["machine"]
    lines = [
        f"Exposed embedding exchange, {parameters['ranks']} ranks, {machine['device']}",
        _listed({name: value for name, value in machine.items() if name != "device"}),
        _listed({**figures["workload"], **figures["versions"]}),
        "",
        *_table(figures["results"]),
        "",
    ]
    if "line" in figures:
        line = figures["line"]
        lines.append(
            f"{PRIORITIZED}: exposed ms = {line['intercept']:.2f} + {line['slope'] / 100:.3f} per percentage point of collisions "
            f"(R2 {line['r2']:.4f})"
        )
    return "\n".join([*lines, *_memory_lines(figures["memory"]), _loss_line(figures["losses"]), *_goal_lines(figures)])


def _listed(values: dict[str, Any]) -> str:
    shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in values.items()}
    return ", ".join(f"{label(name).replace('_', ' ')} {value}" for name, value in shown.items())


def _table(results: Sequence[dict[str, Any]]) -> list[str]:
    widths = {name: max(12, len(name)) for name in EXCHANGE_VARIANTS}
    lines = [
        "collisions    dense  compute  "
        + "  ".join(f"{name:>{width}}" for name, width in widths.items())
        + "   exposed time removed",
        "target  met   ms/step  ms/step  "
        + "  ".join(f"{'exposed ms':>{width}}" for width in widths.values())
        + "   of base  of sparse",
    ]
    for row in results:
        lines.append(
            f"{row['collisions']:5.0%} {row['collisions_measured']:6.1%} "
            + "".join(f"{row['step_ms'][name]:9.1f}" for name in (DENSE_ONLY, COMPUTE_ONLY))
            + "  "
            + "  ".join(f"{row['exposed_ms'][name]:{width}.1f}" for name, width in widths.items())
            + f"   {row['gone'][TORCHREC_BASE]:7.1%}  {row['gone'][TORCHREC_SPARSE_DIST]:8.1%}"
        )
    return lines


def _memory_lines(memory: dict[str, Any]) -> list[str]:
    mebibytes = memory["rows_prefetched_bytes"] / 2**20
    lines = [f"prefetched rows in memory: {mebibytes:.2f} MiB per rank, {memory['extra_batches']:.2f} of a batch"]
    if memory["peak_bytes"]:
        peaks = ", ".join(f"{name} {peak / 2**20:.0f}" for name, peak in memory["peak_bytes"].items())
        lines.append(f"peak device memory beyond the models, MiB: {peaks}")
    return lines


def _loss_line(losses: dict[str, Any]) -> str:
    return (
        f"losses over {losses['steps']} steps, from {losses['first']:.4g} to {losses['last']:.4g}: "
        f"{'equal' if losses['equal'] else 'DIFFERENT'}, largest relative difference {max(losses['apart'].values()):.1e} "
        f"(tolerance {losses['tolerance']:.0e})"
    )


def _goal_lines(figures: dict[str, Any]) -> list[str]:
    if "goal" not in figures:
        return []
    goal = figures["goal"]
    outcome = "reached" if goal["reached"] >= goal["gone"] else "missed"
    lines = [
        f"goal at {goal['collisions']:.0%} collisions, {goal['gone']:.1%} of TorchRec's exposed time removed: {outcome}, "
        f"{goal['reached']:.1%} ({goal['reached_beyond_dense']:.1%} if lookups and updates count as exposed)"
    ]
    if len(goal["reached_by_round"]) > 1:
        lines.append(f"by round: {', '.join(f'{share:.1%}' for share in goal['reached_by_round'])}")
    return lines
