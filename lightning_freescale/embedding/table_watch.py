"""Finds user code that changes tables between two steps, for example a callback that sets the row of the padding to zero.

The prioritized exchange reads rows of the next batch before a step ends, and applies gradients of the step later. A change in
between would reach neither, and the training would silently be another one. ``strategy.flush()`` applies these gradients and
drops these rows, so a change after it is right. A change without it is found in two ways:

- In the first steps, and after a validation or a save, some rows of each table are compared with what they were. The ranks tell
  each other what they find in the first steps. If the step before was synchronous, the module stays synchronous, which is right
  as well. With ``prioritize="auto"`` most of the first steps are synchronous.
- In later steps, the version counters of the tensors are compared, which costs nothing. They count changes in place, but not
  those of ``parameter.data``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_freescale.embedding.local_tables import CACHING
from lightning_freescale.embedding.table_optimizer import kernels_in
from lightning_freescale.runtime.streams import SideStream

Gather = Callable[..., list[Any]]  # gathers a value of every rank; ``what`` is the name of the gather in errors
WHAT = "the comparison of tables before a look-up"
CHECKED_STEPS = 16  # first steps, in which values are compared
SAMPLED_ROWS = 32  # the first rows of a table, its last rows, and rows between them: as many of each
_SAME_BITS = {4: torch.int32, 2: torch.int16}  # a NaN is not equal to itself, its bits are


class TableWatch:
    """Watches the tables of one module that are on this rank.

    Tables with zero-collision ids and tables behind a cache are not watched: they change when no user changes them.

    Args:
        collection: the sharded collection.
        stream: the stream on which tables are read and updated.
        gather: gathers a value of every rank. All ranks make the same calls.
    """

    def __init__(self, collection: Any, stream: SideStream, gather: Gather):
        self._stream, self._gather = stream, gather
        self._trained = False  # before the first step, changes are right
        self._steps = 0  # of which values were compared
        plan = collection.module_sharding_plan.values()
        self._watched = not any(sharding.compute_kernel == CACHING.value for sharding in plan)  # the same on all ranks
        self._tables: list[Tensor] = []
        if self._watched:
            kernels = [kernel for lookup in collection._lookups for kernel in kernels_in(lookup)]
            self._tables = [table.detach() for kernel in kernels for table in kernel.split_embedding_weights()]
        self._versions: list[int] | None = None  # None if the tables may be changed
        self._rows: list[Tensor] | None = None  # None if no values were kept

    def step_ended(self) -> None:
        """A step has queued its updates. From now on until :meth:`found_change`, only user code changes the tables."""
        self._trained = True
        self._note(values=self.agrees)

    def flushed(self, updated: bool) -> None:
        """No gradients are pending, because a validation comes, for example. Its callbacks may change tables and restore them.

        Args:
            updated: whether gradients were applied just now.
        """
        if self._trained and (updated or (self._rows is None and not self.differs())):
            self._note(values=True)

    def forget(self) -> None:
        """Until the next step or flush, changes are right."""
        self._versions = self._rows = None

    @property
    def agrees(self) -> bool:
        """Whether :meth:`found_change` will have the same answer on all ranks. It has in the first steps."""
        return self._steps < CHECKED_STEPS

    def found_change(self) -> bool:
        """Whether user code has changed the tables. All ranks call it before the look-up of a step."""
        if not self._watched:
            return False
        changed = self.differs()
        self.forget()
        if self.agrees:
            self._steps += 1
            changed = any(self._gather(changed, what=WHAT))
        return changed

    def differs(self) -> bool:
        """Whether the tables on this rank differ from what they were at the last step or flush."""
        if self._rows is not None:  # values that were changed and restored are right
            with self._stream.work():  # that of the samples
                return not all(map(_same_bits, self._rows, self._sample()))
        return self._versions is not None and self._versions != [table._version for table in self._tables]

    def _note(self, values: bool) -> None:
        if self._watched:
            self._versions = [table._version for table in self._tables]
            self._rows = self._sample() if values else None

    def _sample(self) -> list[Tensor]:
        """``[3 * SAMPLED_ROWS, D]`` of each table: its first and last rows, and some between them."""
        with self._stream.work(compute=True):
            return [table.index_select(0, _sampled_rows(len(table), table.device)) for table in self._tables]


@functools.lru_cache(maxsize=256)
def _sampled_rows(rows: int, device: torch.device) -> Tensor:
    places = range(min(SAMPLED_ROWS, rows))
    chosen = [row for place in places for row in (place, rows - 1 - place, rows * place // SAMPLED_ROWS)]
    return torch.tensor(chosen, dtype=torch.int64, device=device)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    bits = _SAME_BITS[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))
