"""The table of ``docs/results.md`` about tables in host memory behind a cache."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from benchmarks.harness.results import StoredResult, command, short_machine
from benchmarks.harness.tables import markdown


def block(results: Mapping[str, StoredResult]) -> str:
    """One table for each stored result."""
    parts = []
    for name, found in results.items():
        if found["benchmark"] != "large_tables":
            continue
        rows = [
            {
                "tables": row["tables"],
                "exchange": row["exchange"],
                "ms of a step": f"{row['step ms']:.1f} ({row['lowest']:.1f} to {row['highest']:.1f})",
                "bubble ms": f"{row['bubble ms']:.1f} "
                f"({min(row['bubble ms by round']):.1f} to {max(row['bubble ms by round']):.1f})",
                "hits": "" if row["hits"] is None else f"{row['hits']:.1%}",
                "rows from host memory": ""
                if row["rows from host memory"] is None
                else f"{row['rows from host memory']:,.0f}",
            }
            for row in found["step_times"]
        ]
        parameters, workload = found["parameters"], found["workload"]
        parts += [
            f"{parameters['ranks']} ranks, {workload['rows']:,} rows of {workload['dim']} numbers "
            f"({parameters['gigabytes']:g} GB), a cache for {parameters['cache']:.0%} of them, {workload['ids_per_rank']:,} ids "
            f"of a rank's batch, {found['collisions']:.0%} collisions; the dense part alone takes "
            f"{statistics.mean(found['dense_ms']):.1f} ms; mean of {parameters['rounds']} rounds, and the lowest and the "
            f"highest round ({short_machine(found)}):",
            markdown.table(rows),
            f"[`{name}.json`](../benchmarks/results/{name}.json): `{command(found)}`, {found['date'][:10]}.",
        ]
    return "\n\n".join(parts) or "No result is stored yet."
