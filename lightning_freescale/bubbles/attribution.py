"""From spans to bubbles: where the time of a step goes on every rank.

The bubble of a step on a rank is the step's wall time minus the time in which the compute engine does useful work. It is the sum
of these parts:

    straggler           waiting in a collective, until the slowest rank has joined it
    exposed_embedding   waiting for an exchange of ids, rows or their gradients that all ranks have joined
    exposed_experts     waiting for an exchange of events with the ranks of their experts that all ranks have joined
    exposed_dense       waiting for the AllReduce of the dense gradients that all ranks have joined
    input_wait          waiting for the next batch
    other               everything else: the training loop itself, logging, callbacks

There are two pure functions. :func:`account` takes the step of one rank and keeps what the other ranks need to know.
:func:`attribute` takes the accounts of all ranks and splits each wait at the moment at which the last rank joined. An account is
a row of numbers of fixed length, so that one collective can carry the accounts of many steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.bubbles.spans import EMBEDDING_EXCHANGES, ENGINE, EXCHANGES, Kind, Role, Span, Step

PARTS = ("straggler", "exposed_embedding", "exposed_experts", "exposed_dense", "input_wait", "other")
SLOTS = 16  # waits of one kind in a step that are matched between ranks; further waits count as exposed
ROW_SLOTS = 32  # the same for synchronous exchanges of rows: each has one span for the sorting, and one for the wait
EXPERT_SLOTS = 80  # the same for exchanges of experts, of which each layer has five for each micro-chunk

# What a rank counts in a step, besides time.
# Of tables with zero-collision ids: distinct ids of the batch, those that got a row, rows taken from other ids for them, ids
# without a row of their own, distinct ids less distinct rows; rows that ids own, and rows that they can own.
ID_COUNTS = ("ids", "ids_inserted", "ids_evicted", "ids_fallback", "ids_collisions", "ids_owned", "ids_slots")
COUNTS = ("samples", "tokens", "padded", "cost", "flops", "bytes", "collisions", "rows", "overhead", *ID_COUNTS)
_EXPOSED = {  # the kinds of exchange of each part of the bubble
    "embedding": EMBEDDING_EXCHANGES,
    "experts": (Kind.EXPERT_EXCHANGE,),
    "dense": (Kind.ALLREDUCE,),
}
_UNMATCHED = tuple(f"unmatched_{part}" for part in _EXPOSED)
_SCALARS = ("start", "wall", "useful", "input_wait", "hidden", *_UNMATCHED, *COUNTS)
_SLOTS = dict.fromkeys(EXCHANGES, SLOTS) | {Kind.ROW_EXCHANGE: ROW_SLOTS, Kind.EXPERT_EXCHANGE: EXPERT_SLOTS}
_FIRST = dict(
    zip(EXCHANGES, accumulate(_SLOTS.values(), initial=0), strict=False)
)  # the place of each kind's first wait
_PLACES = sum(_SLOTS.values())
WIDTH = len(_SCALARS) + _PLACES * 3


class Segment(NamedTuple):
    """An interval of the engine's time that belongs to one span."""

    start: float
    end: float
    span: Span


