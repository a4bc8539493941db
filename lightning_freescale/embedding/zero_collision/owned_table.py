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
    """Fresh rows of a table, with what was in their place."""

    def __init__(self, tensors: Sequence[Tensor], slots: Tensor, values: Sequence[Tensor]):
        self._tensors, self._slots, self._other = tensors, slots, list(values)
        self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Write the rows, or restore what was in their place."""
        for index, tensor in enumerate(self._tensors):
            now = tensor[self._slots]
            tensor[self._slots] = self._other[index]
            self._other[index] = now


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

    def remap(self, ids: Tensor, counts: Sequence[int], insert: bool) -> tuple[Tensor, Insertion | None]:
        """From ids to slots, for all features of the table.

        The ids of features that insert come first. Then the other features look their ids up.

        Args:
            ids: ``[n]`` int64, of one feature after the other.
            counts: number of ids of each feature.
            insert: whether the ids are those of a training step. Otherwise nothing changes.

        Returns:
            ``[n]`` int64 slots, and what has changed.
        """
        identities, insertion = self.identities, None
        if not insert:
            return identities.look_up(ids)[0], None
        read_only = [feature in identities.read_only for feature in self.features]
        if not any(read_only):
            slots, insertion = identities.insert(ids)
        else:
            parts = ids.split(list(counts))
            inserting = [part for part, only in zip(parts, read_only, strict=True) if not only]
            inserted, insertion = identities.insert(torch.cat(inserting))
            found = iter(inserted.split([len(part) for part in inserting]))
            slots = torch.cat(
                [
                    identities.look_up(part)[0] if only else next(found)
                    for part, only in zip(parts, read_only, strict=True)
                ]
            )
        return slots, insertion

    def write_fresh(self, slots: Tensor, ids: Tensor) -> WrittenRows:
        """Give the rows ``slots [f]`` to their new owners ``ids [f]``: their first values, and optimizer state 0."""
        states = [torch.zeros_like(state[slots]) for state in self.optimizer_state]
        return WrittenRows([self.weight, *self.optimizer_state], slots, [self.identities.draw(ids), *states])

    def among(self, slots: Tensor, others: Tensor) -> Tensor:
        """Which of ``slots [f]`` are among ``others [n]``: ``[f]`` booleans."""
        flags = torch.zeros(self.identities.layout.slots, dtype=torch.bool, device=slots.device)
        return flags.index_fill_(0, others, True)[slots]

    def count(self, insertion: Insertion, timeline: Timeline) -> None:
        """Count what a training step has inserted, for the metrics, if the step is recorded."""
        if not timeline.active:
            return
        layout = self.identities.layout
        timeline.count("ids", insertion.touched.numel() + insertion.fallback)
        timeline.count("ids_inserted", insertion.inserted)
        timeline.count("ids_evicted", insertion.evicted)
        timeline.count("ids_fallback", insertion.fallback)
        timeline.count("ids_collisions", insertion.fallback - insertion.shared)
        timeline.count("ids_owned", (self.identities.state.identities != EMPTY).sum())
        timeline.count("ids_slots", layout.held * layout.usable)
