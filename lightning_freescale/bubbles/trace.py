"""Writes a run as a trace for Perfetto or chrome://tracing: one process per rank, one thread per track."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_freescale.bubbles.records import RecordedRun
from lightning_freescale.bubbles.spans import ENGINE, Step

STEP_TRACK = "steps"


def trace_events(run: RecordedRun) -> Iterator[dict[str, Any]]:
    """Trace events of all ranks, in microseconds from the start of the first recorded step."""
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
                    # The steps are on top, then the engine, then the other tracks in order of appearance.
                    threads[key] = {STEP_TRACK: 0, ENGINE: 1}.get(track, 2 + len(threads))
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
    """Track, name, start, end and arguments of the step itself and of its spans."""
    yield STEP_TRACK, f"step {step.index}", step.start, step.end, {"cat": "step", **step.counts}
    for span in step.spans:
        yield span.track, span.kind.value, span.start, span.end, {"cat": span.kind.role.value}


def write_trace(run: RecordedRun, path: Path) -> None:
    """Write the trace of all ranks to ``path``."""
    with path.open("w") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(trace_events(run)):
            file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")
