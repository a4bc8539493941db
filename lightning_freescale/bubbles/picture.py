"""The timeline as a picture: ranks from top to bottom, time from left to right, coloured by what the engine does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.bubbles.attribution import label
from lightning_freescale.bubbles.timeline import ENGINE, Step

# Useful work is blue, exchanges are warm, waiting is grey; what is left white is idle for no reason that we know.
COLORS = {
    "dense_forward": "#4f83cc",
    "dense_backward": "#2a5599",
    "optimizer": "#86b3e6",
    "lookup": "#2a9d8f",
    "id_exchange": "#f2c14e",
    "row_exchange": "#f08a24",
    "row_exchange_collision": "#e4572e",
    "row_exchange_exclusive": "#f7b27a",
    "gradient_exchange": "#c65b3a",
    "allreduce": "#9c5cb4",
    "straggler": "#d7263d",
    "input_wait": "#8d99ae",
    "h2d": "#b9c3d0",
    "metrics": "#ddd2b0",
    "exposed_embedding": "#f08a24",
    "exposed_dense": "#9c5cb4",
    "other": "#cfd5dd",
}
_LEFT, _TOP, _LANE, _GAP, _LEGEND = 64, 26, 16, 8, 40


def draw(steps: Sequence[Step], width: int = 1200, title: str = "") -> NDArray[np.uint8]:
    """``[H, W, 3]`` picture of one step of all ranks, on a common clock. Needs Pillow.

    Each rank has a lane for its engine and, below, a thinner one for exchanges in the background.
    """
    from PIL import Image, ImageDraw, ImageFont

    start, end = min(step.start for step in steps), max(step.end for step in steps)
    scale = (width - _LEFT - 12) / max(end - start, 1e-9)
    pitch = _LANE + _LANE // 2 + _GAP
    height = _TOP + pitch * len(steps) + 18 + _LEGEND
    image = Image.new("RGB", (width, height), "white")
    canvas, font = ImageDraw.Draw(image), ImageFont.load_default()

    def box(top: float, lane: float, begin: float, finish: float, name: str) -> None:
        left, right = _LEFT + (begin - start) * scale, _LEFT + (finish - start) * scale
        canvas.rectangle((left, top, max(right, left + 1), top + lane), fill=COLORS[name])

    canvas.text((_LEFT, 6), title, fill="#222222", font=font)
    seen: dict[str, None] = {}
    for rank, (step, labelled) in enumerate(zip(steps, label(steps), strict=True)):
        top = _TOP + pitch * rank
        canvas.text((8, top + 2), f"rank {rank}", fill="#222222", font=font)
        canvas.rectangle(
            (_LEFT + (step.start - start) * scale, top, _LEFT + (step.end - start) * scale, top + _LANE),
            outline="#c9ced6",
        )
        for begin, finish, name in labelled:
            box(top, _LANE, begin, finish, name)
            seen[name] = None
        for span in step.spans:
            if span.track != ENGINE:
                box(top + _LANE + 2, _LANE // 2 - 2, span.start, span.end, span.kind.value)
                seen[span.kind.value] = None
    bottom = _TOP + pitch * len(steps)
    _axis(canvas, font, bottom, end - start, scale)
    left, top = _LEFT, bottom + 20
    for name in (name for name in COLORS if name in seen):
        if left + 16 + canvas.textlength(name, font=font) > width - 12:
            left, top = _LEFT, top + 16
        canvas.rectangle((left, top, left + 10, top + 10), fill=COLORS[name])
        canvas.text((left + 14, top - 1), name, fill="#222222", font=font)
        left += 30 + int(canvas.textlength(name, font=font))
    return np.asarray(image)


def _axis(canvas: Any, font: Any, top: float, seconds: float, scale: float) -> None:
    """Ticks at round numbers of milliseconds, four to nine of them."""
    step = 10.0 ** np.floor(np.log10(max(seconds * 1e3, 1e-6)))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if seconds * 1e3 / s <= 9)
    for tick in np.arange(0, seconds * 1e3 + step / 2, step):
        left = _LEFT + tick * scale / 1e3
        canvas.line((left, top, left, top + 4), fill="#888888")
        canvas.text((left + 2, top + 3), f"{tick:g} ms", fill="#666666", font=font)


def available() -> bool:
    """Whether Pillow is installed."""
    try:
        from PIL import Image, ImageDraw, ImageFont  # noqa: F401
    except ImportError:
        return False
    return True
