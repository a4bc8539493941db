"""Draws a step: ranks from top to bottom, time from left to right, colored by what the engine does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.bubbles.attribution import label
from lightning_freescale.bubbles.spans import ENGINE, Step

# Useful work is blue or green, AllReduce is pink, other communication is yellow to brown, waiting for the slowest rank is red,
# other waiting is grey. White time is in no span: the reason for it is not known. People with one of the common kinds of color
# blindness can tell these colors apart: a test computes how far they are from each other.
COLORS = {
    "dense_forward": "#0082ff",
    "dense_backward": "#0b4f8a",
    "optimizer": "#3cd0ff",
    "lookup": "#0a7f56",
    "id_exchange": "#ffe245",
    "row_exchange": "#fe9000",
    "row_exchange_collision": "#703c07",
    "row_exchange_exclusive": "#efbd67",
    "gradient_exchange": "#b5925e",
    "expert_exchange": "#45371b",
    "allreduce": "#dd89d4",
    "straggler": "#de4d2c",
    "input_wait": "#606b75",
    "h2d": "#9197a0",
    "metrics": "#bfb29a",
    "exposed_embedding": "#fe9000",
    "exposed_experts": "#45371b",
    "exposed_dense": "#dd89d4",
    "other": "#e1e1e1",
}
_LEFT, _TOP, _LANE, _GAP, _AXIS, _LINE = 56, 24, 16, 8, 22, 18  # pixels at scale 1


def draw(steps: Sequence[Step], width: int = 1200, title: str = "") -> NDArray[np.uint8]:
    """``[H, W, 3]`` picture of one step.

    Needs Pillow.

    Args:
        steps: the same step of every rank, on a common clock.
        width: pixels.
        title: above the picture.
    """
    return draw_panels([(title, steps)], width)


def draw_panels(
    panels: Sequence[tuple[str, Sequence[Step]]], width: int = 1200, scale: float = 1.0
) -> NDArray[np.uint8]:
    """``[H, W, 3]`` picture of several steps below each other, on one time scale; for example one step of each of two runs.

    Each rank has a lane for its engine and, below it, a thinner lane for exchanges in the background.

    Args:
        panels: pairs of a title and the same step of every rank, on a common clock.
        width: pixels.
        scale: factor of the size of lanes and letters.
    """
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default() if scale == 1.0 else ImageFont.load_default(11 * scale)
    left, top, lane, gap, axis, line = (round(scale * size) for size in (_LEFT, _TOP, _LANE, _GAP, _AXIS, _LINE))
    pitch = lane + lane // 2 + gap
    seconds = max(max(step.end for step in steps) - min(step.start for step in steps) for _, steps in panels)
    per_second = (width - left - round(12 * scale)) / max(seconds, 1e-9)
    heights = [top + pitch * len(steps) + axis for _, steps in panels]
    entries, rows = _legend(_seen(panels), font, left, width, scale)
    image = Image.new("RGB", (width, sum(heights) + line * (rows + 1)), "white")
    canvas = ImageDraw.Draw(image)

    def panel(offset: int, title: str, steps: Sequence[Step]) -> None:
        start = min(step.start for step in steps)

        def box(above: float, height: float, begin: float, finish: float, **style: Any) -> None:
            first, last = (left + (moment - start) * per_second for moment in (begin, finish))
            canvas.rectangle((first, above, max(last, first + 1), above + height), **style)

        canvas.text((left, offset + 5 * scale), title, fill="#222222", font=font)
        for rank, (step, labelled) in enumerate(zip(steps, label(steps), strict=True)):
            above = offset + top + pitch * rank
            canvas.text((8 * scale, above + 2 * scale), f"rank {rank}", fill="#222222", font=font)
            box(above, lane, step.start, step.end, outline="#c9ced6")
            for begin, finish, name in labelled:
                box(above, lane, begin, finish, fill=COLORS[name])
            for span in step.spans:
                if span.track != ENGINE:
                    box(above + lane + 2, lane // 2 - 2, span.start, span.end, fill=COLORS[span.kind.value])
        below = offset + top + pitch * len(steps)
        for tick in _ticks(seconds):
            x = left + tick * per_second / 1e3
            canvas.line((x, below, x, below + 4 * scale), fill="#888888")
            if x + font.getlength(text := f"{tick:g} ms") < width:
                canvas.text((x + 2 * scale, below + 3 * scale), text, fill="#666666", font=font)

    offset = 0
    for (title, steps), height in zip(panels, heights, strict=True):
        panel(offset, title, steps)
        offset += height
    for name, x, row in entries:
        above = offset + line * (row + 0.4)
        canvas.rectangle((x, above, x + 10 * scale, above + 10 * scale), fill=COLORS[name])
        canvas.text((x + 14 * scale, above - scale), name, fill="#222222", font=font)
    return np.asarray(image)


def _seen(panels: Sequence[tuple[str, Sequence[Step]]]) -> list[str]:
    """Labels that the picture contains, in the order of COLORS."""
    engine = {name for _, steps in panels for labelled in label(steps) for *_, name in labelled}
    background = {
        span.kind.value for _, steps in panels for step in steps for span in step.spans if span.track != ENGINE
    }
    return [name for name in COLORS if name in engine | background]


def _legend(
    names: Sequence[str], font: Any, left: int, width: int, scale: float
) -> tuple[list[tuple[str, float, int]], int]:
    """Name, horizontal position and row of each entry, and the number of rows."""
    entries, x, row = [], float(left), 0
    for name in names:
        size = font.getlength(name) + 14 * scale
        if x + size > width - 12 * scale and x > left:
            x, row = float(left), row + 1
        entries.append((name, x, row))
        x += size + 16 * scale
    return entries, row + 1


def _ticks(seconds: float) -> NDArray[np.float64]:
    """Round numbers of milliseconds, at most ten of them, from 0 to the end of the axis."""
    step = 10.0 ** np.floor(np.log10(max(seconds * 1e3, 1e-6)))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if seconds * 1e3 / s <= 9)
    return np.arange(0, seconds * 1e3 + step / 2, step)


def available() -> bool:
    """Whether Pillow is installed."""
    try:
        from PIL import Image, ImageDraw, ImageFont  # noqa: F401
    except ImportError:
        return False
    return True
