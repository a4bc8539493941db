"""The prioritized step as straight-line code: all ranks in one process, plain tensors, no streams and no TorchRec.

This file is documentation that runs. Nothing in the package uses it. A test runs it beside the real schedule, with the same ids
and the same model: all rows that a forward sees, and the final tables, are equal bit for bit.

There is one table, split by rows: rank ``r`` owns the rows ``r * block`` to ``(r + 1) * block - 1``. Lists of lists hold one
tensor for each pair of ranks: ``x[a][b]`` is what rank ``a`` has for rank ``b``, or from it. So an all-to-all is a transposition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Pairs = list[list[Tensor]]  # [W][W] tensors, one for each pair of ranks


@dataclass
class TableShard:
    """The rows of the table that one rank owns."""

    weight: Tensor  # [rows, D]
    squares: Tensor  # [rows], state of row-wise Adagrad: sum over steps of the mean of the squared gradient


GradientModel = Callable[[int, int, Tensor], Tensor]  # (step, rank, [m, D] rows) -> [m, D] gradient of the rows
UpdateRows = Callable[[TableShard, Tensor, Tensor], None]  # (shard, [n] local row numbers, [n, D] gradients)


def all_to_all(sent: Pairs) -> Pairs:
    """``received[a][b]`` is ``sent[b][a]``."""
    return [list(column) for column in zip(*sent, strict=True)]


# ---- ids -------------------------------------------------------------------------------------------------------------
@dataclass
class ReferenceBatch:
    """One batch of all ranks, after its ids have travelled to the owners of their rows."""

    positions: Pairs  # [requester][owner]: positions in the requester's batch of the ids that the owner owns
    rows: Pairs  # [owner][requester]: local row number of these ids


def send_ids(ids: list[Tensor], block: int) -> ReferenceBatch:
    """Every rank sends its ids, ``[m]``, to their owners."""
    owners = range(len(ids))
    positions = [[torch.nonzero(mine // block == owner).flatten() for owner in owners] for mine in ids]
    requests = [[ids[rank][positions[rank][owner]] - owner * block for owner in owners] for rank in owners]
    return ReferenceBatch(positions, all_to_all(requests))


def find_collisions(batch: ReferenceBatch, other: ReferenceBatch) -> Pairs:
    """``[owner][requester]``: which rows of ``batch`` does ``other`` use, too? Only the owner sees the requests of all ranks."""
    return [
        [torch.isin(rows, torch.cat(others)) for rows in mine]
        for mine, others in zip(batch.rows, other.rows, strict=True)
    ]


def no_collisions(batch: ReferenceBatch, other: ReferenceBatch) -> Pairs:
    """The wrong answer of a prefetch that ignores collisions: all rows are read early, and some are stale."""
    return negate(_every_row(batch))


def negate(masks: Pairs) -> Pairs:
    return [[~mask for mask in row] for row in masks]


# ---- rows travel from owners to requesters, gradients travel back ------------------------------------------------------
def fetch_rows(shards: list[TableShard], batch: ReferenceBatch, chosen: Pairs, into: list[Tensor]) -> None:
    """Owners read the rows that ``chosen[owner][requester]`` selects, and send them. Requesters put them into their batch."""
    ranks = range(len(shards))
    sent = [[shards[o].weight[batch.rows[o][r][chosen[o][r]]] for r in ranks] for o in ranks]
    received, requested = all_to_all(sent), all_to_all(chosen)
    for r in ranks:
        for o in ranks:
            into[r][batch.positions[r][o][requested[r][o]]] = received[r][o]


def return_gradients(
    shards: list[TableShard], batch: ReferenceBatch, chosen: Pairs, gradients: list[Tensor], update: UpdateRows
) -> None:
    """Requesters send the gradients of the rows that ``chosen[owner][requester]`` selects. Owners update these rows.

    The gradient of the global batch is the mean over ranks, so owners divide by the number of ranks.
    """
    ranks = range(len(shards))
    requested = all_to_all(chosen)
    sent = [[gradients[r][batch.positions[r][o][requested[r][o]]] for o in ranks] for r in ranks]
    received = all_to_all(sent)
    for o in ranks:
        rows = torch.cat([batch.rows[o][r][chosen[o][r]] for r in ranks])
        update(shards[o], rows, torch.cat(received[o]) / len(shards))


def sgd(rate: float) -> UpdateRows:
    def update(shard: TableShard, rows: Tensor, gradients: Tensor) -> None:
        for row, gradient in _sum_by_row(rows, gradients):
            shard.weight[row].add_(gradient, alpha=-rate)

    return update


def rowwise_adagrad(rate: float, eps: float = 1e-8) -> UpdateRows:
    def update(shard: TableShard, rows: Tensor, gradients: Tensor) -> None:
        for row, gradient in _sum_by_row(rows, gradients):
            squares = torch.zeros(())
            for value in gradient:
                squares += value * value
            shard.squares[row] += squares / len(gradient)
            root = shard.squares[row].double().sqrt().float()  # rounded to the nearest float; MKL's own is not
            shard.weight[row] -= torch.tensor(rate) / (root + eps) * gradient

    return update


def _sum_by_row(rows: Tensor, gradients: Tensor) -> list[tuple[int, Tensor]]:
    """Each row once, with the sum of its gradients in their order."""
    sums: dict[int, Tensor] = {}
    for row, gradient in zip(rows.tolist(), gradients, strict=True):
        sums[row] = sums[row] + gradient if row in sums else gradient
    return list(sums.items())


# ---- the two schedules -------------------------------------------------------------------------------------------------
def train_synchronously(
    shards: list[TableShard], batches: list[list[Tensor]], model: GradientModel, update: UpdateRows
) -> list[list[Tensor]]:
    """Train with one exchange of all rows before each forward, and one exchange of all gradients after each backward.

    Args:
        shards: the table, one shard for each rank. It is updated in place.
        batches: ``batches[step][rank]``, ``[m]`` int64 row numbers of the table.

    Returns:
        ``seen[step][rank]``, the ``[m, D]`` rows that the forward sees.
    """
    seen = []
    for step, ids in enumerate(batches):
        batch = send_ids(ids, len(shards[0].weight))
        everything = _every_row(batch)
        rows = _empty_rows(ids, shards)
        fetch_rows(shards, batch, everything, into=rows)
        seen.append(rows)
        gradients = [model(step, rank, mine) for rank, mine in enumerate(rows)]
        return_gradients(shards, batch, everything, gradients, update)
    return seen


def train_prioritized(
    shards: list[TableShard],
    batches: list[list[Tensor]],
    model: GradientModel,
    update: UpdateRows,
    find: Callable[[ReferenceBatch, ReferenceBatch], Pairs] = find_collisions,
) -> list[list[Tensor]]:
    """Train as :func:`train_synchronously` does, with the exchanges of ``schedule.py`` in their order.

    Args:
        find: finds the collisions. A test replaces it to show that the result then differs.

    >>> def table():  # four rows of width 1 on two ranks
    ...     return [TableShard(torch.ones(2, 1), torch.zeros(2)) for _ in range(2)]
    >>> batches = [[torch.tensor([0, 3]), torch.tensor([3])], [torch.tensor([1]), torch.tensor([3, 2])]]
    >>> train_prioritized(table(), batches, lambda step, rank, rows: rows, sgd(0.5))[1]
    [tensor([[1.]]), tensor([[0.5000],
            [1.0000]])]
    >>> stale = train_prioritized(table(), batches, lambda step, rank, rows: rows, sgd(0.5), find=no_collisions)
    >>> stale[1][1][0]  # row 3 was read before batch 0 had updated it
    tensor([1.])
    """
    block, seen = len(shards[0].weight), []
    batch = send_ids(batches[0], block)
    rows = _empty_rows(batches[0], shards)
    fetch_rows(shards, batch, _every_row(batch), into=rows)  # no batch before the first: all rows are exclusive
    late = None  # batch, exclusive rows and gradients of step N-1

    for step in range(len(batches)):
        is_last = step + 1 == len(batches)

        # Forward of N: all rows of N have arrived.
        seen.append(rows)

        # Before the backward of N: apply the exclusive gradients of N-1. Only now may the exclusive rows of N+1 be read.
        if late is not None:
            return_gradients(shards, *late, update)
        if is_last:
            collides_with_next = _every_row(batch)  # no batch after the last: all gradients return at once
        else:
            next_batch = send_ids(batches[step + 1], block)
            collides_with_next, collides_with_previous = find(batch, next_batch), find(next_batch, batch)
            next_rows = _empty_rows(batches[step + 1], shards)
            fetch_rows(shards, next_batch, negate(collides_with_previous), into=next_rows)

        # Backward of N: the gradients of collision rows leave first, because the next forward needs these rows.
        gradients = [model(step, rank, mine) for rank, mine in enumerate(rows)]
        return_gradients(shards, batch, collides_with_next, gradients, update)

        # The gradients of exclusive rows follow in step N+1.
        late = batch, negate(collides_with_next), gradients

        # After the backward of N: the collision rows of N+1 are up to date now.
        if not is_last:
            fetch_rows(shards, next_batch, collides_with_previous, into=next_rows)
            batch, rows = next_batch, next_rows

    if late is not None:
        return_gradients(shards, *late, update)
    return seen


def _every_row(batch: ReferenceBatch) -> Pairs:
    return [[torch.ones_like(rows, dtype=torch.bool) for rows in mine] for mine in batch.rows]


def _empty_rows(ids: list[Tensor], shards: list[TableShard]) -> list[Tensor]:
    return [torch.empty(len(mine), shards[0].weight.shape[1]) for mine in ids]
