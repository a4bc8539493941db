"""The generated tables about personal tokens in ``docs/models.md``. The page's text is written by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.harness.results import StoredResult, command, short_machine
from benchmarks.harness.tables import markdown

Results = Mapping[str, StoredResult]


def quality(results: Results) -> str:
    """HR@10 of personal tokens beside recent events only and the full history."""
    return "\n\n".join(part for name, found in _of("personal_tokens", results) for part in _quality(name, found))


def _quality(name: str, found: StoredResult) -> Iterator[str]:
    parameters = found["parameters"]
    model = (
        f"{parameters['layers']} layers of {parameters['width']}, {parameters['steps']} steps, {short_machine(found)}"
    )
    for data in dict.fromkeys(row["data"] for row in found["quality"]):
        own = [row for row in found["quality"] if row["data"] == data]
        recent = parameters["recent"][data != "synthetic"]
        yield f"{data.capitalize()}: at least {recent} recent events, `refresh={recent}`; {model}; {own[0]['cases']:,} cases:"
        yield markdown.table([_quality_row(row) for row in own])
        ages = [row for row in found["ages"] if row["data"] == data]
        if ages:
            yield "HR@10 of 4 tokens by the age of the state, in events:"
            yield markdown.table([{key: value for key, value in row.items() if key != "data"} for row in ages])
    yield _source(name, found)


def _quality_row(row: Mapping[str, Any]) -> dict[str, Any]:
    noise = "" if row["noise"] is None else f" ± {row['noise']:.3f}"  # one seed has none
    return {
        "variant": row["variant"],
        "HR@10": f"{row['HR@10']:.3f}{noise}",
        "NDCG@10": f"{row['NDCG@10']:.3f}",
        "recovered": "-" if row["recovered %"] is None else f"{row['recovered %']:.0f}%",
        "FLOPs to serve, of full history": f"{row['serving FLOPs, % of full']:.0f}%",
        "seeds": row["seeds"],
    }


def serving(results: Results) -> str:
    """Latency of the three ways to serve."""
    parts = []
    for name, found in _of("serving", results):
        model, events = found["model"], found["events"]
        parts += [
            f"{model['layers']} layers of {model['width']}, {events['history']:,} + {events['recent']} events, "
            f"{model['items']:,} items, {short_machine(found)}:",
            markdown.table(found["serving"]),
        ]
        if "device work" in found:
            parts += [
                "Kernels, copies and fills of a request, and the time in which they ran. The rest of a latency is the time "
                "between them, and the copies from and to the host:",
                markdown.table(found["device work"]),
            ]
        parts.append(_source(name, found))
    return "\n\n".join(parts)


def _of(benchmark: str, results: Results) -> Iterator[tuple[str, StoredResult]]:
    return ((name, found) for name, found in results.items() if found["benchmark"] == benchmark)


def _source(name: str, found: StoredResult) -> str:
    return f"[`{name}.json`](../benchmarks/results/{name}.json): `{command(found)}`, {found['date'][:10]}."
