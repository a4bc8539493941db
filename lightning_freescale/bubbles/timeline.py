"""Spans: what a rank did, and when. Recorded for few nanoseconds when off, a few microseconds when on, resolved late.

On CPU a moment is a reading of the monotonic clock. On CUDA it is an event on a stream: what counts is when the *device* gets
there, and nobody waits for it. A span on the compute stream around ``stream.wait_event(...)`` or around a host that is late
then lasts exactly as long as the device stood still.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

ENGINE = "compute"  # the track of the compute engine: the main thread on CPU, the compute stream on CUDA


class Role(Enum):
    COMPUTE = "compute"  # useful work
    COMMUNICATION = (
        "communication"  # with other ranks; on the engine's track the engine waits for it, elsewhere nobody does
    )
    WAITING = "waiting"  # for something that is no other rank
    OVERHEAD = "overhead"  # neither useful nor waited for


class Kind(StrEnum):
    """What a span was spent on. The engine's innermost span counts, so an exchange inside ``forward`` interrupts it."""

    INPUT_WAIT = "input_wait"
    H2D = "h2d"
    ID_EXCHANGE = "id_exchange"
    ROW_EXCHANGE = "row_exchange"  # synchronous: collision and exclusive rows together
    ROW_EXCHANGE_COLLISION = "row_exchange_collision"
    ROW_EXCHANGE_EXCLUSIVE = "row_exchange_exclusive"
    GRADIENT_EXCHANGE = "gradient_exchange"
    ALLREDUCE = "allreduce"
    LOOKUP = "lookup"  # reading and updating table rows outside of forward and backward
    DENSE_FORWARD = "dense_forward"
    DENSE_BACKWARD = "dense_backward"
    OPTIMIZER = "optimizer"
    METRICS = "metrics"

    @property
    def role(self) -> Role:
        return _ROLES[self]


EMBEDDING_EXCHANGES = (
    Kind.ID_EXCHANGE,
    Kind.ROW_EXCHANGE,
    Kind.ROW_EXCHANGE_COLLISION,
    Kind.ROW_EXCHANGE_EXCLUSIVE,
    Kind.GRADIENT_EXCHANGE,
)
EXCHANGES = (*EMBEDDING_EXCHANGES, Kind.ALLREDUCE)
_ROLES = {
    Kind.INPUT_WAIT: Role.WAITING,
    Kind.H2D: Role.WAITING,
    **dict.fromkeys(EXCHANGES, Role.COMMUNICATION),
    Kind.LOOKUP: Role.COMPUTE,
    Kind.DENSE_FORWARD: Role.COMPUTE,
    Kind.DENSE_BACKWARD: Role.COMPUTE,
    Kind.OPTIMIZER: Role.COMPUTE,
    Kind.METRICS: Role.OVERHEAD,
}


class Span(NamedTuple):
    """Times in seconds on this rank's clock. ``arrived``: when the rank joined the collective, ``nan`` if not known."""

    kind: Kind
    track: str
    start: float
    end: float
    arrived: float


@dataclass(frozen=True)
class Step:
    """One step of one rank, from the end of the step before to its own end. All spans lie within."""

    index: int
    start: float
    end: float
    spans: tuple[Span, ...]
    counts: dict[str, float] = field(default_factory=dict)  # bytes, rows, collisions, ...
    arrays: dict[str, NDArray] = field(default_factory=dict)  # history lengths, candidates

    @property
    def wall(self) -> float:
        return self.end - self.start


Moment = float | torch.cuda.Event


class DeviceClock:
    """When the events of a device happened, on the host's clock.

    Every recorded step ties the two clocks: the host's time is read, then an event is recorded on a stream that is always
    idle. The device may come to it late, for streams share its queues, but never early: the most prompt of all ties counts.
    """

    DRIFT = 1e-4  # by which the clocks may go apart, seconds a second: an old tie is trusted that much less

    def __init__(self) -> None:
        self._moment = -math.inf

    def tie(self, host: float, since: float) -> float:
        """The moment of a tie's event on the host's clock.

        Args:
            host: seconds, read just before the event was recorded.
            since: seconds on the device since the event of the tie before; any number for the first.
        """
        self._moment = max(host, self._moment + since * (1 - self.DRIFT))
        return self._moment


