"""A batch that was used on one device and moves to another."""

from __future__ import annotations

import torch

from tests.models.cases import make_batch


def test_the_parts_of_a_used_batch_move_with_it() -> None:
    batch = make_batch([[1, 2, 3], [4]], [[5], [6, 7]])
    assert all(part.values().device.type == "cpu" for part in batch.by_key.values())
    moved = batch.to(torch.device("meta"))
    assert {part.values().device.type for part in moved.by_key.values()} == {"meta"}
    assert {part.lengths().device.type for part in moved.by_key.values()} == {"meta"}
    assert [part.values().device.type for part in batch.by_key.values()] == ["cpu", "cpu"]
