"""Compares the bubble of the monitor with the kernels in a profiler's trace of the same steps.

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for batch in batches:
            mark_step()
            step(batch)
        mark_step()
    profiler.export_chrome_trace("trace.json")
    steps = by_hand(json.loads(Path("trace.json").read_text())["traceEvents"])
    differences = [compare(profiled, useful(step)) for profiled, step in zip(steps, recorded_steps)]

``BubbleMonitor`` does not see kernels. It sees only the events that it records on the compute stream. The two compare as follows:

* Step: both use the time of the compute stream. The monitor measures from event to event, this module from marker to marker. A
  marker is a kernel that does nothing, launched in the same hook. Both include what the profiler costs the host.
* Useful work: here, the time of the model's kernels. For the monitor, the stream's time in forward, backward and optimizer
  without the exchanges. So the gap between two kernels of one layer, while the host launches the second kernel, is bubble here
  and useful work there. ``idle_in_compute`` is the sum of such gaps. It depends on the host.
* Exchange: here, the kernels of NCCL, and those of FBGEMM with which TorchRec sorts ids by owner and rows by feature. The latter
  take 4 to 6 ms for 64,000 events. Other kernels of an exchange, such as the gather of rows in the order of the batch, count as
  kernels of the model here, because their names do not show to what they belong. They take less than 1 ms.
* Copies are not compute. Kernels of other streams do not run on the compute stream: ``elsewhere`` is the time in which they ran
  while the compute stream was idle. The synchronous run has no such kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from lightning_freescale.bubbles.attribution import flatten, overlap, union
from lightning_freescale.bubbles.spans import ENGINE, Role, Step

MARKER = "spin_kernel"  # the kernel of torch.cuda._sleep
SORTING = ("bucketize", "permute_2D")  # in the names of FBGEMM's kernels that only exchanges of TorchRec call

Intervals = list[tuple[float, float]]  # disjoint, in order of time


class Profiled(NamedTuple):
    """One step of one rank in a trace. Times are in seconds, and intervals begin to count where the step begins."""

    wall: float
    busy: Intervals  # the model's kernels on the compute stream
    exchanging: Intervals  # kernels of exchanges while there were no kernels of the model on the compute stream
    elsewhere: (
        float  # kernels and copies on other streams while there were no kernels of the model on the compute stream
    )
    copying: float  # copies on the compute stream

    @property
    def bubble(self) -> float:
        return self.wall - total(self.busy)


class Difference(NamedTuple):
    """Where the monitor and the trace of a step differ, in seconds.

    The bubble of the trace is that of the monitor, plus ``exchange_in_compute`` and ``idle_in_compute``, less
    ``model_in_bubble``.
    """

    model_in_bubble: float  # kernels of the model in what the monitor counts as bubble
    exchange_in_compute: float  # exchanges, without a kernel of the model, in what the monitor counts as useful work
    idle_in_compute: float  # nothing of both in what the monitor counts as useful work


def mark_step() -> None:
    """Mark the end of a step, and the start of the next one, in the trace of the current stream."""
    torch.cuda._sleep(1)


def total(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds of disjoint intervals."""
    return sum(end - start for start, end in intervals)


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
    groups: dict[str, Intervals] = {"busy": [], "exchanging": [], "elsewhere": [], "copying": []}
    for event in kernels:
        if MARKER not in event["name"]:
            start = event["ts"] / 1e6
            groups[_group(event, engine)].append((start, start + event["dur"] / 1e6))
    merged = {name: union(intervals) for name, intervals in groups.items()}
    return [_step(first["ts"] / 1e6, last["ts"] / 1e6, merged) for first, last in pairwise(markers)]


def useful(step: Step) -> Intervals:
    """What the monitor counts as useful work, in seconds since the step began."""
    segments = flatten((span for span in step.spans if span.track == ENGINE), step.start, step.end)
    return union((s.start - step.start, s.end - step.start) for s in segments if s.span.kind.role is Role.COMPUTE)


def compare(profiled: Profiled, useful_work: Sequence[tuple[float, float]]) -> Difference:
    """Compare a step in the trace with what the monitor counts as useful work in the same step."""
    busy, exchanging = (overlap(useful_work, intervals) for intervals in (profiled.busy, profiled.exchanging))
    return Difference(total(profiled.busy) - busy, exchanging, total(useful_work) - busy - exchanging)


def _group(event: Mapping[str, Any], engine: int) -> str:
    if event["cat"] == "gpu_memcpy":
        return "copying" if event["args"]["stream"] == engine else "elsewhere"
    if "nccl" in event["name"].lower():
        return "exchanging"
    if event["args"]["stream"] != engine:
        return "elsewhere"
    return "exchanging" if any(name in event["name"] for name in SORTING) else "busy"


def _step(start: float, end: float, groups: Mapping[str, Intervals]) -> Profiled:
    step = [(start, end)]
    busy = _common(step, groups["busy"])
    edges = [start, *(edge for interval in busy for edge in interval), end]
    idle = list(zip(edges[::2], edges[1::2], strict=True))
    exchanging = _common(idle, groups["exchanging"])
    return Profiled(
        wall=end - start,
        busy=[(a - start, b - start) for a, b in busy],
        exchanging=[(a - start, b - start) for a, b in exchanging],
        elsewhere=overlap(idle, groups["elsewhere"]),
        copying=overlap(step, groups["copying"]),
    )


def _common(first: Intervals, second: Intervals) -> Intervals:
    """The intervals that two lists have in common."""
    pairs = ((max(a, c), min(b, d)) for a, b in first for c, d in second if a < d and c < b)
    return [(start, end) for start, end in pairs if start < end]
