"""``Rest``: where batches are even already, few of them are worth the ranks' time."""

from __future__ import annotations

from lightning_freescale.runtime.log import log_once

EVEN = 16  # batches in a row whose samples stay where they are, before ranks rest
REST = 16  # one in so many is looked at then,
LONGEST = 64  # and by and by, as long as those are even, too, one in so many


class Rest:
    """Which batches are worth a look: all, until ``EVEN`` in a row were even already; then fewer and fewer, until one is not.

    The ranks must be told the same, and decide the same then.

    >>> rest = Rest(even=EVEN)
    >>> [rest.pause() for _ in range(4)]
    [15, 31, 63, 63]
    """

    def __init__(self, even: int = 0):
        self.even = even  # batches in a row
        self._interval = REST

    def pause(self) -> int:
        """How many batches to let be before the next look."""
        if self.even < EVEN:
            return 0
        interval, self._interval = self._interval, min(2 * self._interval, LONGEST)
        return interval - 1

    def note(self, moved: bool) -> None:
        """What came of a look."""
        self.even = 0 if moved else self.even + 1
        if self.even == EVEN:
            self._interval = REST
            log_once(f"balance: {EVEN} batches in a row were even already; from here on, few are looked at")
