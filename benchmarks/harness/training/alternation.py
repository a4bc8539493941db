"""Two trainings that take turns on one machine: whatever of it drifts from second to second, drifts for both.

Both are there all the time, in processes of their own, but only one of them trains at a time::

    side 0   warm-up .             | turn 1 .        | turn 2 .        ...
    side 1   .       warm-up       | .      turn 1   | .      turn 2   ...
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

PORT = "TURNS_PORT"  # in the environment of all ranks of both sides: where they meet
SETTLE = 4  # first steps of a turn, in which both sides find their pace again: not counted


class Turns(pl.Callback):
    """Lets the ranks of one side begin a turn when all ranks of the other are through with theirs.

    Args:
        store: common to all ranks of both sides, see :meth:`open`.
        side: 0, which begins, or 1.
        rank: of ``ranks`` of the side.
        warm: steps of the first turn.
        steps: of each of the others.
        count: of the others.
    """

    def __init__(self, store: dist.Store, side: int, rank: int, ranks: int, warm: int, steps: int, count: int):
        self._store, self._side, self._rank, self._ranks = store, side, rank, ranks
        self._starts = [0, *range(warm, warm + count * steps + 1, steps)]  # of the turns, and what comes after the last

    @classmethod
    def open(cls, side: int, rank: int, timeout: float, **shape: int) -> Turns:
        """Over a store of the first rank of all; nobody waits longer than ``timeout`` seconds for another."""
        first = side == rank == 0
        store = dist.TCPStore("127.0.0.1", int(os.environ[PORT]), is_master=first, timeout=timedelta(seconds=timeout))
        return cls(store, side, rank, **shape)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx not in self._starts:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # nothing of this turn runs in the other's
        turn, last = self._starts.index(batch_idx), len(self._starts) - 1
        if self._side == 1 and self._rank == 0 and turn:
            print(f"turn {turn - 1} of {last - 1} is over" if turn > 1 else "warm", file=sys.stderr, flush=True)
        self._arrive(f"side {self._side} at turn {turn}", self._ranks)
        if self._side == 0:
            self._await(f"side 1 at turn {turn}")
        elif turn < last:
            self._await(f"side 0 at turn {turn + 1}")

    def leave(self) -> None:
        """Of the last turn; the rank whose store it is waits for the others."""
        self._arrive("the end", 2 * self._ranks)
        if self._side == self._rank == 0:
            self._await("the end")

    def _await(self, where: str) -> None:
        """Until all that are expected there have arrived."""
        try:
            self._store.wait([where])
        except dist.DistStoreError as error:
            raise RuntimeError(f"side {self._side} waits in vain for: {where}") from error

    def _arrive(self, where: str, count: int) -> None:
        """Say so; the last of ``count`` ranks opens the door."""
        if self._store.add(f"{where}, ranks", 1) == count:
            self._store.set(where, "all")


def turn_times(ends: NDArray[np.float64], warm: int, steps: int, count: int) -> NDArray[np.float64]:
    """``[count]``: of each turn after the first, the time of a step on the slowest rank, without those that settle.

    Args:
        ends: ``[ranks, steps]``, of each step; each rank on its own clock.
    """
    starts = warm + steps * np.arange(count)
    took = ends[:, starts + steps - 1] - ends[:, starts + SETTLE - 1]
    return took.max(axis=0) / (steps - SETTLE)
