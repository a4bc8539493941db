"""``freescale plan --ids``: how many rows and which time to live a table with zero-collision ids needs, from the data.

The events are played in time order, a number of events per training step. An id that has a row keeps it until it has not been
seen for ``ttl`` steps. An id that returns later has lost its row, and starts anew.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.data.histories import Histories
from lightning_freescale.data.sources import Source
from lightning_freescale.data.vocabulary import Vocabulary
from lightning_freescale.runtime.errors import InputError

LOAD = 0.75  # of the rows by ids that live at the same time: below it every id finds a row
BUCKET = 1024  # rows of a bucket, at least
LOST = (0.1, 0.01, 0.001)  # shares of returns that come too late, for which a time to live is proposed


@dataclass(frozen=True)
class TableProposal:
    """A table for the ids of some data.

    Attributes:
        ttl: time to live in steps; ``None`` without eviction.
        lost: share of the returns of ids that come too late: their row is gone.
        live: largest number of ids that have a row at the same time.
        rows: rows of the table.
        buckets: a number of buckets that divides the rows.
        modulo_collisions: share of the live ids that would share a row if the row were ``id % rows``.
    """

    ttl: int | None
    lost: float
    live: int
    rows: int
    buckets: int
    modulo_collisions: float


@dataclass(frozen=True)
class IdDrift:
    """How the ids of some data come and go.

    Attributes:
        events, ids, steps: number of events, of distinct ids, and of training steps.
        new_at_the_end: share of the events of the last tenth of the steps whose id is new in that step.
        proposals: tables, from the shortest time to live to none.
    """

    events: int
    ids: int
    steps: int
    new_at_the_end: float
    proposals: list[TableProposal]


def add_arguments(parser: argparse.ArgumentParser, positive: Callable[[str], int]) -> None:
    """Add the options of ``freescale plan --ids``."""
    group = parser.add_argument_group("tables with zero-collision ids")
    group.add_argument(
        "--ids", action="store_true", help="propose rows and time to live for the ids of the items instead"
    )
    group.add_argument(
        "--events-per-step",
        type=positive,
        metavar="N",
        default=10_000,
        help="events of all ranks in a training step, with --ids (default: %(default)s)",
    )


def read_items(source: Source) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``[T]`` a number for the item of each event, and ``[T]`` its time in microseconds, in the order of the file."""
    vocabulary = Vocabulary(f"{source.path}: item", "id" if source.parses_text else None)
    read = [(vocabulary.encode(events.items), events.ticks) for events in source.events()]
    if not read:
        raise InputError(f"{source.path}: the file holds no events")
    items, ticks = (np.concatenate(parts) for parts in zip(*read, strict=True))
    return items.astype(np.int64), ticks


def items_of(histories: Histories) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """As :func:`read_items`, for data in memory."""
    return np.asarray(histories.items), np.asarray(histories.timestamps)


def id_drift(items: NDArray[np.int64], times: NDArray[np.int64], events_per_step: int) -> IdDrift:
    """Play the events in time order, and propose tables for their ids.

    Args:
        items: ``[T]`` a number from 0 on for the item of each event.
        times: ``[T]`` the time of each event, in any unit.
        events_per_step: events of a training step.
    """
    played = items[np.argsort(times, kind="stable")]
    steps = -(-len(played) // events_per_step)
    # Each id counts once per step. Sorted by id, and by step within an id.
    seen = np.unique(played * steps + np.arange(len(played)) // events_per_step)
    number, step = np.divmod(seen, steps)
    returns = number[1:] == number[:-1]  # whether the next entry is a return of the same id
    gaps = (step[1:] - step[:-1])[returns]
    ttls: list[int | None] = [max(1, int(np.quantile(gaps, 1 - share, method="higher"))) for share in LOST if len(gaps)]
    last_tenth = np.arange(len(played)) // events_per_step >= math.floor(0.9 * steps)
    first_step = np.full(items.max() + 1, steps)
    np.minimum.at(first_step, number, step)
    is_new = first_step[played] == np.arange(len(played)) // events_per_step
    return IdDrift(
        events=len(played),
        ids=len(np.unique(number)),
        steps=steps,
        new_at_the_end=float(is_new[last_tenth].mean()),
        proposals=[_propose(number, step, steps, gaps, ttl) for ttl in [*dict.fromkeys(ttls), None]],
    )


def _propose(
    number: NDArray[np.int64], step: NDArray[np.int64], steps: int, gaps: NDArray[np.int64], ttl: int | None
) -> TableProposal:
    """A table for ids that are seen at the given steps: ``[n]`` ids, sorted, and ``[n]`` steps, sorted within an id."""
    end = np.full(len(step), steps)  # the first step at which the id has no row, unless it returns before
    if ttl is not None:
        end = np.minimum(end, step + ttl + 1)
    same = number[1:] == number[:-1]
    end[:-1][same] = np.minimum(end[:-1][same], step[1:][same])
    changes = np.bincount(step, minlength=steps + 1) - np.bincount(end, minlength=steps + 1)
    live = int(changes.cumsum().max())
    buckets = max(1, math.ceil(live / LOAD / BUCKET))
    buckets = 1 << (buckets - 1).bit_length() if buckets < 1024 else 1024  # whole buckets on many numbers of ranks
    rows = buckets * max(BUCKET, math.ceil(live / LOAD / buckets))
    return TableProposal(
        ttl=ttl,
        lost=0.0 if ttl is None or not len(gaps) else float((gaps > ttl).mean()),
        live=live,
        rows=rows,
        buckets=buckets,
        modulo_collisions=1 - rows * (1 - math.exp(-live / rows)) / live,
    )


def table(args: Any, drift: IdDrift) -> str:
    """The drift and the proposals as text."""
    lines = [
        f"{drift.events:,} events with {drift.ids:,} distinct item ids; in time order, {args.events_per_step:,} events per "
        f"step, they are {drift.steps:,} training steps",
        f"in the last tenth of the steps, {drift.new_at_the_end:.1%} of the events have an id that is new",
        "",
        f"{'evict':>6} {'ttl':>9} {'returns lost':>13} {'live ids':>12} {'rows':>12} {'buckets':>8} {'id % rows':>10}",
    ]
    for one in drift.proposals:
        evict, ttl = ("never", "-") if one.ttl is None else ("ttl", f"{one.ttl:,}")
        lines.append(
            f"{evict:>6} {ttl:>9} {one.lost:>13.2%} {one.live:>12,} {one.rows:>12,} {one.buckets:>8,} "
            f"{one.modulo_collisions:>10.1%}"
        )
    return "\n".join(
        [
            *lines,
            "",
            "ttl           an id that has not been seen for more steps loses its row",
            "returns lost  share of the returns of ids after a pause that come too late: the id starts anew",
            "live ids      largest number of ids that have a row at the same time",
            f"rows          for these ids at a load of {LOAD}; zero-collision ids do not share rows then",
            "id % rows     share of the live ids that would share a row with a modulo instead",
        ]
    )
