"""``Planner``: assigns the samples of a global batch to ranks. It holds the mode, the cost model and the bounds.

All ranks have an equal planner. The same planner serves balancing at the source and by exchange. A planner never changes: a
newly fitted cost model comes in a new planner.

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

# Samples that are on their ranks already move only if this reduces the work of the slowest rank by more than this fraction.
# A smaller gain disappears in the noise of step times, and an exchange takes time itself.
MIN_GAIN = 0.002

# The history length, in events, at which attention costs as much as everything that is linear in the length. This is the
# value of an HSTU of width 480, and a guess for any other model.
CROSSOVER_LENGTH = 2048


def default_cost_model() -> CostModel:
    """Return ``L + L^2 / 2048``, the cost of a history of ``L`` events as long as nothing is known about the model."""
    return CostModel(linear=1.0, quadratic=1 / CROSSOVER_LENGTH)


@dataclass(frozen=True)
class Planner:
    """Assigns the samples of a global batch to ranks. Equal planners give equal results, on every rank.

    Attributes:
        mode: ``"fixed"``, ``"zigzag"`` or ``"variable"``, see :mod:`~.partition`.
        cost_model: the cost of a sample.
        max_tokens: largest number of events on one rank, for ``"variable"`` only. A batch that needs more is an error.
        shares: target share of the work of each rank, for ``"variable"`` only. Equal by default.
    """

    mode: Mode = "fixed"
    cost_model: CostModel = field(default_factory=default_cost_model)
    max_tokens: int | None = None
    shares: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.mode not in PARTITIONS:
            raise ConfigurationError(f"balance: {self.mode!r} is unknown; choose one of off, {', '.join(PARTITIONS)}")
        if self.mode != "variable" and (self.max_tokens is not None or self.shares is not None):
            raise ConfigurationError(
                f"max_tokens and shares need balance='variable': with {self.mode!r} the sample counts are equal"
            )

    @staticmethod
    def of(balance: str | bool | Planner) -> Planner | None:
        """Return the planner for a setting ``balance``: a mode, a planner, or ``"off"``, which gives ``None``."""
        balance = without_booleans(balance)
        if isinstance(balance, Planner):
            return balance
        return None if balance == "off" else Planner(balance)  # type: ignore[arg-type]  # __post_init__ checks the mode

    def __call__(self, lengths: ArrayLike, candidates: ArrayLike | None = None, *, world: int) -> NDArray[np.int64]:
        """Return the rank of each sample, ``[n]``. Every rank gets at least one sample if there are enough.

        Args:
            lengths: ``[n]`` events of each history.
            candidates: ``[n]`` candidates scored for each sample.
            world: number of ranks.
        """
        return self._assign(self.cost_model(lengths, candidates), lengths, world)

    def _assign(self, costs: NDArray[np.float64], lengths: ArrayLike, world: int) -> NDArray[np.int64]:
        if self.mode != "variable":
            return PARTITIONS[self.mode](costs, world)
        bound = {} if self.max_tokens is None else {"tokens": lengths, "max_tokens": self.max_tokens}
        return _fill_empty_ranks(variable(costs, world, shares=self.shares, **bound), costs, world)  # type: ignore[arg-type]

    def reassign(
        self, current: NDArray[np.int64], lengths: ArrayLike, candidates: ArrayLike | None = None, *, world: int
    ) -> NDArray[np.int64]:
        """Return the rank of each sample, ``[n]``, for samples that are on the ranks ``current [n]`` already.

        The result is the array ``current`` itself if a move would gain too little, see ``MIN_GAIN``.

        >>> Planner().reassign(np.array([0, 0, 1, 1]), [300, 300, 300, 300], world=2)
        array([0, 0, 1, 1])
        """
        costs = self.cost_model(lengths, candidates)
        assigned = self._assign(costs, lengths, world)
        before, after = (np.bincount(ranks, costs, world).max(initial=0.0) for ranks in (current, assigned))
        equal_counts = np.ptp(np.bincount(current, minlength=world)) <= 1
        stay = equal_counts and self.shares is None and self.max_tokens is None and before <= (1 + MIN_GAIN) * after
        return current if stay else assigned


def without_booleans(balance: str | bool | Planner) -> str | Planner:
    """A setting ``balance``, with ``"off"`` in the place of ``False``. YAML reads a plain ``off`` as ``False``.

    >>> without_booleans(False)
    'off'
    """
    if balance is True:
        modes = ", ".join(repr(mode) for mode in PARTITIONS)
        raise ConfigurationError(
            f"balance=True does not name a mode (YAML reads a plain `on` as True); choose one of 'auto', {modes}, 'off'"
        )
    return "off" if balance is False else balance


def _fill_empty_ranks(ranks: NDArray[np.int64], costs: NDArray[np.float64], world: int) -> NDArray[np.int64]:
    """Give each rank without samples the cheapest sample of the rank that has the most samples.

    A rank with a small share may get no sample. But most models compute a mean over samples, which needs at least one.
    """
    counts = np.bincount(ranks, minlength=world)
    for empty in np.flatnonzero(counts == 0) if len(ranks) >= world else ():
        donor = counts.argmax()
        own = np.flatnonzero(ranks == donor)
        ranks[own[costs[own].argmin()]] = empty
        counts[donor] -= 1
        counts[empty] = 1
    return ranks
