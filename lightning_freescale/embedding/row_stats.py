"""How many ids, rows and bytes the prioritized exchange of a module moves."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_ELEMENT = 4  # float32


@dataclass
class RowExchangeStats:
    """Sums over the batches of this rank that were exchanged with priorities.

    Attributes:
        batches: number of batches.
        ids: ids of these batches; a repeated id counts each time.
        rows: rows that this rank requested: as many as ids, or with ``dedup`` one for each distinct id of a batch.
        collisions: rows among them that the previous batch updates.
        row_bytes: bytes of all requested rows in float32. The same number of bytes of gradients returns.
        id_bytes: bytes if every id had a row of its own; 0 for bags, whose rows are pooled before they travel.
    """

    batches: int = 0
    ids: int = 0
    rows: int = 0
    collisions: int = 0
    row_bytes: int = 0
    id_bytes: int = 0

    def add_batch(self, ids: int, dim: int) -> None:
        """Count a batch of ``ids`` ids, whose full rows have ``dim`` elements."""
        self.batches += 1
        self.ids += ids
        self.id_bytes += ids * dim * BYTES_PER_ELEMENT

    def add_rows(self, rows: int, collisions: int, dim: int) -> None:
        """Count the rows of the batch in one sharding group, in which a row has ``dim`` elements."""
        self.rows += rows
        self.row_bytes += rows * dim * BYTES_PER_ELEMENT
        self.collisions += collisions

    @property
    def collision_rate(self) -> float:
        """Share of the rows that must wait for the update of the previous batch."""
        return self.collisions / self.rows if self.rows else 0.0

    @property
    def bytes_saved(self) -> int:
        """Bytes of rows and gradients that ``dedup`` has saved."""
        return 2 * (self.id_bytes - self.row_bytes) if self.id_bytes else 0
