"""Time for emulated devices and networks: one that really passes, or one that is only counted.

Counted time moves when an emulated device or transfer is waited for and by nothing else: it is the same on every run, on any
machine under any load, and takes no time. Real time shows the same with everything the host does on top.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds; comparable between the ranks of one host."""

    def wait_until(self, moment: float) -> None:
        """Let time pass; without effect for a moment in the past."""


class CountedTime:
    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, moment: float) -> None:
        self._now = max(self._now, moment)


class RealTime:
    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - time.monotonic()))