class _Recording:
    """A step whose moments are not resolved yet."""

    def __init__(self, index: int, start: Moment, anchor: tuple[torch.cuda.Event, float] | None):
        self.index, self.start = index, start
        self.anchor = anchor  # on CUDA: an event, and the host's time just before it
        self.end: Moment = math.nan
        self.spans: list[tuple[Kind, str, Moment, Moment, Moment]] = []
        self.counts: dict[str, float] = {}
        self.late: list[tuple[str, Tensor]] = []  # host copies under way of values that were on the device
        self.kept: dict[str, Tensor] = {}
        self.copied: list[Moment] = []  # when those host copies are complete

    def events(self) -> list[torch.cuda.Event]:
        if self.anchor is None:
            return []
        moments = [self.start, self.end, *self.copied, *(moment for span in self.spans for moment in span[2:])]
        moments.append(self.anchor[0])
        return [moment for moment in moments if not isinstance(moment, float)]

    def resolve(self, anchored: float) -> Step:
        """The step on the host's clock, on which the anchor's event was at ``anchored``."""

        def seconds(moment: Moment) -> float:
            if isinstance(moment, float):
                return moment
            assert self.anchor is not None
            return anchored + self.anchor[0].elapsed_time(moment) / 1e3

        for name, value in self.late:
            self.counts[name] = self.counts.get(name, 0.0) + float(value)
        arrays = {name: value.numpy() for name, value in self.kept.items()}
        spans = (Span(kind, track, *map(seconds, moments)) for kind, track, *moments in self.spans)
        return Step(self.index, seconds(self.start), seconds(self.end), tuple(spans), self.counts, arrays)


class _Open:
    """A span that is going on: the context manager of :meth:`Timeline.span`."""

    __slots__ = ("_arrived", "_kind", "_start", "_stream", "_timeline", "_track")

    def __init__(self, timeline: Timeline, kind: Kind, stream: Any, arrived: Moment | None):
        self._timeline, self._kind, self._stream, self._arrived = timeline, kind, stream, arrived

    def __enter__(self) -> None:
        self._track = self._timeline.track(self._stream)
        self._start = self._timeline.mark(self._stream)

    def __exit__(self, *error: object) -> None:
        end = self._timeline.mark(self._stream)
        self._timeline.add(self._kind, self._start, end, track=self._track, arrived=self._arrived)


class Transfer:
    """An asynchronous collective on its way, from :meth:`Timeline.transfer`."""

    __slots__ = ("_issued", "_kind", "_timeline")

    def __init__(self, timeline: Timeline, kind: Kind, issued: Moment | None):
        self._timeline, self._kind, self._issued = timeline, kind, issued

    def waiting(self) -> AbstractContextManager[None]:
        """Around the wait for it: ``with transfer.waiting(): work.wait()``."""
        return self._timeline.span(self._kind, arrived=math.nan if self._issued is None else self._issued)


_NOTHING: AbstractContextManager[None] = nullcontext()