def flatten(spans: Iterable[Span], start: float, end: float) -> list[Segment]:
    """The engine's time from ``start`` to ``end`` as disjoint segments. At every moment the span that began last counts."""
    segments: list[Segment] = []
    stack: list[Span] = []  # spans that have begun; the innermost is the last, and ended ones are removed later
    now = start

    def run_to(moment: float) -> None:
        nonlocal now
        while now < moment:
            while stack and stack[-1].end <= now:
                stack.pop()
            if not stack:
                break
            until = min(stack[-1].end, moment)
            segments.append(Segment(now, until, stack[-1]))
            now = until
        now = max(now, moment)

    for span in sorted((span for span in spans if span.end > span.start), key=lambda span: (span.start, -span.end)):
        run_to(min(max(span.start, start), end))
        stack.append(span)
    run_to(end)
    return segments


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals, in order of time, that cover the same time as ``intervals``."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def overlap(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float:
    """Seconds that two lists of disjoint, ordered intervals have in common."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


def account(step: Step, offset: float = 0.0) -> NDArray[np.float64]:
    """``[WIDTH]`` numbers about one step of one rank.

    Args:
        step: of this rank.
        offset: seconds to add to this rank's clock to get rank 0's time.
    """
    segments = flatten((span for span in step.spans if span.track == ENGINE), step.start, step.end)
    useful = [(s.start, s.end) for s in segments if s.span.kind.role is Role.COMPUTE]
    background = union(
        (span.start, span.end) for span in step.spans if span.track != ENGINE and span.kind.role is Role.COMMUNICATION
    )
    values = dict.fromkeys(_SCALARS, 0.0)
    values |= {name: step.counts.get(name, 0.0) for name in COUNTS}
    values["start"], values["wall"] = step.start + offset, step.wall
    values["useful"] = sum(end - start for start, end in useful)
    values["hidden"] = overlap(background, union(useful))
    busy: dict[Span, float] = {}  # seconds of the engine in each span, without the spans inside it
    for start, end, span in segments:
        busy[span] = busy.get(span, 0.0) + end - start
    values["input_wait"] = sum(seconds for span, seconds in busy.items() if span.kind.role is Role.WAITING)
    waits = np.full((_PLACES, 3), np.nan)
    for span, slot in _slots(step.spans).items():
        seconds = busy.get(span, 0.0)
        if slot < _SLOTS[span.kind]:
            waits[_FIRST[span.kind] + slot] = (span.joined + offset, span.start + offset, seconds)
        else:
            part = next(name for name, kinds in _EXPOSED.items() if span.kind in kinds)
            values[f"unmatched_{part}"] += seconds
    return np.concatenate([np.array([values[name] for name in _SCALARS]), waits.ravel()])


@dataclass(frozen=True)
class Bubbles:
    """Where the time of the steps went. Arrays are ``[ranks, steps]``, times are in seconds."""

    start: NDArray[np.float64]  # of the step, on rank 0's clock
    wall: NDArray[np.float64]
    useful: NDArray[np.float64]
    hidden: NDArray[np.float64]  # communication that ran during useful work
    parts: dict[str, NDArray[np.float64]]  # by the names in PARTS
    counts: dict[str, NDArray[np.float64]]  # by the names in COUNTS

    @property
    def bubble(self) -> NDArray[np.float64]:
        return self.wall - self.useful

    @property
    def exposed(self) -> NDArray[np.float64]:
        """Time in which the engine waited for communication, without the wait for stragglers."""
        return np.sum([self.parts[f"exposed_{part}"] for part in _EXPOSED], axis=0)


def attribute(accounts: NDArray[np.float64]) -> Bubbles:
    """Split the bubbles of all ranks into their parts.

    Args:
        accounts: ``[ranks, steps, WIDTH]``, rows of :func:`account` of the same steps on all ranks.
    """
    scalars = {name: accounts[..., index] for index, name in enumerate(_SCALARS)}
    waits = accounts[..., len(_SCALARS) :].reshape(*accounts.shape[:2], _PLACES, 3)
    joined, start, busy = waits[..., 0], waits[..., 1], np.nan_to_num(waits[..., 2])
    # If no rank knows when it joined, the wait counts as exposed: ``last`` is then -inf.
    last = np.where(np.isnan(joined), -np.inf, joined).max(axis=0)
    straggling = np.clip(np.nan_to_num(last - start, neginf=0.0), 0.0, busy)  # [ranks, steps, places]
    exposed = busy - straggling
    parts = {"straggler": straggling.sum(axis=2), "input_wait": scalars["input_wait"]}
    for part, kinds in _EXPOSED.items():
        own = [place for kind in kinds for place in range(_FIRST[kind], _FIRST[kind] + _SLOTS[kind])]
        parts[f"exposed_{part}"] = exposed[..., own].sum(axis=2) + scalars[f"unmatched_{part}"]
    # The remainder of the bubble: engine time outside of all spans, or in a span of overhead.
    bubble = scalars["wall"] - scalars["useful"]
    parts["other"] = np.maximum(bubble - sum(parts.values()), 0.0)
    parts = {name: parts[name] for name in PARTS}
    return Bubbles(
        scalars["start"],
        scalars["wall"],
        scalars["useful"],
        scalars["hidden"],
        parts,
        {name: scalars[name] for name in COUNTS},
    )


def label(steps: Sequence[Step]) -> list[list[tuple[float, float, str]]]:
    """What the engine of each rank does in one step, for pictures: ``(start, end, label)``, disjoint and in order of time.

    A label is the kind of a span, or ``"straggler"`` for the part of an exchange before the last rank joined it.

    Args:
        steps: the same step of every rank, on a common clock.
    """
    flat = [flatten((span for span in step.spans if span.track == ENGINE), step.start, step.end) for step in steps]
    slots = [_slots(step.spans) for step in steps]
    last: dict[tuple[Kind, int], float] = {}
    for numbered in slots:
        for span, slot in numbered.items():
            last[span.kind, slot] = max(last.get((span.kind, slot), -np.inf), np.nan_to_num(span.joined, nan=-np.inf))
    labelled: list[list[tuple[float, float, str]]] = []
    for segments, numbered in zip(flat, slots, strict=True):
        labelled.append([])
        for start, end, span in segments:
            joined = start
            if span in numbered:
                joined = min(max(start, last[span.kind, numbered[span]]), end)
                if joined > start:
                    labelled[-1].append((start, joined, "straggler"))
            if end > joined:
                labelled[-1].append((joined, end, span.kind.value))
    return labelled


def _slots(spans: Iterable[Span]) -> dict[Span, int]:
    """Number of each wait on the engine's track among the waits of its kind. The number matches waits between ranks.

    A wait of zero length gets a number too. Otherwise the waits after it would match the wrong waits of other ranks.
    """
    used = dict.fromkeys(EXCHANGES, 0)
    numbered = {}
    waits = (span for span in spans if span.track == ENGINE and span.kind.role is Role.COMMUNICATION)
    for span in sorted(waits, key=lambda span: span.start):
        numbered[span] = used[span.kind]
        used[span.kind] += 1
    return numbered
