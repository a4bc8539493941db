"""Whether the times of a variant can be trusted: its steps are steady, and its compute takes as long as that of the others.

The first steps of a process compile kernels and create buffers and connections. If such a step counts, the variant that trains
first seems slower than the others, and every bubble is wrong. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.harness.variant_names import DENSE_ONLY, SM_FREE, SYNC, TORCHREC_BASE, TORCHREC_SPARSE_DIST

WARM_UP_BATCHES = 2  # number of different batches in the warm-up; they alternate, so that equal steps can be compared
WARM_UP_STEPS = 10  # last steps of the warm-up, which must become steady
STEADY_STEPS = 6  # consecutive steps that must be steady
STEADY_TOLERANCE = 0.10  # of the median time of the same batch; one of the steps may differ by more
SAME_COMPUTE_TOLERANCE = 0.05  # between the compute times of the same batches in different variants
# Variants that compute the same batches on the same ranks, with no transfer beside the compute.
SAME_COMPUTE = (DENSE_ONLY, TORCHREC_BASE, TORCHREC_SPARSE_DIST, SYNC, SM_FREE)


def steady_after(step_ms: Sequence[float]) -> int | None:
    """Number of warm-up steps before the first :data:`STEADY_STEPS` steady ones; ``None`` if there are none.

    Args:
        step_ms: time of each warm-up step. Step ``i`` trains on batch ``i % WARM_UP_BATCHES``.

    >>> steady_after([900.0, 20.0, 33.0, 20.5, 30.0, 20.0, 31.0, 19.0])  # the first step compiles kernels
    1
    >>> steady_after([900.0, 20.0, 33.0, 20.5, 30.0, 45.0])
    """
    for first in range(len(step_ms) - STEADY_STEPS + 1):
        window = np.array(step_ms[first : first + STEADY_STEPS])
        by_batch = window.reshape(-1, WARM_UP_BATCHES)
        apart = np.abs(by_batch / np.median(by_batch, axis=0) - 1)
        if (apart > STEADY_TOLERANCE).sum() <= 1:
            return first
    return None


def compute_apart(variants: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """How much longer the compute of the same batches takes than alone, on the rank with the largest difference.

    Only variants in which a rank computes the batches of "dense alone", with nothing beside the compute, have an entry.

    >>> compute_apart({DENSE_ONLY: {"compute_rank_ms": [[10.0], [20.0]]}, SYNC: {"compute_rank_ms": [[10.2], [19.0]]}})
    {'freescale_sync': -0.05}
    """
    if DENSE_ONLY not in variants:
        return {}
    alone = np.array(variants[DENSE_ONLY]["compute_rank_ms"]).mean(axis=1)
    found = {}
    for name in SAME_COMPUTE[1:]:
        if name in variants:
            ratio = np.array(variants[name]["compute_rank_ms"]).mean(axis=1) / alone - 1
            found[name] = round(float(ratio[np.abs(ratio).argmax()]), 6)
    return found


def doubts(variants: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Reasons not to trust the bubbles of these variants; empty if there are none."""
    found = [
        f"{name}: its steps did not become steady in {variant['warm_up']['steps']} warm-up steps"
        for name, variant in variants.items()
        if not variant["warm_up"]["steady"]
    ]
    return found + [
        f"{name}: the compute of the same batches takes {apart:+.1%} compared with {DENSE_ONLY!r} on one rank, and at most "
        f"{SAME_COMPUTE_TOLERANCE:.0%} is accepted"
        for name, apart in compute_apart(variants).items()
        if abs(apart) > SAME_COMPUTE_TOLERANCE
    ]
