"""Draws ``schedule.svg``: one rank's steps under both strategies. ``python docs/schedule.py`` writes it beside this file.

Widths are illustrative; the order is that of ``lightning_freescale/embedding/schedule.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

UNIT, LANE, LEFT, WIDTH = 27, 30, 84, 910  # pixels: a unit of time, a lane, the lanes' names, all
COLORS = {"compute": "#4c78a8", "collision": "#e45756", "exclusive": "#72b7b2", "ids": "#b8b0ac", "bubble": "none"}


class Span(NamedTuple):
    lane: int
    start: float
    end: float
    kind: str
    text: str


class Panel(NamedTuple):
    title: str
    lanes: list[str]
    spans: list[Span]


def synchronous() -> Panel:
    spans = []
    for step, name in enumerate(["N", "N+1"]):
        t = 15.0 * step
        spans += [
            Span(1, t, t + 1, "ids", "ids"),
            Span(1, t + 1, t + 3.5, "exclusive", f"rows {name}"),
            Span(0, t, t + 3.5, "bubble", "waits"),
            Span(0, t + 3.5, t + 6.5, "compute", f"forward {name}"),
            Span(0, t + 6.5, t + 11.5, "compute", f"backward {name}"),
            Span(1, t + 11.5, t + 14, "exclusive", f"grads {name}"),
            Span(0, t + 11.5, t + 14, "bubble", "waits"),
            Span(0, t + 14, t + 15, "compute", "opt"),
        ]
    return Panel('strategy="freescale_sync": every exchange waits, as in TorchRec', ["compute", "exchange"], spans)


def prioritized() -> Panel:
    names = ["N-1", "N", "N+1", "N+2", "N+3", "N+4"]
    spans = []
    for step in range(3):
        t, before, now, after, later = 10.0 * step, *names[step : step + 4]
        spans += [
            Span(0, t, t + 3, "compute", f"forward {now}"),
            Span(0, t + 3, t + 8, "compute", f"backward {now}"),
            Span(0, t + 8, t + 8.8, "bubble", ""),
            Span(0, t + 8.8, t + 10, "compute", "opt"),
            Span(1, t + 8, t + 8.8, "collision", ""),
            Span(1, t + 8.8, t + 9.9, "collision", ""),
            Span(2, t - 1.2 if step else t, t + 2.6, "exclusive", f"grads {before}"),
            Span(2, t + 3.3, t + 6.3, "exclusive", f"rows {after}"),
            Span(3, t + 0.2, t + 2.2, "ids", f"ids {later}"),
        ]
    title = 'strategy="freescale": rows that two steps share go first, all others travel behind compute'
    return Panel(title, ["compute", "collisions", "exclusive", "ids"], spans)


def draw(panels: list[Panel]) -> str:
    parts, y = [], 10
    for panel in panels:
        y += 20
        parts.append(f'<text x="8" y="{y}" font-weight="bold">{escape(panel.title)}</text>')
        y += 12
        for row, lane in enumerate(panel.lanes):
            parts.append(f'<text x="8" y="{y + row * LANE + 18}">{lane}</text>')
        parts += [box(span, y) for span in panel.spans]
        y += LANE * len(panel.lanes) + 10
    parts.append(f'<text x="{LEFT}" y="{y + 14}" fill="#666">time, not to scale; collisions: gradients of N, then rows of '
                 "N+1 that N has updated; dashed: the rank waits</text>")  # fmt: skip
    style = "font-family:sans-serif;font-size:11px"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 26}" style="{style}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


def box(span: Span, top: int) -> str:
    x, width = LEFT + span.start * UNIT, (span.end - span.start) * UNIT
    y, height = top + span.lane * LANE + 3, LANE - 6
    dashed = span.kind == "bubble"
    line = 'stroke="#999" stroke-dasharray="3 3"' if dashed else 'stroke="white"'
    shape = f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{height}" fill="{COLORS[span.kind]}" {line}/>'
    color = "#666" if dashed else "white"
    text = f'<text x="{x + width / 2:.0f}" y="{y + 16}" text-anchor="middle" fill="{color}">{span.text}</text>'
    return shape + (text if span.text else "")


def escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw([synchronous(), prioritized()]))
