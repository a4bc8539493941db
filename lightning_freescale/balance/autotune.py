"""``retune``: adapts the share of the work of each rank to its measured speed, for the mode ``variable``.

A cost model cannot tell that one machine is slower than another; measured times can. The function is pure and
deterministic.

    >>> retune([0.5, 0.5], work=[100, 100], seconds=[1.0, 1.25]).round(3)  # proportional to speed: 0.556 and 0.444
    array([0.55, 0.45])
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_CHANGE = 0.1  # a share changes by at most 10% at a time, so that one bad measurement cannot starve a rank
SPEED_TOLERANCE = 0.02  # smaller differences of speed are taken for noise
MIN_WORK_SHARE = 0.1  # every rank keeps at least this fraction of an equal share


def retune(shares: ArrayLike, work: ArrayLike, seconds: ArrayLike) -> NDArray[np.float64]:
    """Return new shares ``[ranks]``, which add up to 1.

    The speed of a rank is its work divided by its time. With shares in proportion to the speeds, all ranks need equally
    long. If every rank has done exactly its share of the work, this is the rule of the FreeScale paper, which compares the
    local time with the global time.

    Args:
        shares: ``[ranks]`` current shares, in any unit.
        work: ``[ranks]`` cost of the samples that each rank trained, in any unit; 0 if unknown.
        seconds: ``[ranks]`` compute time of that work, without waits for other ranks.
    """
    old = np.asarray(shares, dtype=np.float64)
    old = old / old.sum()
    done, took = np.asarray(work, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    known = (done > 0) & (took > 0)
    if not known.any():
        return old
    speed = np.divide(done, took, out=np.zeros_like(old), where=known)
    # A rank of unknown speed keeps its share. The others divide the sum of theirs.
    target = np.where(known, speed / speed.sum() * old[known].sum(), old)
    if (np.abs(target / old - 1) <= SPEED_TOLERANCE).all():
        return old
    new = old * np.clip(target / old, 1 - MAX_CHANGE, 1 + MAX_CHANGE)
    new = np.maximum(new / new.sum(), MIN_WORK_SHARE / len(new))
    return new / new.sum()
