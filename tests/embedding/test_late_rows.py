"""Collision rows that arrive after the exclusive rows have been put in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_freescale.embedding.all_to_all import COLLISION, EXCLUSIVE
from lightning_freescale.embedding.gradient_return import JoinRows
from lightning_freescale.embedding.prioritized import _in_batch_order
from lightning_freescale.embedding.stages import FetchingBatch, Requests, RoutedBatch, RowSet

IDS, WIDTH = 9, 3
COLLIDING = [7, 2, 4]  # positions in the batch, in wire order
OTHERS = [0, 8, 1, 3, 6, 5]


class Arrival:
    """A transfer whose rows arrive when it is waited for."""

    def __init__(self, into: Tensor, rows: Tensor):
        self.into, self.rows = into, rows

    def wait(self) -> None:
        self.into.copy_(self.rows)


def row_set(places: list[int], fused: bool) -> RowSet:
    """The rows at these places of the batch, from two owners. Without fused index work only the order on the wire is known."""
    unused: Any = None
    order = torch.tensor(places)
    rows = RowSet(unused, unused, [], None if fused else order, [1, len(places) - 1])
    if fused:
        rows.batch_position = order
        rows.batch_order = torch.argsort(torch.tensor(COLLIDING + OTHERS))
    return rows


def fetching(rows: Tensor, fused: bool) -> FetchingBatch:
    """A batch whose ids have these ``rows``, ``[m, D]`` in batch order. None has arrived yet."""
    unused: Any = None
    requests = Requests(unused, unused, unused, unused, [], [], None, None)
    sets = {COLLISION: row_set(COLLIDING, fused), EXCLUSIVE: row_set(OTHERS, fused)}
    batch = FetchingBatch(RoutedBatch(unused, unused, [requests], 0), [sets], [torch.full_like(rows, torch.nan)])
    first, second = batch.buffers[0].split([len(COLLIDING), len(OTHERS)])
    arrivals: Any = {COLLISION: [Arrival(first, rows[COLLIDING])], EXCLUSIVE: [Arrival(second, rows[OTHERS])]}
    batch.transfers = arrivals
    return batch


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_arrive_late_are_in_their_places(dtype: torch.dtype, fused: bool) -> None:
    rows = torch.randn(IDS, WIDTH).to(dtype)
    (joined,) = _in_batch_order(fetching(rows, fused))
    assert joined.dtype == torch.float32
    assert torch.equal(joined, rows.float())

    batch = fetching(rows, fused)
    del batch.transfers[COLLISION]  # The check can fail: these rows never arrive.
    (joined,) = _in_batch_order(batch)
    assert joined.isnan().all(1).nonzero().flatten().tolist() == sorted(COLLIDING)
    assert torch.equal(joined[OTHERS], rows[OTHERS].float())


def test_a_model_may_change_the_rows_in_place() -> None:
    handed_over = []

    class Returns:
        def hand_over(self, batch: Any, group: int, gradient: Tensor) -> None:
            handed_over.append(gradient)

    rows = torch.randn(IDS, WIDTH)
    output = JoinRows.apply(torch.empty(0, requires_grad=True), Returns(), None, 0, [rows])
    output.mul_(2)
    output.sum().backward()
    assert torch.equal(handed_over[0], torch.full_like(rows, 2.0))
