"""Collisions: rows that two consecutive batches share, found at the rank that owns them.

A batch N updates its rows after its backward. Rows that batch N+1 needs as well (*collisions*) must wait for that update;
all others (*exclusive* rows) can be looked up while N still computes, and give the same values.

Everything here costs time and memory of the batches, never of the table, and never waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


class CollisionDetector:
    """Finds shared rows through one boolean per local row of the tables, cleared after use.

    Args:
        rows: local rows of all tables of one sharding group, laid end to end.
        device: where the ids are.
    """

    def __init__(self, rows: int, device: torch.device):
        self._touched = torch.zeros(rows, dtype=torch.bool, device=device)

    def __call__(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows of each batch the other one has too.

        Args:
            first: ``[n]`` int64 row keys of batch N, repeated as often as they are asked for.
            second: ``[m]`` int64 row keys of batch N+1.

        Returns:
            ``[n]`` and ``[m]`` booleans.
        """
        return self._among(first, second), self._among(second, first)

    def _among(self, keys: Tensor, others: Tensor) -> Tensor:
        self._touched.index_fill_(0, others, True)
        found = self._touched[keys]
        self._touched.index_fill_(0, others, False)
        return found


def partition(mask: Tensor) -> Tensor:
    """Stable order that puts the positions where ``mask`` holds first: ``[n]`` bool to ``[n]`` int64.

    >>> partition(torch.tensor([False, True, False, True]))
    tensor([1, 3, 0, 2])
    """
    if not mask.numel():
        return torch.empty(0, dtype=torch.int64, device=mask.device)
    ahead = mask.cumsum(0)  # held up to and including each position
    here = torch.arange(mask.numel(), device=mask.device)
    order = torch.empty_like(here)
    order[torch.where(mask, ahead - 1, ahead[-1] + here - ahead)] = here
    return order


def place_within(mask: Tensor) -> Tensor:
    """Position of each element among those of its own kind: ``[n]`` bool to ``[n]`` int64.

    >>> place_within(torch.tensor([False, True, False, True]))
    tensor([0, 0, 1, 1])
    """
    ahead = mask.cumsum(0)
    here = torch.arange(mask.numel(), device=mask.device)
    return torch.where(mask, ahead - 1, here - ahead)


def masked_lengths(mask: Tensor, offsets: Tensor) -> Tensor:
    """How many elements of each segment ``mask`` holds for: ``[n]`` bool, ``[s + 1]`` offsets to ``[s]`` lengths."""
    return held_between(mask, offsets[:-1], offsets[1:])


def held_between(mask: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """How many elements ``mask`` holds for from each start up to its end: ``[n]`` bool, twice ``[s]`` int64 to ``[s]``."""
    ahead = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
    return ahead[ends] - ahead[starts]
