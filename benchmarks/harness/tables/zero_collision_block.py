"""The generated tables of ``docs/zero_collision.md``. The page's text is written by hand."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.harness.results import StoredResult, command, short_machine
from benchmarks.harness.tables import markdown


def block(results: Mapping[str, StoredResult]) -> str:
    """Collisions by load, and the time of a batch."""
    parts = []
    for name, found in results.items():
        if found["benchmark"] != "zero_collision":
            continue
        shares = [
            {key: f"{value:.3g}%" if key != "load" else value for key, value in row.items()} for row in found["loads"]
        ]
        times = [
            {key: f"{value:.3g}" if key != "ids" else f"{value:,}" for key, value in row.items()}
            for row in found["times"]
        ]
        parts += [
            f"Ids that share a row, in a table of {found['rows']:,} rows:",
            markdown.table(shares),
            f"Time of one batch at a load of 0.75 ({short_machine(found)}):",
            markdown.table(times),
            f"[`{name}.json`](../benchmarks/results/{name}.json): `{command(found)}`, {found['date'][:10]}.",
        ]
    return "\n\n".join(parts)
