"""The recorded steps as a trace for Perfetto or chrome://tracing: one process per rank, one thread per track."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_freescale.bubbles.records import Run
from lightning_freescale.bubbles.timeline import ENGINE, Step

STEPS = "steps"


def events(run: Run) -> Iterator[dict[str, Any]]:
    """Trace events of all ranks on one clock, in microseconds from the first recorded step."""
    indices = run.indices
    origin = min(step.start for step in run.step(indices[0]))
    for rank in range(run.ranks):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    threads: dict[tuple[int, str], int] = {}
    for index in indices:
        for rank, step in enumerate(run.step(index)):
            for track, name, start, end, more in _intervals(step):
                key = (rank, track)
                if key not in threads:
                    # Steps on top, then the engine, then the rest as they come.
                    threads[key] = {STEPS: 0, ENGINE: 1}.get(track, 2 + len(threads))
                    yield {
                        "ph": "M", "name": "thread_name", "pid": rank, "tid": threads[key], "args": {"name": track},
                    }  # fmt: skip
                    yield {
                        "ph": "M", "name": "thread_sort_index", "pid": rank, "tid": threads[key],
                        "args": {"sort_index": threads[key]},
                    }  # fmt: skip
                yield {
                    "ph": "X", "name": name, "cat": more.pop("cat"), "pid": rank, "tid": threads[key],
                    "ts": round(1e6 * (start - origin), 1), "dur": round(1e6 * (end - start), 1),
                    "args": {"step": index, **more},
                }  # fmt: skip


def _intervals(step: Step) -> Iterator[tuple[str, str, float, float, dict[str, Any]]]:
    yield STEPS, f"step {step.index}", step.start, step.end, {"cat": "step", **step.counts}
    for span in step.spans:
        yield span.track, span.kind.value, span.start, span.end, {"cat": span.kind.role.value}


def write_trace(run: Run, path: Path) -> None:
    """Write the trace of all ranks to one file."""
    with path.open("w") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(events(run)):
            file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")
