"""The picture of a step: positions of the spans."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_freescale.bubbles.attribution import PARTS
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


# ---- colors ------------------------------------------------------------------------------------------------------------
# How people with a color blindness see linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
SIGHTS = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def seen(color: str, sight: str) -> np.ndarray:
    """CIELAB of a color as somebody with this sight sees it. Distances there are distances for the eye."""
    srgb = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.asarray(SIGHTS[sight]) @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    xyz /= [0.95047, 1, 1.08883]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def closest(colors: set[str]) -> float:
    """The smallest distance of two colors, for any sight. About 2 can just be told apart side by side."""
    return min(
        float(np.linalg.norm(seen(a, sight) - seen(b, sight)))
        for sight in SIGHTS
        for a, b in itertools.combinations(sorted(colors), 2)
    )


def test_colors_are_told_apart_by_the_color_blind() -> None:
    assert closest(set(COLORS.values())) > 16
    assert closest({COLORS[name] for name in ("dense_forward", *PARTS)}) > 27  # these lie side by side in every chart


def test_a_palette_of_red_and_green_is_detected() -> None:
    """Negative control: people with normal sight tell these two apart."""
    assert np.linalg.norm(seen("#c65b3a", "normal") - seen("#7a8c2e", "normal")) > 40
    assert closest({"#c65b3a", "#7a8c2e"}) < 16
