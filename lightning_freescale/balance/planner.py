"""``Planner``: what makes a plan, in one value that all ranks share: mode, cost model and bounds.

The same planner serves data balanced at the source and samples exchanged between ranks. It never changes: a fitted cost
model comes as a new planner.

    >>> planner = Planner("fixed", CostModel(linear=1.0, quadratic=1 / 2048))
    >>> planner([70, 900, 410, 30, 120, 60, 200, 80], world=2)
    array([0, 0, 1, 0, 1, 0, 1, 1])
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale.balance.cost import CostModel
from lightning_freescale.balance.partition import PARTITIONS, Mode, variable
from lightning_freescale.runtime.errors import ConfigurationError

# Samples move only if the slowest rank's work shrinks by more than this share: less is lost in the noise, and moving is not free.
WORTH = 0.002

# Events at which attention costs as much as all that is linear in a history: an HSTU of width 480, or a guess for any other.
CROSSOVER = 2048


def rule_of_thumb() -> CostModel:
    """``L + L^2 / 2048``: the cost of a history while nothing is known of the model."""
    return CostModel(linear=1.0, quadratic=1 / CROSSOVER)


@dataclass(frozen=True)
class Planner:
    """Deals the samples of a global batch to ranks. Equal planners make equal plans, on every rank.

    Attributes:
        mode: ``"fixed"``, ``"zigzag"`` or ``"variable"``, see :mod:`~.partition`.
        cost_model: what a sample costs.
        max_tokens: most events on one rank, with ``"variable"`` only; a batch that cannot keep it is an error.
        shares: target share of the work of each rank, with ``"variable"`` only; equal by default.
    """

    mode: Mode = "fixed"
    cost_model: CostModel = field(default_factory=rule_of_thumb)
    max_tokens: int | None = None
    shares: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.mode not in PARTITIONS:
            raise ConfigurationError(f"balance: {self.mode!r} is none of off, {', '.join(PARTITIONS)}")
        if self.mode != "variable" and (self.max_tokens is not None or self.shares is not None):
            raise ConfigurationError(
                f"max_tokens and shares need balance='variable': with {self.mode!r} the sample counts are equal"
            )

    @staticmethod
    def of(balance: str | Planner) -> Planner | None:
        """The planner of a setting ``balance``: a mode, a planner, or ``"off"``, which has none."""
        if isinstance(balance, Planner):
            return balance
        return None if balance == "off" else Planner(balance)  # type: ignore[arg-type]  # checked there

    def __call__(self, lengths: ArrayLike, candidates: ArrayLike | None = None, *, world: int) -> NDArray[np.int64]:
        """The rank of each sample, ``[n]``. No rank goes without if there are samples for all.

        Args:
            lengths: ``[n]`` events of each history.
            candidates: ``[n]`` candidates scored for each sample.
            world: number of ranks.
        """
        return self._deal(self.cost_model(lengths, candidates), lengths, world)

    def _deal(self, costs: NDArray[np.float64], lengths: ArrayLike, world: int) -> NDArray[np.int64]:
        if self.mode != "variable":
            return PARTITIONS[self.mode](costs, world)
        bound = {} if self.max_tokens is None else {"tokens": lengths, "max_tokens": self.max_tokens}
        return _none_idle(variable(costs, world, shares=self.shares, **bound), costs, world)  # type: ignore[arg-type]

    def from_home(
        self, home: NDArray[np.int64], lengths: ArrayLike, candidates: ArrayLike | None = None, *, world: int
    ) -> NDArray[np.int64]:
        """As above for samples that are on the ranks ``home`` ``[n]``: they stay there if dealing them wins next to nothing.

        >>> Planner().from_home(np.array([0, 0, 1, 1]), [300, 300, 300, 300], world=2)
        array([0, 0, 1, 1])
        """
        costs = self.cost_model(lengths, candidates)
        dealt = self._deal(costs, lengths, world)
        now, then = (np.bincount(ranks, costs, world).max(initial=0.0) for ranks in (home, dealt))
        equal = np.ptp(np.bincount(home, minlength=world)) <= 1
        stay = equal and self.shares is None and self.max_tokens is None and now <= (1 + WORTH) * then
        return home if stay else dealt


def _none_idle(ranks: NDArray[np.int64], costs: NDArray[np.float64], world: int) -> NDArray[np.int64]:
    """Give a rank that got nothing, for its share is small, the cheapest sample of the rank with most samples.

    A mean over no samples is no number, and most models take one.
    """
    counts = np.bincount(ranks, minlength=world)
    for idle in np.flatnonzero(counts == 0) if len(ranks) >= world else ():
        donor = counts.argmax()
        own = np.flatnonzero(ranks == donor)
        ranks[own[costs[own].argmin()]] = idle
        counts[donor] -= 1
        counts[idle] = 1
    return ranks
