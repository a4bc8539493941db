"""Shortcuts of the schedule that are wrong. The comparisons of trainings must detect each of them."""

from __future__ import annotations

from typing import Any

import torch

from lightning_freescale.embedding.collisions import CollisionDetector
from lightning_freescale.embedding.schedule import ExchangeSchedule
from lightning_freescale.embedding.zero_collision.ahead import RemapsAhead


def _remaps(schedule: ExchangeSchedule) -> RemapsAhead:
    remaps = schedule.modules[0].exchange.remaps
    assert remaps is not None
    return remaps


def reset_when_ids_are_inserted(schedule: ExchangeSchedule) -> None:
    """Write fresh rows two steps ahead, when earlier batches still use the old rows."""
    remaps = _remaps(schedule)
    remap, write = remaps.remap, remaps.write

    def eager(received: Any) -> Any:
        slots, batch = remap(received)
        write(batch, None)
        return slots, batch

    remaps.remap = eager  # type: ignore[method-assign]
    remaps.write = lambda *_: None  # type: ignore[method-assign]


def write_all_fresh_rows_early(schedule: ExchangeSchedule) -> None:
    """Write a fresh row that collides with the current batch before that batch has updated the old row."""
    remaps = _remaps(schedule)
    write = remaps.write

    def early(batch: Any, slots: Any) -> None:
        if not batch.written:
            write(batch, None)

    remaps.write = early  # type: ignore[method-assign]


def collide_by_id(schedule: ExchangeSchedule) -> None:
    """Compare ids and not slots: ids that share a reserved slot seem to have different rows."""
    exchange = schedule.modules[0].exchange
    remaps, tables = _remaps(schedule), exchange.tables
    remap, row_keys = remaps.remap, tables.row_keys
    # The PyTorch operators call ``row_keys``, which is replaced below.
    exchange.finder.fused = []
    exchange.finder.detectors = [CollisionDetector(rows, tables.device) for rows in tables.num_rows]
    received_ids: list[torch.Tensor] = []

    def remember(received: Any) -> Any:
        received_ids[:] = [features.values() for features in received]
        return remap(received)

    def by_id(group: int, ids: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        shared = (received_ids[group] * 31 + feature) % tables.num_rows[group]
        return torch.where(_in_reserved_slots(schedule, ids, feature), shared, row_keys(group, ids, feature))

    remaps.remap = remember  # type: ignore[method-assign]
    tables.row_keys = by_id  # type: ignore[method-assign]


def _in_reserved_slots(schedule: ExchangeSchedule, slots: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
    owned: Any = schedule.modules[0].exchange.module
    layouts = [owned.tables[name].identities.layout for name in ("item", "item", "shop")]
    size = torch.tensor([layout.bucket_size for layout in layouts])[feature]
    usable = torch.tensor([layout.usable for layout in layouts])[feature]
    return slots % size >= usable


def never_undo(schedule: ExchangeSchedule) -> None:
    _remaps(schedule).undo = lambda: None  # type: ignore[method-assign]
