"""Two trainings that alternate on one machine, so that a slow drift of the machine affects both alike.

Both variants run in separate processes during the whole measurement, but only one of them trains at a time::

    variant 0   warm-up .             | block 1 .         | block 2 .         ...
    variant 1   .       warm-up       | .       block 1   | .       block 2   ...
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

PORT = "ALTERNATION_PORT"  # environment variable of all ranks of both variants: port of the common store
UNCOUNTED_STEPS_OF_BLOCK = 4  # first steps of a block, which do not count because the training has just resumed


class AlternatingBlocks(pl.Callback):
    """Holds the ranks of one variant before a block until all ranks of the other variant have finished theirs.

    Args:
        store: common store of all ranks of both variants, see :meth:`open`.
        variant: 0, which trains first, or 1.
        rank: rank within the variant.
        ranks: number of ranks of each variant.
        warm: steps of the first block, the warm-up.
        steps: steps of each further block.
        count: number of further blocks.
    """

    def __init__(self, store: dist.Store, variant: int, rank: int, ranks: int, warm: int, steps: int, count: int):
        self._store, self._variant, self._rank, self._ranks = store, variant, rank, ranks
        self._starts = [
            0,
            *range(warm, warm + count * steps + 1, steps),
        ]  # first step of each block, and the step after the last

    @classmethod
    def open(cls, variant: int, rank: int, timeout: float, **shape: int) -> AlternatingBlocks:
        """Over a store that rank 0 of variant 0 serves. A rank waits at most ``timeout`` seconds for another."""
        first = variant == rank == 0
        store = dist.TCPStore("127.0.0.1", int(os.environ[PORT]), is_master=first, timeout=timedelta(seconds=timeout))
        return cls(store, variant, rank, **shape)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx not in self._starts:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # no work of this block may run during a block of the other variant
        block, last = self._starts.index(batch_idx), len(self._starts) - 1
        if self._variant == 1 and self._rank == 0 and block:
            finished = f"block {block - 1} of {last - 1}" if block > 1 else "warm-up"
            print(f"{finished}: done", file=sys.stderr, flush=True)
        self._arrive(f"variant {self._variant} at block {block}", self._ranks)
        if self._variant == 0:
            self._await(f"variant 1 at block {block}")
        elif block < last:
            self._await(f"variant 0 at block {block + 1}")

    def leave(self) -> None:
        """Call this after the training. The rank that serves the store waits for the others."""
        self._arrive("the end", 2 * self._ranks)
        if self._variant == self._rank == 0:
            self._await("the end")

    def _await(self, where: str) -> None:
        """Wait until all expected ranks have arrived at ``where``."""
        try:
            self._store.wait([where])
        except dist.DistStoreError as error:
            raise RuntimeError(
                f"variant {self._variant} waited for {where}, which did not arrive in time; "
                "look for an error of the other variant"
            ) from error

    def _arrive(self, where: str, count: int) -> None:
        """Register this rank at ``where``. The last of ``count`` ranks lets the waiting ranks continue."""
        if self._store.add(f"{where}, ranks", 1) == count:
            self._store.set(where, "all")


def block_times(ends: NDArray[np.float64], warm: int, steps: int, count: int) -> NDArray[np.float64]:
    """``[count]`` seconds per step of each block after the warm-up, on the slowest rank, without the uncounted steps.

    Args:
        ends: ``[ranks, steps]`` seconds, the end of each step; each rank on its own clock.
    """
    starts = warm + steps * np.arange(count)
    took = ends[:, starts + steps - 1] - ends[:, starts + UNCOUNTED_STEPS_OF_BLOCK - 1]
    return took.max(axis=0) / (steps - UNCOUNTED_STEPS_OF_BLOCK)
