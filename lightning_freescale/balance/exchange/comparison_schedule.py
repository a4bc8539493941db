"""``ComparisonSchedule``: how often the ranks compare the lengths of their batches."""

from __future__ import annotations

from lightning_freescale.runtime.log import log_once

BALANCED_IN_A_ROW = 16  # batches without a moved sample after which the ranks compare fewer batches
FIRST_INTERVAL = 16  # batches from one comparison to the next, at first
LONGEST_INTERVAL = 64  # batches; the interval doubles up to this number while the batches stay balanced


class ComparisonSchedule:
    """Tells which batches the ranks compare.

    They compare every batch until ``BALANCED_IN_A_ROW`` of them in a row needed no move of samples. Then they compare fewer
    and fewer batches, until one of those does need a move. All ranks must make the same calls: then all decide the same.

    Args:
        balanced: batches in a row without a moved sample, so far.

    >>> schedule = ComparisonSchedule(balanced=BALANCED_IN_A_ROW)
    >>> [schedule.batches_to_skip() for _ in range(4)]
    [15, 31, 63, 63]
    """

    def __init__(self, balanced: int = 0):
        self.balanced = balanced
        self._interval = FIRST_INTERVAL

    def batches_to_skip(self) -> int:
        """Return the number of batches to skip before the next comparison."""
        if self.balanced < BALANCED_IN_A_ROW:
            return 0
        interval, self._interval = self._interval, min(2 * self._interval, LONGEST_INTERVAL)
        return interval - 1

    def record(self, moved: bool) -> None:
        """Take the result of a comparison: whether any sample has moved."""
        self.balanced = 0 if moved else self.balanced + 1
        if self.balanced == BALANCED_IN_A_ROW:
            self._interval = FIRST_INTERVAL
            log_once(
                f"balance: {BALANCED_IN_A_ROW} batches in a row were balanced as they were loaded; from now on the ranks "
                f"compare one batch in {FIRST_INTERVAL}, later one in {LONGEST_INTERVAL}"
            )
