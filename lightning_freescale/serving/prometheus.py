"""Counters, gauges and histograms in the text format of Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

LATENCY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Counter:
    """A number that only grows, for each value of one label. Without a label name it has one value.

    Args:
        name: the name of the metric.
        description: what it counts.
        label: the name of the label.
        values: values of the label that are shown from the start, with 0.
    """

    kind = "counter"

    def __init__(self, name: str, description: str, label: str = "", values: Sequence[str] = ()):
        self.name, self.description, self._label = name, description, label
        self._counts: dict[str, float] = dict.fromkeys(values if label else [""], 0)
        self._lock = threading.Lock()

    def add(self, amount: float = 1, value: str = "") -> None:
        """Add ``amount`` to the count of the label's ``value``."""
        with self._lock:
            self._counts[value] = self._counts.get(value, 0) + amount

    def lines(self) -> list[str]:
        with self._lock:
            counts = dict(self._counts)
        return [
            f"{self.name}{f'{{{self._label}={chr(34)}{value}{chr(34)}}}' if self._label else ''} {count:g}"
            for value, count in counts.items()
        ]


class Gauge:
    """A number that is read when it is asked for."""

    kind = "gauge"

    def __init__(self, name: str, description: str, read: Callable[[], float]):
        self.name, self.description, self._read = name, description, read

    def lines(self) -> list[str]:
        return [f"{self.name} {self._read():g}"]


class Histogram:
    """How many observations are at most as large as each of ``bounds``, which ascend."""

    kind = "histogram"

    def __init__(self, name: str, description: str, bounds: Sequence[float]):
        self.name, self.description, self._bounds = name, description, tuple(bounds)
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def lines(self) -> list[str]:
        with self._lock:
            counts, total = list(accumulate(self._counts)), self._sum
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        rows = [f'{self.name}_bucket{{le="{name}"}} {count}' for name, count in zip(names, counts, strict=True)]
        return [*rows, f"{self.name}_sum {total:g}", f"{self.name}_count {counts[-1]}"]


def exposition(metrics: Sequence[Counter | Gauge | Histogram]) -> str:
    """All metrics as text, for ``/metrics``."""
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.description}", f"# TYPE {metric.name} {metric.kind}", *metric.lines()]
    return "\n".join(lines) + "\n"
