"""``Timeline``: records what a rank does in a step, and when.

A span costs nanoseconds between recorded steps and a few microseconds within one. On CPU a moment is a reading of the monotonic
clock. On CUDA it is an event on a stream: it shows when the *device* gets there, and the host does not wait for it. So a span
on the compute stream around ``stream.wait_event(...)``, or around a late host, lasts exactly as long as the device is idle.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_freescale.bubbles.clock import DeviceClock
from lightning_freescale.bubbles.pending import Moment, PendingStep
from lightning_freescale.bubbles.spans import ENGINE, Kind, Span, Step
from lightning_freescale.runtime.streams import copy_to_host


class _OpenSpan:
    """A span that has not ended: the context manager of :meth:`Timeline.span`."""

    __slots__ = ("_joined", "_kind", "_start", "_stream", "_timeline", "_track")

    def __init__(self, timeline: Timeline, kind: Kind, stream: Any, joined: Moment | None):
        self._timeline, self._kind, self._stream, self._joined = timeline, kind, stream, joined

    def __enter__(self) -> None:
        self._track = self._timeline.track(self._stream)
        self._start = self._timeline.mark(self._stream)

    def __exit__(self, *error: object) -> None:
        end = self._timeline.mark(self._stream)
        self._timeline.add(self._kind, self._start, end, track=self._track, joined=self._joined)


class TrackedTransfer:
    """An asynchronous collective that the timeline records; made by :meth:`Timeline.transfer`."""

    __slots__ = ("_issued", "_kind", "_timeline")

    def __init__(self, timeline: Timeline, kind: Kind | str, issued: Moment | None):
        self._timeline, self._kind, self._issued = timeline, kind, issued

    def wait(self, work: Any) -> None:
        """``work.wait()``, and record it. ``work`` is that of the collective."""
        if self._timeline.active:
            with self.waiting():
                work.wait()
        else:
            work.wait()

    def waiting(self) -> AbstractContextManager[None]:
        """Put it around the wait for the collective: ``with transfer.waiting(): work.wait()``."""
        return self._timeline.span(self._kind, joined=math.nan if self._issued is None else self._issued)


_NOT_RECORDED: AbstractContextManager[None] = nullcontext()


class Timeline:
    """Records the spans of chosen steps, and does nothing between them.

        timeline = Timeline()
        timeline.begin_step(17)
        with timeline.span("dense_forward"):
            ...
        timeline.end_step()
        for step in timeline.take(): ...

    Any thread and any CUDA stream may add spans. ``stream=None`` means the current stream on CUDA and the current thread on CPU.
    A string is the name of a track; its spans are on the host's clock.

    Args:
        clock: seconds, monotonic. The clocks of the ranks need not agree (see ``clock.py``).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.active = False  # whether a step is being recorded
        self._pending: PendingStep | None = None
        self._done: deque[PendingStep] = deque()
        self._carry: tuple[int, list[Span]] = (-1, [])  # index of a step, and background spans that continue in it
        self._thread = threading.get_ident()
        self._device: torch.device | None = None
        self._compute: torch.cuda.Stream | None = None
        self._idle: torch.cuda.Stream | None = None
        self._watchers: dict[str, torch.cuda.Stream] = {}
        self._names: dict[int, str] = {}
        self._pool: list[torch.cuda.Event] = []
        self._device_clock = DeviceClock()
        self._sampled: torch.cuda.Event | None = None  # event of the last clock sample

    def open(self, device: torch.device) -> None:
        """Choose the engine: the calling thread, or the current stream of a CUDA device."""
        self._thread, self._device = threading.get_ident(), device
        if device.type == "cuda":
            self._compute = torch.cuda.current_stream(device)
            self._idle = torch.cuda.Stream(device)  # for clock samples only, see DeviceClock
            self._names[self._compute.stream_id] = ENGINE

    def name_stream(self, stream: torch.cuda.Stream, track: str) -> None:
        """Set the name that a CUDA stream has in pictures and traces."""
        self._names.setdefault(stream.stream_id, track)

    # ---- steps -----------------------------------------------------------------------------------------------------
    def begin_step(self, index: int) -> None:
        """Start to record. A step that has begun and not ended is dropped."""
        clock_sample = None
        if self._idle is not None:
            clock_sample = (self._event(), self.clock())
            clock_sample[0].record(self._idle)
        self._pending = PendingStep(index, self.mark(), clock_sample)
        self.active = True

    def end_step(self) -> None:
        """Stop recording. The step is available from :meth:`take`."""
        pending, self._pending, self.active = self._pending, None, False
        if pending is not None:
            pending.end = self.mark()
            self._done.append(pending)

    def cancel_step(self) -> None:
        """Stop recording, and drop the step."""
        self._pending, self.active = None, False

    def take(self, upto: int | None = None) -> list[Step]:
        """Remove and return the recorded steps, oldest first, up to index ``upto``. Waits for the device to reach their ends."""
        taken = []
        while self._done and (upto is None or self._done[0].index <= upto):
            taken.append(self._done.popleft())
            for event in taken[-1].events():
                event.synchronize()
        steps = [self._cut(pending.resolve(self._sample(pending))) for pending in taken]
        self._reuse_events(taken)
        return steps

    def _sample(self, pending: PendingStep) -> float:
        """The time of the step's clock sample on the host's clock; 0 on CPU, where there is none."""
        if pending.clock_sample is None:
            return 0.0
        event, host = pending.clock_sample
        elapsed = 0.0 if self._sampled is None else self._sampled.elapsed_time(event) / 1e3
        self._sampled = event
        return self._device_clock.sample(host, elapsed)

    def _reuse_events(self, taken: list[PendingStep]) -> None:
        """Return the events of resolved steps to the pool, except those that a later step uses too."""
        later = [*self._done, *([self._pending] if self._pending is not None else [])]
        needed = {id(event) for pending in later for event in pending.events()} | {id(self._sampled)}
        free = {id(event): event for pending in taken for event in pending.events()}
        self._pool.extend(event for key, event in free.items() if key not in needed)

    def _cut(self, step: Step) -> Step:
        """Cut background spans at the end of the step. What is left of them belongs to the next step."""
        index, carried = self._carry
        spans = [*step.spans, *(carried if index == step.index else [])]
        beyond = [span._replace(start=step.end) for span in spans if span.track != ENGINE and span.end > step.end]
        self._carry = (step.index + 1, beyond)
        inside = [
            span._replace(start=max(span.start, step.start), end=min(span.end, step.end))
            for span in spans
            if span.track == ENGINE or (span.start < step.end and span.end > step.start)
        ]
        inside.sort(key=lambda span: span.start)
        return replace(step, spans=tuple(inside))

    # ---- within a step ---------------------------------------------------------------------------------------------
    def span(
        self, kind: Kind | str, stream: torch.cuda.Stream | str | None = None, joined: Moment | None = None
    ) -> AbstractContextManager[None]:
        """Record the time of a ``with`` block.

        Args:
            kind: of the span.
            stream: where the work runs, see the class.
            joined: when this rank joined the collective, if that was before the span; ``nan`` for work of an exchange that
                does not wait for other ranks.
        """
        return _OpenSpan(self, Kind(kind), stream, joined) if self.active else _NOT_RECORDED

    def transfer(self, kind: Kind | str, work: Any, nbytes: int = 0) -> TrackedTransfer:
        """Record a collective that has just started, ``work = dist.all_to_all_single(..., async_op=True)``.

        The collective shows on a track of its own from start to end. The wait for it (:meth:`TrackedTransfer.waiting`) shows
        on the track that waits. ``nbytes`` is what this rank sends.
        """
        if not self.active:
            # The next step may be recorded and wait for this collective. It then needs the time at which this rank joined.
            return TrackedTransfer(self, kind, self.clock() if self._compute is None else None)
        kind = Kind(kind)
        self.count("bytes", nbytes)
        issued, pending, track = self.mark(), self._pending, f"{kind.value} (async)"

        def finished(_: object = None) -> None:
            if pending is not None:
                pending.spans.append((kind, track, issued, self.mark(), issued))

        if self._compute is None:
            work.get_future().add_done_callback(finished)
        else:  # wait on a stream of our own: the callback of a future would run on a stream that others may use
            if track not in self._watchers:
                self._watchers[track] = torch.cuda.Stream(self._device)
            with torch.cuda.stream(self._watchers[track]):
                work.wait()
                finished()
        return TrackedTransfer(self, kind, issued)

    def iterate(self, kind: Kind | str, source: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of ``source``, and record the wait for each item as a span."""
        iterator = iter(source)
        while True:
            with self.span(kind):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def add(
        self, kind: Kind | str, start: Moment, end: Moment, *, track: str = ENGINE, joined: Moment | None = None
    ) -> None:
        """Add a span between two moments of :meth:`mark`."""
        pending = self._pending  # Another thread may end the step.
        if pending is not None:
            pending.spans.append((Kind(kind), track, start, end, start if joined is None else joined))

    def count(self, name: str, value: float | Tensor) -> None:
        """Add to a counter of this step. A tensor on the device is copied without a wait, and read by :meth:`take`."""
        pending = self._pending
        if pending is None:
            return
        if isinstance(value, Tensor):
            pending.device_counts.append((name, self._to_host(value, pending)))
        else:
            pending.counts[name] = pending.counts.get(name, 0.0) + value

    def keep(self, name: str, value: Tensor) -> None:
        """Keep a copy of an array with this step, such as the history lengths of the batch. Does not wait for the device."""
        if self._pending is not None:
            self._pending.kept[name] = self._to_host(value, self._pending)

    def mark(self, stream: torch.cuda.Stream | str | None = None) -> Moment:
        """This moment: a time on the host's clock, or an event on a CUDA stream."""
        if self._compute is None or isinstance(stream, str):
            return self.clock()
        event = self._event()
        event.record(stream if stream is not None else torch.cuda.current_stream(self._device))
        return event

    def track(self, stream: torch.cuda.Stream | str | None = None) -> str:
        """Name of the track of a stream, or of the calling thread on CPU."""
        if isinstance(stream, str):
            return stream
        if self._compute is None:
            return ENGINE if threading.get_ident() == self._thread else threading.current_thread().name
        key = (stream if stream is not None else torch.cuda.current_stream(self._device)).stream_id
        return self._names.setdefault(key, f"stream {key}")

    def _event(self) -> torch.cuda.Event:
        try:  # Another thread may take the last event between a look at the pool and ``pop``.
            return self._pool.pop()
        except IndexError:
            return torch.cuda.Event(enable_timing=True)

    def _to_host(self, value: Tensor, pending: PendingStep) -> Tensor:
        """A copy on the host. It is complete at the last moment of ``pending.copied``."""
        if not value.is_cuda:
            return value.detach().clone()
        host, stream = copy_to_host(value)
        pending.copied.append(self.mark(stream))
        return host
