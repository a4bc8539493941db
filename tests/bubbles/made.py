"""Runs made by hand: what they show is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_freescale.bubbles.records import RecordWriter, rank_file, to_record
from lightning_freescale.bubbles.timeline import ENGINE, Kind, Span, Step


def engine(*parts: tuple[str, float], start: float) -> tuple[Span, ...]:
    """Spans end to end: ``(kind, milliseconds)``; kind ``idle`` leaves a gap."""
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
    """A step of 3 ms input wait, then compute (by rank, ms), then an exchange that waits for the slowest, 1 ms idle."""
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
    """A run whose step ``i`` computes ``computes[i]`` ms, by rank. ``offsets``: clocks that differ, put right by the
    writer. ``collisions``: of 100 rows."""
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
