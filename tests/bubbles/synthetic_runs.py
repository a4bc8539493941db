"""Synthetic runs with known figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_freescale.bubbles.records import RecordWriter, rank_file, to_record
from lightning_freescale.bubbles.spans import ENGINE, Kind, Span, Step


def engine(*parts: tuple[str, float], start: float) -> tuple[Span, ...]:
    """Consecutive spans on the engine's track from ``(kind, milliseconds)``. The kind ``idle`` leaves a gap."""
    spans, now = [], start
    for kind, ms in parts:
        if kind != "idle":
            spans.append(Span(Kind(kind), ENGINE, now, now + ms / 1e3, now))
        now += ms / 1e3
    return tuple(spans)


def step(
    index: int,
    rank: int,
    compute: Sequence[float],
    exchange: float = 5.0,
    start: float = 100.0,
    behind: str = "allreduce",
) -> Step:
    """A step of rank ``rank``: 3 ms of input wait, ``compute[rank]`` ms of forward, an exchange, and 1 ms of idle time.

    The exchange waits for the slowest rank and then takes ``exchange`` ms. A transfer of kind ``behind`` is in the background.
    """
    slowest = max(compute)
    start = start + index * (slowest + exchange + 4.0) / 1e3
    parts = (
        ("input_wait", 3.0),
        ("dense_forward", compute[rank]),
        ("gradient_exchange", slowest - compute[rank] + exchange),
        ("idle", 1.0),
    )
    spans = engine(*parts, start=start)
    background = Span(Kind(behind), "exchange", start + 0.004, start + 0.006, start + 0.004)
    lengths = np.array([10 * (rank + 1), 20 * (rank + 1)])
    return Step(
        index,
        start,
        spans[-1].end + 0.001,
        (*spans, background),
        {"samples": 2, "tokens": float(lengths.sum()), "padded": 2.0 * lengths.max(), "cost": float(lengths.sum()),
         "rows": 100},
        {"lengths": lengths, "costs": lengths},
    )  # fmt: skip


def write_run(
    folder: Path,
    computes: Sequence[Sequence[float]],
    exchange: float = 5.0,
    settings: dict[str, Any] | None = None,
    offsets: Sequence[float] = (0.0, 0.0),
    collisions: float = 12,
) -> Path:
    """Write a run.

    Args:
        computes: for each step, the ms of compute of each rank.
        exchange: ms.
        settings: of the strategy.
        offsets: of the clocks of the ranks, in seconds; the writer corrects them.
        collisions: number of collisions among 100 rows.
    """
    behind = "row_exchange_exclusive" if (settings or {}).get("prioritize") is True else "allreduce"
    for rank in range(len(computes[0])):
        header = {"rank": rank, "world": len(computes[0]), "strategy": "Made", "device": "cpu",
                  "settings": settings or {"balance": "off", "prioritize": False}}  # fmt: skip
        writer = RecordWriter(rank_file(folder, rank), header)
        for index, compute in enumerate(computes):
            made = step(index, rank, compute, exchange, start=100.0 - offsets[rank], behind=behind)
            made.counts["collisions"] = collisions
            writer.write(to_record(made, offsets[rank]))
        writer.close()
    return folder
