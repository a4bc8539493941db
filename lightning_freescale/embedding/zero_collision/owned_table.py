"""This rank's part of one zero-collision table: its identities, its rows and the optimizer state of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.embedding.zero_collision.layout import EMPTY
from lightning_freescale.embedding.zero_collision.module import ZeroCollisionModule
from lightning_freescale.embedding.zero_collision.remap import Insertion


class WrittenRows:
    """Fresh rows of a table, with what was in their place.

    Args:
        tensors: the tensors to write: the weights, and the optimizer state of the rows.
        slots: ``[f]`` int64, the rows.
        values: what to write, ``[f, ...]`` for each tensor.
        chosen: ``[f]`` booleans, which of the rows to write.
    """

    def __init__(self, tensors: Sequence[Tensor], slots: Tensor, values: Sequence[Tensor], chosen: Tensor):
        self._tensors, self._slots, self._other, self._chosen = tensors, slots, list(values), chosen
        self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Write the rows, or restore what was in their place."""
        for index, tensor in enumerate(self._tensors):
            now = tensor[self._slots]
            other = self._other[index].to(now.dtype)
            chosen = self._chosen.view(-1, *[1] * (now.ndim - 1))
            tensor[self._slots] = torch.where(chosen, other, now)
            self._other[index] = torch.where(chosen, now, other)


@dataclass
class OwnedTable:
    """The part of a zero-collision table that this rank owns.

    Attributes:
        identities: who owns the slots.
        weight: ``[slots, D]`` the rows.
        optimizer_state: the state of the fused optimizer, tensors of ``slots`` rows each.
        features: names of the features of the table.
    """

    identities: ZeroCollisionModule
    weight: Tensor
    optimizer_state: list[Tensor]
    features: list[str]

    def remap(
        self, ids: Tensor, mine: Tensor | None, inserting: Tensor | None, insert: bool
    ) -> tuple[Tensor, Insertion | None]:
        """From ids to slots, for all features of the table.

        The ids of features that insert come first. Then the other features look their ids up.

        Args:
            ids: ``[n]`` int64, of all tables of the sharding group.
            mine: ``[n]`` booleans, which of the ids belong to this table; ``None`` if all do.
            inserting: ``[n]`` booleans, which of them belong to features that insert; ``None`` if all of this table do.
            insert: whether the ids are those of a training step. Otherwise nothing changes.

        Returns:
            ``[n]`` int64 slots, which mean nothing for ids of other tables, and what has changed.
        """
        identities = self.identities
        if not insert:
            return identities.look_up(ids, mine), None
        slots, insertion = identities.insert(ids, mine if inserting is None else inserting)
        if inserting is not None:
            slots = torch.where(inserting, slots, identities.look_up(ids, mine))
        return slots, insertion

    def write_fresh(self, insertion: Insertion, slots: Tensor | None = None) -> WrittenRows:
        """Give fresh rows to their new owners: their first values, and optimizer state 0.

        Args:
            slots: ``[n]`` int64; only fresh rows among them are written. All by default.
        """
        fresh = insertion.fresh_slots
        chosen = torch.ones_like(fresh, dtype=torch.bool) if slots is None else self._among(fresh, slots)
        if insertion.rows is None:
            insertion.rows = self.identities.draw(insertion.fresh_ids)
        states = [torch.zeros_like(state[fresh]) for state in self.optimizer_state]
        return WrittenRows([self.weight, *self.optimizer_state], fresh, [insertion.rows, *states], chosen)

    def _among(self, slots: Tensor, others: Tensor) -> Tensor:
        """Which of ``slots [f]`` are among ``others [n]``: ``[f]`` booleans."""
        flags = torch.zeros(self.identities.layout.slots, dtype=torch.bool, device=slots.device)
        return flags.index_fill_(0, others, True)[slots]

    def count(self, insertion: Insertion, timeline: Timeline) -> None:
        """Count what a training step has inserted, for the metrics, if the step is recorded."""
        if not timeline.active:
            return
        layout = self.identities.layout
        counts = insertion.counts
        timeline.count("ids", counts.distinct)
        timeline.count("ids_inserted", counts.inserted)
        timeline.count("ids_evicted", counts.evicted)
        timeline.count("ids_fallback", counts.fallback)
        timeline.count("ids_collisions", counts.fallback - counts.shared)
        timeline.count("ids_owned", (self.identities.state.identities != EMPTY).sum())
        timeline.count("ids_slots", layout.held * layout.usable)
