"""The best ``k`` items of each query among a catalogue that is divided among the ranks.

Each rank scores the queries of all ranks against its own part of the catalogue and keeps ``k`` items per query. The ranks
then send these back to the owners of the queries, who keep the best ``k`` of them. Items of equal score are in the order of their
row numbers, so the result does not depend on the number of ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

SCORES_AT_A_TIME = 1 << 25  # scores that exist at a time: 128 MiB
KERNEL_K = 64  # the kernel of CUDA takes the best items one after the other, so a larger k is left to PyTorch
_LOW_HALF = (1 << 32) - 1
_NOTHING = -0x7F800001 << 32  # the sort key of a place without an item: the score minus infinity and the row _LOW_HALF


class Ranked(NamedTuple):
    """The best items of ``B`` queries, the best first.

    Attributes:
        rows: ``[B, k]`` int64, row numbers of the items; -1 where a query has fewer than ``k`` candidates.
        scores: ``[B, k]`` float32; minus infinity there.
    """

    rows: Tensor
    scores: Tensor


class JaggedRows(NamedTuple):
    """``lengths [B]`` int64 and ``values [sum(lengths)]`` int64: some row numbers for each of ``B`` queries."""

    lengths: Tensor
    values: Tensor


def part_of(rank: int, world_size: int, num_items: int) -> range:
    """The rows of the catalogue that ``rank`` scores."""
    return range(rank * num_items // world_size, (rank + 1) * num_items // world_size)


def sort_keys(scores: Tensor, rows: Tensor) -> Tensor:
    """int64 numbers whose descending order is that of the scores, then the ascending order of the rows.

    Args:
        scores: float32. NaN counts as minus infinity.
        rows: int64, below ``2**32``, of a shape that broadcasts to that of ``scores``.
    """
    scores = scores.masked_fill(scores.isnan(), -torch.inf) + 0.0  # adding 0 turns -0 into 0
    return (_monotone(scores.contiguous().view(torch.int32).long()) << 32) | (_LOW_HALF - rows)


def _monotone(bits: Tensor) -> Tensor:
    """The bits of float32 numbers, as signed integers, to integers that are ordered as the numbers; also the inverse."""
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def from_keys(keys: Tensor) -> Ranked:
    """Rows and scores of :func:`sort_keys`."""
    if keys.is_cuda:
        from lightning_freescale.models import top_k_triton  # Triton is installed on CUDA machines only

        return Ranked(*top_k_triton.decode(keys))
    scores = _monotone(keys >> 32).to(torch.int32).view(torch.float32)
    rows = _LOW_HALF - (keys & _LOW_HALF)
    return Ranked(torch.where(scores == -torch.inf, -1, rows), scores)


def local_top_k(queries: Tensor, items: Tensor, first_row: int, k: int, left_out: JaggedRows | None = None) -> Tensor:
    """Sort keys of the best ``k`` of this rank's items for each query, ``[Q, k]`` int64, the best first.

    Args:
        queries: ``[Q, D]``.
        items: ``[N, D]``, the rows ``first_row`` to ``first_row + N`` of the catalogue.
        first_row: the row of the first item.
        k: number of items to keep. Places without an item have the score minus infinity.
        left_out: for each query, rows that are not candidates.
    """
    best = None
    chunk = max(1, SCORES_AT_A_TIME // max(1, len(queries)))
    owner = rows = None
    if left_out is not None:
        owner = torch.arange(len(queries), device=queries.device).repeat_interleave(left_out.lengths)
        rows = left_out.values - first_row
    for start in range(0, len(items), chunk):
        part = items[start : start + chunk]
        scores = (queries @ part.mT).float()
        if owner is not None and rows is not None:
            inside = (rows >= start) & (rows < start + len(part))
            scores[owner[inside], rows[inside] - start] = -torch.inf
        keys = best_keys(scores, first_row + start, k)
        best = keys if best is None else torch.cat([best, keys], dim=1).topk(k, dim=1).values
    return torch.full((len(queries), k), _NOTHING, device=queries.device) if best is None else best


def best_keys(scores: Tensor, first_row: int, k: int) -> Tensor:
    """Sort keys of the best ``k`` of ``scores [Q, N]`` float32, the best first: ``[Q, k]`` int64.

    ``first_row`` is the row of the first column. Places without an item have the score minus infinity.
    """
    if scores.is_cuda and k <= KERNEL_K:
        from lightning_freescale.models import top_k_triton  # Triton is installed on CUDA machines only

        return top_k_triton.best_keys(scores, first_row, k)
    rows = torch.arange(first_row, first_row + scores.shape[1], device=scores.device)
    found = sort_keys(scores, rows).topk(min(k, len(rows)), dim=1).values
    if found.shape[1] == k:
        return found
    return torch.cat([found, found.new_full((len(found), k - found.shape[1]), _NOTHING)], dim=1)


def top_k(queries: Tensor, items: Tensor, num_items: int, k: int, left_out: JaggedRows | None = None) -> Ranked:
    """The best ``k`` items of the whole catalogue for the queries of this rank. A collective if there are several ranks.

    Args:
        queries: ``[B, D]``. ``B`` may differ between ranks.
        items: ``[N, D]``, the rows :func:`part_of` this rank.
        num_items: size of the catalogue.
        k: at most ``num_items``.
        left_out: for each query of this rank, rows that are not candidates.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world == 1:
        return from_keys(local_top_k(queries, items, 0, k, left_out))
    rank = dist.get_rank()
    counts = _gather_counts(len(queries), queries.device)
    everyone = _gather_rows(queries, counts)
    everyones_rows = None
    if left_out is not None:
        values = _gather_rows(left_out.values, _gather_counts(len(left_out.values), queries.device))
        everyones_rows = JaggedRows(_gather_rows(left_out.lengths, counts), values)
    found = local_top_k(everyone, items, part_of(rank, world, num_items).start, k, everyones_rows)
    received = found.new_empty(world * len(queries), k)
    dist.all_to_all_single(received, found, [len(queries)] * world, counts)
    received = received.view(world, len(queries), k).transpose(0, 1).flatten(1)
    return from_keys(received.topk(k, dim=1).values)


def _gather_counts(count: int, device: torch.device) -> list[int]:
    """``count`` of every rank. A collective."""
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([count], device=device))
    return [int(part) for part in counts]


def _gather_rows(rows: Tensor, counts: list[int]) -> Tensor:
    """The rows of all ranks, ``[sum(counts), ...]``. A collective. Ranks pad their rows, because all must send equally many."""
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
