"""Batches whose ids are inserted before their own step, and how to undo that.

The prioritized exchange needs the slots of a batch two steps before the batch is trained. Ids are inserted in the order of the
batches, so each batch finds the state that it would find in its own step. The tables themselves must not show this:

* A fresh row is written when no earlier batch needs the old row any more: just before it is read for the batch (`write`).
* Whoever looks at the tables between two steps (validation, a checkpoint) must find the state of the last step. `undo` restores
  it, and `redo` restores the state ahead when the next step begins.
* A batch that is dropped before its step has never been there (`forget`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.embedding.zero_collision.owned_table import WrittenRows
from lightning_freescale.embedding.zero_collision.sharded import ShardedZeroCollisionCollection, TableInsertion


@dataclass
class BatchAhead:
    """A training batch whose ids have been inserted, and whose step has not begun.

    Attributes:
        insertions: what has changed in each table.
        written: the fresh rows that have been written.
    """

    insertions: list[TableInsertion]
    written: list[WrittenRows] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        return [tensor for _, insertion in self.insertions for tensor in insertion.tensors()]

    def undo(self) -> None:
        for rows in reversed(self.written):
            rows.swap()
        for table, insertion in self.insertions:
            insertion.swap(table.identities.state)
            table.identities.step -= 1

    def redo(self) -> None:
        for table, insertion in self.insertions:
            insertion.swap(table.identities.state)
            table.identities.step += 1
        for rows in self.written:
            rows.swap()


class RemapsAhead:
    """The batches of one collection whose ids are inserted ahead of their step, in the order of the steps.

    Attributes:
        undone: whether the tables do not show the batches ahead at present.
    """

    def __init__(self, collection: ShardedZeroCollisionCollection):
        self._collection = collection
        self._batches: list[BatchAhead] = []
        self.undone = False

    def remap(self, received: Sequence[KeyedJaggedTensor]) -> tuple[list[KeyedJaggedTensor], BatchAhead]:
        """From the ids of the next batch to slots. The batch after it must not have been remapped."""
        assert not self.undone
        remapped, insertions = self._collection.remap(received, insert=True)
        batch = BatchAhead(insertions)
        self._batches.append(batch)
        return list(remapped), batch

    def write(self, batch: BatchAhead, rows: Sequence[KeyedJaggedTensor] | None) -> None:
        """Write fresh rows of ``batch``. The tables have all updates that these rows get from earlier batches.

        Args:
            rows: the slots that are about to be read, by sharding group; fresh rows elsewhere are not written yet. ``None``: all.
        """
        assert not self.undone
        slots = {} if rows is None else self._collection.slots_by_table(rows)
        for table, insertion in batch.insertions:
            batch.written.append(table.write_fresh(insertion, slots.get(table.identities)))

    def commit(self, batch: BatchAhead) -> None:
        """The step of ``batch`` uses its rows: the insertion is final."""
        assert not self.undone
        assert self._batches[0] is batch, "batches are trained in the order in which their ids were inserted"
        self._batches.pop(0)
        for table, insertion in batch.insertions:
            table.count(insertion, self._collection.timeline)

    def undo(self) -> None:
        """Show the tables as the last committed batch has left them."""
        if not self.undone:
            for batch in reversed(self._batches):
                batch.undo()
        self.undone = True

    def redo(self) -> None:
        """Show the tables with the batches ahead, after :meth:`undo`."""
        if self.undone:
            for batch in self._batches:
                batch.redo()
        self.undone = False

    def forget(self, first: BatchAhead | None = None) -> None:
        """Undo ``first`` and all batches after it for good; all batches by default."""
        self.redo()
        places = [place for place, batch in enumerate(self._batches) if first is None or batch is first]
        start = places[0] if places else len(self._batches)
        for batch in reversed(self._batches[start:]):
            batch.undo()
        del self._batches[start:]
