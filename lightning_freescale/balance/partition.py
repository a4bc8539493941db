"""Partition of a global batch: pure functions from the costs of its samples to the rank of each sample.

Every rank computes the same partition from the same costs: there is no randomness, and the index breaks ties. Three modes:

* :func:`zigzag`: sort by cost, then assign to ranks forwards and backwards in turn. Equal sample counts. This is the
  balancing with fixed batch size of the FreeScale paper.
* :func:`fixed`: equal sample counts, minimal load on the heaviest rank. The default.
* :func:`variable`: sample counts may differ, minimal time on the slowest rank, memory bounded in tokens.

Example: eight histories on two ranks. One history costs more than all others together.

    >>> import numpy as np
    >>> lengths = np.array([70, 900, 410, 30, 120, 60, 200, 80])
    >>> costs = lengths + lengths**2 / 2048
    >>> batch_order = [0, 0, 0, 0, 1, 1, 1, 1]
    >>> for name, ranks in {"none": batch_order, "zigzag": zigzag(costs, 2), "fixed": fixed(costs, 2),
    ...                     "variable": variable(costs, 2)}.items():
    ...     print(f"{name:8} {np.asarray(ranks)} loads {loads(costs, ranks, 2).round()} "
    ...           f"straggler {straggler(costs, ranks, 2):.1%}")
    none     [0 0 0 0 1 1 1 1] loads [1890.  491.] straggler 37.0%
    zigzag   [1 0 1 0 0 1 1 0] loads [1536.  846.] straggler 22.5%
    fixed    [0 0 1 0 1 0 1 1] loads [1460.  922.] straggler 18.4%
    variable [1 0 1 1 1 1 1 1] loads [1296. 1086.] straggler 8.1%
    >>> [round(lower_bound(costs, 2, mode)) for mode in ("zigzag", "fixed", "variable")]
    [1460, 1460, 1296]

``fixed`` and ``variable`` reach their bounds here: no partition is better as long as a history stays on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale import _C
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.jagged import as_indices

Mode = Literal["zigzag", "fixed", "variable"]


def zigzag(costs: ArrayLike, ranks: int) -> NDArray[np.int64]:
    """Assign the samples by descending cost to ranks 0, 1, 2, ..., 2, 1, 0, 0, 1, 2, ...

    Args:
        costs: ``[n]`` cost of each sample, in any unit; finite, not negative.
        ranks: number of ranks.

    Returns:
        ``[n]`` int64, the rank of each sample. Sample counts are equal, or differ by one if ``n % ranks``.
    """
    return _C.zigzag(_reals(costs), ranks)


def fixed(costs: ArrayLike, ranks: int) -> NDArray[np.int64]:
    """Minimise the load of the heaviest rank under equal sample counts; never worse than :func:`zigzag`.

    The most expensive sample comes first. Each sample goes to the lightest rank that is not full. Then the heaviest rank
    swaps samples with lighter ranks until it is within 0.001% of :func:`lower_bound` or no swap helps.

    Args:
        costs: ``[n]`` cost of each sample, in any unit; finite, not negative.
        ranks: number of ranks.

    Returns:
        ``[n]`` int64, the rank of each sample. Sample counts are equal, or differ by one if ``n % ranks``.
    """
    return _C.fixed(_reals(costs), ranks)


def variable(
    costs: ArrayLike,
    ranks: int,
    *,
    tokens: ArrayLike | None = None,
    max_tokens: int | None = None,
    shares: ArrayLike | None = None,
) -> NDArray[np.int64]:
    """Minimise the time of the slowest rank; sample counts may differ. Never worse than :func:`fixed`.

    Args:
        costs: ``[n]`` cost of each sample, in any unit; finite, not negative.
        ranks: number of ranks. A rank may get no samples, for instance if ``n < ranks``.
        tokens: ``[n]`` integers, the memory that each sample takes, usually its history length. Needs ``max_tokens``.
        max_tokens: largest sum of ``tokens`` on one rank. A bound that the batch cannot meet is an error. With a bound the
            result is never worse than :func:`fixed` only if the partition of :func:`fixed` meets the bound, too.
        shares: ``[ranks]`` target share of the work of each rank, in any unit. The time of a rank is its load divided by
            its share. Equal by default.

    Returns:
        ``[n]`` int64, the rank of each sample.
    """
    if (tokens is None) != (max_tokens is None):
        raise ConfigurationError(
            f"tokens and max_tokens: pass both or none; max_tokens is {max_tokens}, "
            f"tokens {'is missing' if tokens is None else 'is given'}"
        )
    return _C.variable(
        _reals(costs),
        ranks,
        None if tokens is None else as_indices("tokens", tokens),
        0 if max_tokens is None else max_tokens,
        None if shares is None else _reals(shares),
    )


PARTITIONS: dict[Mode, Callable[[ArrayLike, int], NDArray[np.int64]]] = {
    "zigzag": zigzag,
    "fixed": fixed,
    "variable": variable,
}


def lower_bound(costs: ArrayLike, ranks: int, mode: Mode = "fixed") -> float:
    """Return a lower bound for the load of the heaviest rank in this mode, in the unit of ``costs [n]``.

    The bound is the larger one of two loads: the mean load, and the least load of the rank with the most expensive sample.
    In the modes with equal counts (``zigzag``, ``fixed``) that rank also has the cheapest ``n // ranks - 1`` samples.
    """
    if mode not in PARTITIONS:
        raise ConfigurationError(f"mode: {mode!r} is unknown; choose one of {', '.join(PARTITIONS)}")
    ascending = np.sort(_reals(costs))
    if not ascending.size:
        return 0.0
    others = 0 if mode == "variable" else max(len(ascending) // ranks - 1, 0)
    return float(max(ascending.sum() / ranks, ascending[-1] + ascending[:others].sum()))


def loads(costs: ArrayLike, ranks_of_samples: ArrayLike, world: int) -> NDArray[np.float64]:
    """Return the total cost on each rank, ``[world]``, from the cost ``[n]`` and the rank ``[n]`` of each sample."""
    ranks = as_indices("ranks_of_samples", ranks_of_samples)
    if ranks.size and not 0 <= ranks.min() <= ranks.max() < world:
        raise ValueError(f"ranks_of_samples: {ranks.min()} to {ranks.max()}, outside 0 .. {world - 1}")
    return np.bincount(ranks, weights=_reals(costs), minlength=world).astype(np.float64, copy=False)


def straggler(costs: ArrayLike, ranks_of_samples: ArrayLike, world: int) -> float:
    """Return the mean idle time of the ranks as a fraction of the step time, from 0 to 1.

    The function takes cost as time, and assumes that all ranks wait for the slowest one.

    Args:
        costs: ``[n]`` cost of each sample.
        ranks_of_samples: ``[n]`` rank of each sample.
        world: number of ranks, those without samples included.
    """
    load = loads(costs, ranks_of_samples, world)
    slowest = load.max()
    return float(1 - load.mean() / slowest) if slowest > 0 else 0.0


def _reals(values: ArrayLike) -> NDArray[np.float64]:
    return np.ascontiguousarray(values, dtype=np.float64)
