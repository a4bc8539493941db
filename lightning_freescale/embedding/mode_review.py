"""``prioritize="auto"`` after its choice: when have the conditions of the trial changed so much that it must be repeated?

The prioritized exchange gains what it hides. That depends on the size of a batch and on the share of its rows that collide. The
ranks compare both with the values at the time of the choice, every :data:`REVIEW_STEPS` steps. It also depends on the number of
micro-batches whose gradients are accumulated, which is compared before every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning_freescale.embedding.schedule import ExchangeSchedule

REVIEW_STEPS = 500  # steps between two comparisons
MAX_SIZE_RATIO = 1.5  # between the mean numbers of ids of a batch
MAX_COLLISION_DIFFERENCE = 0.1  # between the collision rates


class TrialConditions(NamedTuple):
    """Mean over a number of steps and over all ranks."""

    ids: float  # of a batch on a rank
    collision_rate: float | None  # None if no step was prioritized

    def change_since(self, before: TrialConditions) -> str | None:
        """What has changed much; None if nothing has.

        >>> TrialConditions(1000, 0.12).change_since(TrialConditions(900, 0.10))
        >>> TrialConditions(2000, None).change_since(TrialConditions(900, 0.10))
        'a batch has 2000 ids instead of 900'
        """
        larger, smaller = max(self.ids, before.ids), min(self.ids, before.ids)
        if larger > MAX_SIZE_RATIO * smaller:
            return f"a batch has {self.ids:.0f} ids instead of {before.ids:.0f}"
        rates = self.collision_rate, before.collision_rate
        if None not in rates and abs(rates[0] - rates[1]) > MAX_COLLISION_DIFFERENCE:  # type: ignore[operator]
            return f"{rates[0]:.0%} of the rows collide instead of {rates[1]:.0%}"
        return None


class ModeReview:
    """Counts ids and collisions, and compares them with those of the trial.

    Args:
        gather: gathers the counts of every rank. All ranks call it together.
    """

    def __init__(self, gather: Callable[[Any], list[Any]]):
        self._gather = gather
        self._steps = self._ids = 0
        self._rows_before = self._collisions_before = 0
        self.at_choice: TrialConditions | None = None
        self._micro_batches = 1

    def add_step(self, ids: int) -> None:
        """Count a step whose batch has ``ids`` ids on this rank."""
        self._steps += 1
        self._ids += ids

    def choice_made(self, schedule: ExchangeSchedule, micro_batches: int = 1) -> None:
        """Keep the conditions of the trial that has just ended. All ranks must call it."""
        self.at_choice, self._micro_batches = self._take(schedule), micro_batches

    def change(self, schedule: ExchangeSchedule | None, micro_batches: int = 1) -> str | None:
        """What has changed much since the choice; None if nothing has, or if it is not time to compare. All ranks call it.

        Args:
            micro_batches: of each optimizer step from now on.
        """
        if self.at_choice is not None and micro_batches != self._micro_batches:
            return f"accumulate_grad_batches is {micro_batches} instead of {self._micro_batches}"
        if self.at_choice is None or self._steps < REVIEW_STEPS:
            return None
        return self._take(schedule).change_since(self.at_choice)

    def _take(self, schedule: ExchangeSchedule | None) -> TrialConditions:
        """The conditions since the last call."""
        stats = [module.exchange.stats for module in schedule.modules] if schedule is not None else []
        rows, collisions = sum(each.rows for each in stats), sum(each.collisions for each in stats)
        # A new schedule counts from 0.
        before = (self._rows_before, self._collisions_before) if rows >= self._rows_before else (0, 0)
        mine = (self._steps, self._ids, rows - before[0], collisions - before[1])
        self._rows_before, self._collisions_before = rows, collisions
        self._steps = self._ids = 0
        return conditions(self._gather(mine))


def conditions(counts: Sequence[tuple[int, int, int, int]]) -> TrialConditions:
    """Conditions from steps, ids, rows and collision rows of every rank.

    >>> conditions([(10, 1000, 900, 90), (10, 3000, 900, 270)])
    TrialConditions(ids=200.0, collision_rate=0.2)
    """
    steps, ids, rows, collisions = (sum(values) for values in zip(*counts, strict=True))
    return TrialConditions(ids / max(1, steps), collisions / rows if rows else None)
