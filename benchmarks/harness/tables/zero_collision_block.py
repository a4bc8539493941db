"""The generated tables of ``docs/zero_collision.md``. The page's text is written by hand."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.harness.results import StoredResult, command, short_machine
from benchmarks.harness.tables import markdown


def quality(results: Mapping[str, StoredResult]) -> str:
    """HR@10 on a catalogue that drifts."""
    parts = []
    for name, found in results.items():
        if found["benchmark"] != "drifting_catalogue":
            continue
        rows = [
            {
                "ids": f"`{row['ids']}`" if row["ids"].startswith("id %") else row["ids"],
                "HR@10": f"{row['HR@10 %']:.1f}% ± {row['noise']:.1f}",
                "HR@10, young items": f"{row['young items, HR@10 %']:.1f}% ± {row['noise of these']:.1f}",
            }
            for row in found["quality"]
        ]
        parts += [
            f"{found['places']} items on sale, {found['rows']:,} rows, {found['steps']} steps, {found['seeds']} seeds, "
            f"`ttl={found['ttl']}`:",
            markdown.table(rows),
            f"[`{name}.json`](../benchmarks/results/{name}.json): `{command(found)}`, {found['date'][:10]}.",
        ]
    return "\n\n".join(parts)


def collisions(results: Mapping[str, StoredResult]) -> str:
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
