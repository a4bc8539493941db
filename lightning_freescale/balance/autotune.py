"""AutoTune: the share of the work that each rank gets follows how fast it was. For ``variable`` balancing.

A cost model cannot tell that one machine is slower than another; measured times can. Pure and deterministic.

    >>> retune([0.5, 0.5], work=[100, 100], seconds=[1.0, 1.25]).round(3)  # the second is a fifth slower: 0.556, 0.444
    array([0.55, 0.45])
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_STEP = 0.1  # a share grows or shrinks by a tenth at a time: one bad measurement must not starve a rank
TOLERANCE = 0.02  # speeds this close are equal: balancing by noise would cost more than it gives
LEAST = 0.1  # of an equal share, which every rank keeps


def retune(shares: ArrayLike, work: ArrayLike, seconds: ArrayLike) -> NDArray[np.float64]:
    """New shares, ``[ranks]``, that add up to 1.

    A rank's speed is its work over its time; in proportion to the speeds, all ranks would need equally long. Where every
    rank has done its share of the work, that is the rule of the FreeScale paper, local against global time.

    Args:
        shares: ``[ranks]`` up to now, in any unit.
        work: ``[ranks]`` cost of what each rank trained, in any unit; 0 if nothing is known of it.
        seconds: ``[ranks]`` time it took, without waiting for others.
    """
    old = np.asarray(shares, dtype=np.float64)
    old = old / old.sum()
    done, took = np.asarray(work, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    known = (done > 0) & (took > 0)
    if not known.any():
        return old
    speed = np.divide(done, took, out=np.zeros_like(old), where=known)
    # Ranks of which nothing is known keep their share; the others divide theirs anew.
    target = np.where(known, speed / speed.sum() * old[known].sum(), old)
    if (np.abs(target / old - 1) <= TOLERANCE).all():
        return old
    new = old * np.clip(target / old, 1 - MAX_STEP, 1 + MAX_STEP)
    new = np.maximum(new / new.sum(), LEAST / len(new))
    return new / new.sum()
