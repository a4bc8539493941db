"""``Rest``: where batches are even already, few of them are worth the ranks' time."""

from __future__ import annotations

from lightning_freescale._log import say_once

EVEN = 16  # batches in a row whose samples stay where they are, before ranks rest
REST = 16  # one in so many is looked at then


class Rest:
    """Which batches are worth a look: all, until ``EVEN`` in a row were even already; then one in ``REST``, until one is not.

    The ranks must be told the same, and decide the same then.

    >>> rest = Rest(even=EVEN)
    >>> [rest.looks() for _ in range(REST)].count(True)
    1
    """

    def __init__(self, even: int = 0):
        self.even = even  # batches in a row
        self._rested = 0

    def looks(self) -> bool:
        """Whether to look at the next batch."""
        if self.even < EVEN:
            return True
        self._rested = (self._rested + 1) % REST
        return self._rested == 0

    def note(self, moved: bool) -> None:
        """What came of a look."""
        self.even = 0 if moved else self.even + 1
        if self.even == EVEN:
            say_once(f"balance: {EVEN} batches in a row were even already; from here on, one in {REST} is looked at")
