"""The generated tables of ``docs/failures.md`` and ``docs/checkpoints.md``. The text of the pages is written by hand."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.results import StoredResult, command, short_machine
from benchmarks.harness.tables import markdown

LEAST_PART_MS = 0.005  # A part of a save that takes less is not in the table.


def failures(results: Mapping[str, StoredResult]) -> dict[str, str]:
    """The blocks of ``docs/failures.md``, by name."""
    return {"kills": kills(results), "soak": soak(results)}


def checkpoints(results: Mapping[str, StoredResult]) -> dict[str, str]:
    """The blocks of ``docs/checkpoints.md``, by name."""
    return {"cost of a save": save_costs(results), "delay by a save": save_delays(results)}


def kills(results: Mapping[str, StoredResult]) -> str:
    """What became of the trainings whose ranks were killed, one row per seed."""
    parts = []
    for name, found in results.items():
        if found["benchmark"] != "faults":
            continue
        rows = [
            {
                "seed": row["seed"],
                "kills": row["kills"],
                "other failures": sum(row["by_moment"].get(kind, 0) for kind in ("hang", "memory", "mps")),
                "trainings": row["trainings"],
                "with another number of ranks": row["with_resharding"],
                "other ranks that ended": row["survivors"],
                "median end": f"{row['median_end_seconds']:.1f} s",
                "latest end": f"{row['longest_end_seconds']:.1f} s",
                "median restart": f"{row['median_restart_seconds']:.1f} s",
                "trainings with a problem": len(row["problems"]),
            }
            for row in found["rows"]
        ]
        parts += [markdown.table(rows), _origin(name, found)]
    return "\n\n".join(parts)


def soak(results: Mapping[str, StoredResult]) -> str:
    """What the processes of a long training held at its end, compared with its second quarter."""
    parts = []
    for name, found in results.items():
        if found["benchmark"] != "soak":
            continue
        rows = [
            {
                "rank": row["rank"],
                **{what: f"{grown:+g}" for what, grown in row["grown"].items()},
                "steps/s": f"{row['steps_per_second']:.1f}",
                "change of steps/s": f"{row['rate_change_percent']:+.1f}%",
            }
            for row in found["rows"]
        ]
        parts += [f"{found['steps']:,} steps on {found['ranks']} ranks:", markdown.table(rows), _origin(name, found)]
    return "\n\n".join(parts)


def save_costs(results: Mapping[str, StoredResult]) -> str:
    """How long a save holds the training up, and what it writes."""
    parts = []
    for name, found in results.items():
        if found["benchmark"] != "checkpoints":
            continue
        size = found["parameters"]
        rows = [
            {
                "save": row["save"],
                "training waits": f"{row['stall_ms']:,.0f} ms",
                **_beside(row, found["step_ms"]),
                "complete after": f"{row['complete_ms']:,.0f} ms",
                "written": f"{row['written_mib']:,.1f} MiB",
                "resume, to the first step": f"{row['load_ms']:,.0f} ms",
            }
            for row in found["rows"]
        ]
        parts += [
            f"A table of {size['rows']:,} x {size['dim']} on {size['ranks']} ranks, {size['changed_percent']:.1f}% of whose "
            f"rows have changed since the last full save; a step takes {found['step_ms']:,.0f} ms:",
            markdown.table(rows),
            *_finding(found),
            *_lost_host(found),
            *_stall_parts(found),
            _origin(name, found),
        ]
    return "\n\n".join(parts)


def save_delays(results: Mapping[str, StoredResult]) -> str:
    """What asynchronous saves take from a training that does not wait for its device."""
    found = {name: result for name, result in results.items() if result["benchmark"] == "save_delay"}
    rows = []
    for result in found.values():
        delays, calls, beside = (
            [row[key] for row in result["rows"]] for key in ("delay_ms", "call_ms", "slower_beside_ms")
        )
        rows.append(
            {
                "table": f"{result['rows_of_table']:,} x {result['dim']}",
                "ranks": result["parameters"]["ranks"],
                "machine": short_machine(result),
                "saves": len(delays),
                "a step": f"{result['step_ms']:,.1f} ms",
                "delay by a save": f"{result['delay_ms']:.2f} ms ({min(delays):.2f} to {max(delays):.2f})",
                "in percent of a step": f"{result['delay_percent_of_step']:.1f}%",
                "call of `save_checkpoint`": f"{statistics.median(calls):.1f} ms",
                "later steps during the save": f"{statistics.median(beside):+.2f} ms",
                "written": f"{result['saved_bytes'] / 2**20:,.0f} MiB",
            }
        )
    return "\n\n".join([markdown.table(rows), *(_origin(name, result) for name, result in found.items())])


def _beside(row: Mapping[str, Any], step_ms: float) -> dict[str, str]:
    """What a save does to the steps. Older results lack it."""
    if "step_beside_ms" not in row:
        return {}
    beside = row["step_beside_ms"]
    return {
        "in steps": f"{row['stall_ms'] / step_ms:.2f}",
        "a step during the save": "" if beside is None else f"{beside:,.0f} ms",
    }


def _finding(found: StoredResult) -> list[str]:
    """What it costs to find the changed rows, by what a save does and by what it could do. Older results lack it."""
    if "finding" not in found:
        return []
    costs = found["finding"]
    compare, mark = costs["compare_ms"], costs["mark_ms"]
    return [
        f"To compare a rank's shard with the last full save takes {compare:,.{0 if compare >= 1 else 2}f} ms per save. "
        f"To mark the rows of a step would take {mark:.2f} ms in every step."
    ]


def _lost_host(found: StoredResult) -> list[str]:
    """How long a resume from copies in host memory takes after the loss of a host. Older results lack it."""
    return [
        f"After the memory of one host is lost, the resume from copies takes {row['load_without_a_host_ms']:,.0f} ms."
        for row in found["rows"]
        if row.get("load_without_a_host_ms") is not None
    ]


def _stall_parts(found: StoredResult) -> list[str]:
    """Where the training thread spends the time of an asynchronous save. Older results lack it."""
    if "parts" not in found:
        return []
    asynchronous = {row["save"] for row in found["rows"] if row["step_beside_ms"] is not None}
    saves = [row for row in found["parts"] if row["save"] in asynchronous]
    names = [name for name in found["parts"][0] if name != "save"]
    rows = [
        {"part": name.removesuffix(" ms")} | {row["save"]: f"{row[name]:.2f} ms" for row in saves}
        for name in names
        if any(row[name] >= LEAST_PART_MS for row in saves)
    ]
    rows.append({"part": "all"} | {row["save"]: f"{sum(row[name] for name in names):.2f} ms" for row in saves})
    return ["Where the training thread of rank 0 spends the shortest of these saves:", markdown.table(rows)]


def _origin(name: str, found: StoredResult) -> str:
    link = f"[{name}](../benchmarks/results/{name}.json)"
    return f"{short_machine(found)}, {found['date'][:10]}, `{command(found)}` ({link})"
