"""The same figures from several rounds of measurements, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.training.bubble import PARTS

Figures = Mapping[str, Any]


def collect(rounds: Sequence[Figures]) -> dict[str, dict[str, list[float]]]:
    """For each variant its figures in every round: step, samples/s, MFU, bubble and its parts, shares gone, bytes, memory.

    A figure that a round could not give is left out of that round.

    Args:
        rounds: the summarised figures of each round.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for figures in rounds:
        for name, variant in figures["sides"].items():
            mine = found.setdefault(name, {})
            for key, value in _flat(variant).items():
                mine.setdefault(key, []).append(value)
    return found


def _flat(variant: Figures) -> dict[str, float]:
    values = {"step_ms": variant["step_ms"]["mean"], "compute_ms": variant["compute_ms"]}
    keys = (
        "samples_per_second",
        "mfu",
        "bubble_ms",
        "sent_bytes",
        "peak_bytes",
        "transfers_ms",
        "of_limit",
        "busy_cores",
    )
    values |= {key: variant[key] for key in keys if key in variant}
    if "bubble_ms" in variant:
        values |= {part: variant["parts_ms"][part] for part in PARTS}
        values |= {f"gone of {name}": share for name, share in variant["gone"].items()}
    return values


def mean_and_spread(values: Sequence[float], digits: int = 1, scale: float = 1.0) -> str:
    """``"12.3"``, or ``"12.3 (12.1 to 12.6)"`` if there are several rounds.

    >>> mean_and_spread([2.0, 4.0]), mean_and_spread([0.5], digits=0, scale=100), mean_and_spread([])
    ('3.0 (2.0 to 4.0)', '50', '-')
    """
    if not values:
        return "-"
    scaled = [scale * value for value in values]
    mean = f"{statistics.mean(scaled):,.{digits}f}"
    return mean if len(scaled) == 1 else f"{mean} ({min(scaled):,.{digits}f} to {max(scaled):,.{digits}f})"
