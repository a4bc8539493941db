"""The generated tables of ``docs/zero_collision.md``. The page's text is written by hand."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.harness.results import StoredResult, command, short_machine
from benchmarks.harness.tables import markdown


def blocks(results: Mapping[str, StoredResult]) -> dict[str, str]:
    """All blocks of the page, by name."""
    return {
        "collisions": collisions(results),
        "step with raw ids": step(results),
        "drifting catalogue": quality(results),
    }


def quality(results: Mapping[str, StoredResult]) -> str:
    """HR@10 on a catalogue that drifts: synthetic, and the events of files played in time order."""
    parts = []
    for name, found in results.items():
        if found["benchmark"] != "drifting_catalogue":
            continue
        rows = [
            {
                "ids": f"`{row['ids']}`" if row["ids"].startswith("id %") else row["ids"],
                "HR@10": _percent(row["HR@10 %"], row["noise"]),
                "HR@10, young items": _percent(row["young items, HR@10 %"], row["noise of these"]),
            }
            for row in found["quality"]
        ]
        what = (
            f"`{found['file']}`, {found['ids']:,} items, of which at most {found['places']:,} are live"
            if "file" in found
            else f"{found['places']} items on sale"
        )
        parts += [
            f"{what}, {found['rows']:,} rows, {found['steps']} steps, {found['seeds']} seeds, `ttl={found['ttl']}`:",
            markdown.table(rows),
            _origin(name, found),
        ]
    return "\n\n".join(parts)


def _percent(value: float, noise: float) -> str:
    digits = 1 if value >= 10 else 2
    return f"{value:.{digits}f}% ± {noise:.{digits}f}"


def step(results: Mapping[str, StoredResult]) -> str:
    """The time of a step with raw ids and with dense ids."""
    parts = []
    for name, found in results.items():
        if found["benchmark"] != "zero_collision_step":
            continue
        rows = [
            {
                "ids": row["ids"],
                "ms of a step": f"{row['step ms']:.1f}",
                "divided by dense ids": f"{row['step / dense']:.3f} ({row['lowest']:.3f} to {row['highest']:.3f})",
                "insert ms": "" if row["insert ms"] is None else f"{row['insert ms']:.2f}",
                "look-up ms": "" if row["look-up ms"] is None else f"{row['look-up ms']:.2f}",
            }
            for row in found["step_times"]
        ]
        parameters, workload = found["parameters"], found["workload"]
        parts += [
            f"{parameters['ranks']} ranks, {workload['rows']:,} rows at a load of {found['load']:.2f}, "
            f"{workload['ids_per_rank']:,} ids of a rank's batch, {found['new_ids_percent']:.0f}% of them new; medians of "
            f"{parameters['rounds']} rounds, and the lowest and the highest round ({short_machine(found)}):",
            markdown.table(rows),
            _origin(name, found),
        ]
    return "\n\n".join(parts)


def _origin(name: str, found: StoredResult) -> str:
    return f"[`{name}.json`](../benchmarks/results/{name}.json): `{command(found)}`, {found['date'][:10]}."


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
            _origin(name, found),
        ]
    return "\n\n".join(parts)