class Timeline:
    """Records the spans of the steps it is told to record; does nothing in between.

        timeline = Timeline()
        timeline.begin_step(17)
        with timeline.span("dense_forward"):
            ...
        timeline.end_step()
        for step in timeline.take(): ...

    Spans of any thread and any CUDA stream are welcome. ``stream=None`` is the current stream on CUDA, the current thread on
    CPU; a string names a track of a host thread, on the host's clock.

    Args:
        clock: seconds, monotonic; the ranks' clocks need not agree (see ``clock.py``).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.active = False
        self._recording: _Recording | None = None
        self._done: deque[_Recording] = deque()
        self._carry: tuple[int, list[Span]] = (-1, [])  # step it belongs to, background spans that reach into it
        self._thread = threading.get_ident()
        self._device: torch.device | None = None
        self._compute: torch.cuda.Stream | None = None
        self._side: torch.cuda.Stream | None = None
        self._watchers: dict[str, torch.cuda.Stream] = {}
        self._names: dict[int, str] = {}
        self._pool: list[torch.cuda.Event] = []
        self._device_clock = DeviceClock()
        self._tied: torch.cuda.Event | None = None  # of the last tie

    def open(self, device: torch.device) -> None:
        """Choose the engine: the calling thread, or the current stream of a CUDA device."""
        self._thread, self._device = threading.get_ident(), device
        if device.type == "cuda":
            self._compute = torch.cuda.current_stream(device)
            self._side = torch.cuda.Stream(device)  # always idle: ties the device's clock to the host's
            self._names[self._compute.stream_id] = ENGINE

    def name(self, stream: torch.cuda.Stream, track: str) -> None:
        """Call the track of a CUDA stream ``track`` in pictures and traces."""
        self._names.setdefault(stream.stream_id, track)

    # ---- steps -----------------------------------------------------------------------------------------------------
    def begin_step(self, index: int) -> None:
        """Record from here on. A step that was begun and not ended is forgotten."""
        anchor = None
        if self._side is not None:
            anchor = (self._event(), self.clock())
            anchor[0].record(self._side)
        self._recording = _Recording(index, self.mark(), anchor)
        self.active = True

    def end_step(self) -> None:
        recording, self._recording, self.active = self._recording, None, False
        if recording is not None:
            recording.end = self.mark()
            self._done.append(recording)

    def cancel_step(self) -> None:
        self._recording, self.active = None, False

    def take(self, upto: int | None = None) -> list[Step]:
        """Steps recorded so far, up to index ``upto``, oldest first. Waits for the device if it has not got there yet."""
        taken = []
        while self._done and (upto is None or self._done[0].index <= upto):
            taken.append(self._done.popleft())
            for event in taken[-1].events():
                event.synchronize()
        steps = [self._split(recording.resolve(self._tie(recording))) for recording in taken]
        self._reuse(taken)
        return steps

    def _tie(self, recording: _Recording) -> float:
        """The moment of the anchor on the host's clock; without meaning where there is none."""
        if recording.anchor is None:
            return 0.0
        event, host = recording.anchor
        since = 0.0 if self._tied is None else self._tied.elapsed_time(event) / 1e3
        self._tied = event
        return self._device_clock.tie(host, since)

    def _reuse(self, taken: list[_Recording]) -> None:
        """Events of resolved steps go back to the pool, but for those that a later step refers to as well."""
        later = [*self._done, *([self._recording] if self._recording is not None else [])]
        needed = {id(event) for recording in later for event in recording.events()} | {id(self._tied)}
        free = {id(event): event for recording in taken for event in recording.events()}
        self._pool.extend(event for key, event in free.items() if key not in needed)

    def _split(self, step: Step) -> Step:
        """Cut background spans at the end of the step: the rest belongs to the next one."""
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
        self, kind: Kind | str, stream: torch.cuda.Stream | str | None = None, arrived: Moment | None = None
    ) -> AbstractContextManager[None]:
        """Time what happens inside.

        Args:
            kind: of the span.
            stream: where it happens, see the class.
            arrived: when this rank joined the collective, if that was before the span; ``nan`` for work around an exchange
                that waits for no other rank.
        """
        return _Open(self, Kind(kind), stream, arrived) if self.active else _NOTHING

    def transfer(self, kind: Kind | str, work: Any, nbytes: int = 0) -> Transfer:
        """Follow a collective that was just started, ``work = dist.all_to_all_single(..., async_op=True)``.

        Its whole way shows on a track of its own, and the wait for it (:meth:`Transfer.waiting`) on the track that waits.
        ``nbytes``: what this rank sends.
        """
        kind = Kind(kind)
        if not self.active:
            # The clock is cheap, so that a wait in the next, recorded step knows when this rank had joined.
            return Transfer(self, kind, self.clock() if self._compute is None else None)
        self.count("bytes", nbytes)
        issued, recording, track = self.mark(), self._recording, f"{kind.value} (async)"

        def finished(_: object = None) -> None:
            if recording is not None:
                recording.spans.append((kind, track, issued, self.mark(), issued))

        if self._compute is None:
            work.get_future().add_done_callback(finished)
        else:  # a stream of our own waits for it: a future's callback would borrow one that others may be using
            if track not in self._watchers:
                self._watchers[track] = torch.cuda.Stream(self._device)
            with torch.cuda.stream(self._watchers[track]):
                work.wait()
                finished()
        return Transfer(self, kind, issued)

    def iterate(self, kind: Kind | str, source: Iterable[Any]) -> Iterator[Any]:
        """``source``, with a span around the wait for each of its items."""
        iterator = iter(source)
        while True:
            with self.span(kind):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def add(
        self, kind: Kind | str, start: Moment, end: Moment, *, track: str = ENGINE, arrived: Moment | None = None
    ) -> None:
        """A span known only after the fact, from two moments of :meth:`mark`."""
        if self._recording is not None:
            self._recording.spans.append((Kind(kind), track, start, end, start if arrived is None else arrived))

    def count(self, name: str, value: float | Tensor) -> None:
        """Add to a counter of this step. A value on the device is copied without waiting and read when the step is taken."""
        recording = self._recording
        if recording is None:
            return
        if isinstance(value, Tensor):
            recording.late.append((name, self._to_host(value, recording)))
        else:
            recording.counts[name] = recording.counts.get(name, 0.0) + value

    def keep(self, name: str, value: Tensor) -> None:
        """Keep an array with this step, such as the history lengths of the batch; copied like the values of :meth:`count`."""
        if self._recording is not None:
            self._recording.kept[name] = self._to_host(value, self._recording)

    def mark(self, stream: torch.cuda.Stream | str | None = None) -> Moment:
        """This moment: on the host's clock, or on a CUDA stream."""
        if self._compute is None or isinstance(stream, str):
            return self.clock()
        event = self._event()
        event.record(stream if stream is not None else torch.cuda.current_stream(self._device))
        return event

    def track(self, stream: torch.cuda.Stream | str | None = None) -> str:
        if isinstance(stream, str):
            return stream
        if self._compute is None:
            return ENGINE if threading.get_ident() == self._thread else threading.current_thread().name
        key = (stream if stream is not None else torch.cuda.current_stream(self._device)).stream_id
        return self._names.setdefault(key, f"stream {key}")

    def _event(self) -> torch.cuda.Event:
        return self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)

    def _to_host(self, value: Tensor, recording: _Recording) -> Tensor:
        """A copy on the host, complete when the work queued so far on the current stream is."""
        value = value.detach()
        if not value.is_cuda:
            return value.clone()
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
        recording.copied.append(self.mark())
        return host
