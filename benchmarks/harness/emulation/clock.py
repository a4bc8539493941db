"""Clocks of emulated devices and networks: virtual time or real time.

Virtual time advances only when a rank waits for an emulated device or transfer. It is the same in every run, on every
machine and under any load, and the emulation does not have to sleep. Real time also contains everything that the host
does.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds. Clocks of ranks on one host are comparable."""

    def wait_until(self, moment: float) -> None:
        """Let time pass until ``moment``. Does nothing if ``moment`` is in the past."""


class VirtualClock:
    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, moment: float) -> None:
        self._now = max(self._now, moment)


class RealClock:
    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - time.monotonic()))
