"""Draw ``schedule.svg``, the steps of one rank with both strategies: ``python docs/schedule.py``.

The widths are only illustrative. The order is that of ``lightning_freescale/embedding/schedule.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

UNIT = 27  # pixels of one unit of time
LANE_HEIGHT = 30  # pixels
LEFT = 84  # pixels for the names of the lanes
WIDTH = 910  # pixels of the picture
COLORS = {"compute": "#4c78a8", "collision": "#e45756", "exclusive": "#72b7b2", "ids": "#b8b0ac", "bubble": "none"}


class Span(NamedTuple):
    """One box: a lane, its start and end in units of time, its kind (a key of ``COLORS``) and its label."""

    lane: int
    start: float
    end: float
    kind: str
    text: str


class Panel(NamedTuple):
    """One strategy: a title, the names of its lanes, and the boxes in them."""

    title: str
    lanes: list[str]
    spans: list[Span]


def synchronous() -> Panel:
    """Two steps in which the rank waits for every exchange."""
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
    return Panel(
        'strategy="freescale_sync": the rank waits for every exchange, as in TorchRec', ["compute", "exchange"], spans
    )


def prioritized() -> Panel:
    """Three steps of the prioritized exchange."""
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
            Span(2, t, t + 2.6, "exclusive", f"grads {before}"),
            Span(2, t + 3.3, t + 6.3, "exclusive", f"rows {after}"),
            Span(3, t + 0.2, t + 2.2, "ids", f"ids {later}"),
        ]
    title = (
        'strategy="freescale": rows that two batches share (collisions) go first, all other rows travel behind compute'
    )
    return Panel(title, ["compute", "collisions", "exclusive", "ids"], spans)


def draw(panels: list[Panel]) -> str:
    """The SVG text of all panels, one below the other."""
    parts, y = [], 10
    for panel in panels:
        y += 20
        parts.append(f'<text x="8" y="{y}" font-weight="bold">{escape(panel.title)}</text>')
        y += 12
        for row, lane in enumerate(panel.lanes):
            parts.append(f'<text x="8" y="{y + row * LANE_HEIGHT + 18}">{lane}</text>')
        parts += [box(span, y) for span in panel.spans]
        y += LANE_HEIGHT * len(panel.lanes) + 10
    legend = (
        "Not to scale. Collisions: the gradients of N, then the rows of N+1 that N has updated. opt: dense optimizer."
    )
    parts.append(f'<text x="{LEFT}" y="{y + 14}" fill="#666">{legend} Dashed: the rank waits.</text>')
    style = "font-family:sans-serif;font-size:11px"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 26}" style="{style}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


def box(span: Span, top: int) -> str:
    """The SVG text of one box; ``top`` is the upper edge of its panel in pixels."""
    x, width = LEFT + span.start * UNIT, (span.end - span.start) * UNIT
    y, height = top + span.lane * LANE_HEIGHT + 3, LANE_HEIGHT - 6
    dashed = span.kind == "bubble"
    line = 'stroke="#999" stroke-dasharray="3 3"' if dashed else 'stroke="white"'
    shape = f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{height}" fill="{COLORS[span.kind]}" {line}/>'
    color = "#666" if dashed else "white"
    text = f'<text x="{x + width / 2:.0f}" y="{y + 16}" text-anchor="middle" fill="{color}">{span.text}</text>'
    return shape + (text if span.text else "")


def escape(text: str) -> str:
    """``text`` with the characters replaced that have a meaning in XML."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw([synchronous(), prioritized()]))
