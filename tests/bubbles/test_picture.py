"""The picture of a step: positions of the spans."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_freescale.bubbles.picture import COLORS, draw, draw_panels
from lightning_freescale.bubbles.spans import ENGINE, Kind, Span, Step

pytest.importorskip("PIL")


def step(compute: float, exchange: float, behind: float = 0.0) -> Step:
    """A forward of ``compute`` seconds, then a row exchange; with ``behind`` seconds of a background exchange from the start."""
    spans = [
        Span(Kind.DENSE_FORWARD, ENGINE, 5.0, 5.0 + compute, 5.0),
        Span(Kind.ROW_EXCHANGE, ENGINE, 5.0 + compute, 5.0 + compute + exchange, 5.0 + compute),
    ]
    if behind:
        spans.append(Span(Kind.ROW_EXCHANGE_EXCLUSIVE, "exchange", 5.0, 5.0 + behind, 5.0))
    return Step(0, 5.0, 5.0 + compute + exchange, tuple(spans))


def columns(image: NDArray, name: str) -> NDArray:
    """Columns of the image with the color of ``name``, in the row that has most of them (a lane, not the legend)."""
    color = np.array([int(COLORS[name][i : i + 2], 16) for i in (1, 3, 5)])
    rows = (image == color).all(axis=2)
    return np.flatnonzero(rows[rows.sum(axis=1).argmax()])


def test_spans_are_drawn_at_their_times() -> None:
    image = draw([step(0.3, 0.1, behind=0.2)] * 2, width=1000)
    forward, exchange, behind = (
        columns(image, name) for name in ("dense_forward", "row_exchange", "row_exchange_exclusive")
    )
    assert len(forward) == pytest.approx(3 * len(exchange), rel=0.02)
    assert len(behind) == pytest.approx(2 * len(exchange), rel=0.02)
    assert behind[0] == forward[0]
    assert forward[-1] + 1 == pytest.approx(exchange[0], abs=1)
    assert image.shape[1] == 1000


def test_panels_share_one_time_scale() -> None:
    slow, fast = [step(0.3, 0.3)], [step(0.3, 0.0)]
    image = draw_panels([("slow", slow), ("fast", fast)], width=1000, scale=1.5)
    half = len(image) // 2
    above, below = (columns(part, "dense_forward") for part in (image[:half], image[half:]))
    assert len(above) == pytest.approx(len(below), abs=2)
    assert above[0] == below[0]
    # On its own, the fast step fills the width.
    assert len(columns(draw(fast, width=1000), "dense_forward")) > 1.8 * len(above)
    assert len(draw_panels([("", slow), ("", fast)])) > len(draw(slow))
