"""Computes the bubble from a profiler's trace: wall time minus the time in which kernels of the model run on the compute stream.

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for batch in batches:
            mark_step()
            step(batch)
        mark_step()
    profiler.export_chrome_trace("trace.json")
    steps = by_hand(json.loads(Path("trace.json").read_text())["traceEvents"])

``BubbleMonitor`` does not see kernels. It sees only the events that it records on the compute stream. The two compare as follows:

* Step: both use the time of the compute stream. The monitor measures from event to event, this module from marker to marker. A
  marker is a kernel that does nothing, launched in the same hook. Both include what the profiler costs the host.
* Useful work: here, the time of kernels. For the monitor, the stream's time in forward, backward and optimizer without the
  exchanges. That includes the gap between two kernels of one layer, while the host launches the second one. So short ``gaps``
  are no bubble here either. Longer ones are bubble here and useful work there. Compare on a model whose kernels last longer
  than their launches.
* Kernels inside an exchange are part of it for the monitor. The trace does not say to what a kernel belongs. FBGEMM's kernels
  that TorchRec calls in its exchanges take most of their time, 4 to 6 ms for 64,000 events: ``sorting`` sorts ids by owner, and
  rows by feature. They are not busy here. The others, such as the gather of rows in the order of the batch, are busy here.
* NCCL's kernels mostly wait for other ranks, and copies are not compute, so neither counts as busy. Kernels of other streams do
  not run on the compute stream: ``elsewhere`` is the time in which they ran while the compute stream was idle. The synchronous
  run has no such kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from lightning_freescale.bubbles.attribution import overlap, union

MARKER = "spin_kernel"  # the kernel of torch.cuda._sleep
SORTING = ("bucketize", "permute_2D")  # in the names of FBGEMM's kernels that only exchanges of TorchRec call
GAP = 30e-6  # seconds; shorter idle times are kernel launches, not waits

Intervals = list[tuple[float, float]]


class Profiled(NamedTuple):
    """One step of one rank, in seconds."""

    wall: float
    busy: float  # compute kernels on the compute stream
    sorting: float  # kernels on the compute stream that sort for an exchange
    elsewhere: float  # compute kernels on other streams while there were none on the compute stream
    exchanging: float  # NCCL's kernels while there were no compute kernels on the compute stream
    copying: float  # copies on the compute stream
    gaps: float  # idle times of the compute stream shorter than GAP

    @property
    def bubble(self) -> float:
        return self.wall - self.busy - self.gaps


def mark_step() -> None:
    """Mark the end of a step, and the start of the next one, in the trace of the current stream."""
    torch.cuda._sleep(1)


def by_hand(events: Iterable[Mapping[str, Any]]) -> list[Profiled]:
    """The steps between the markers of a profiler's trace.

    Args:
        events: ``traceEvents`` of a Chrome trace, times in microseconds.

    Raises:
        ValueError: if there are fewer than two markers, or if they are not all on one stream.
    """
    kernels = [event for event in events if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy")]
    markers = sorted((event for event in kernels if MARKER in event["name"]), key=lambda event: event["ts"])
    streams = {event["args"]["stream"] for event in markers}
    if len(markers) < 2 or len(streams) > 1:
        raise ValueError(f"{len(markers)} markers on streams {sorted(streams)} among {len(kernels)} kernels and copies")
    (engine,) = streams
    groups: dict[str, Intervals] = {"busy": [], "sorting": [], "elsewhere": [], "exchanging": [], "copying": []}
    for event in kernels:
        if MARKER not in event["name"]:
            start = event["ts"] / 1e6
            groups[_group(event, engine)].append((start, start + event["dur"] / 1e6))
    merged = {name: union(intervals) for name, intervals in groups.items()}
    return [_step(first["ts"] / 1e6, last["ts"] / 1e6, **merged) for first, last in pairwise(markers)]


def _group(event: Mapping[str, Any], engine: int) -> str:
    if event["cat"] == "gpu_memcpy":
        return "copying" if event["args"]["stream"] == engine else "elsewhere"
    if "nccl" in event["name"].lower():
        return "exchanging"
    if event["args"]["stream"] != engine:
        return "elsewhere"
    return "sorting" if any(name in event["name"] for name in SORTING) else "busy"


def _step(
    start: float,
    end: float,
    busy: Intervals,
    sorting: Intervals,
    elsewhere: Intervals,
    exchanging: Intervals,
    copying: Intervals,
) -> Profiled:
    inside = [(max(a, start), min(b, end)) for a, b in busy if a < end and b > start]
    edges = [start, *(edge for interval in inside for edge in interval), end]
    idle = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
    return Profiled(
        wall=end - start,
        busy=sum(b - a for a, b in inside),
        sorting=overlap([(start, end)], sorting),
        elsewhere=overlap(idle, elsewhere),
        exchanging=overlap(idle, exchanging),
        copying=overlap([(start, end)], copying),
        gaps=sum(b - a for a, b in idle if b - a < GAP),
    )
