"""From ids to slots: look-ups, insertions, and how to undo them. On CPU the C++ core does it, on CUDA a Triton kernel.

``insert`` is a function of the state, the *set* of ids and the step: their order, their number and the distribution of the
buckets over ranks do not matter. ``reference.py`` defines the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_freescale import _C
from lightning_freescale.embedding.zero_collision.layout import EMPTY, Eviction, Layout
from lightning_freescale.runtime.errors import InputError


class IdentityState(NamedTuple):
    """Who owns the slots. The functions of this file change the two tensors in place."""

    identities: Tensor  # [slots] int64, EMPTY for an empty slot
    seen: Tensor  # [slots] int32, the last training step whose batch had the id; -1 for an empty slot


@dataclass
class Insertion:
    """What the insertion of a batch has changed.

    Attributes:
        touched: ``[k]`` int64, slots of the batch that an id owns.
        other_ids, other_seen: ``[k]`` their identities and ages before the insertion; while it is undone, those after it.
        fresh_slots: ``[f]`` int64, slots that have a new owner. Their rows must be drawn anew.
        fresh_ids: ``[f]`` int64, the new owners.
        evicted: number of fresh slots that another id has lost.
        fallback: number of distinct ids that found no slot.
        shared: number of reserved slots that these ids share.
    """

    touched: Tensor
    other_ids: Tensor
    other_seen: Tensor
    fresh_slots: Tensor
    fresh_ids: Tensor
    evicted: int
    fallback: int
    shared: int

    @property
    def inserted(self) -> int:
        return self.fresh_slots.numel()

    def swap(self, state: IdentityState) -> None:
        """Undo the insertion, or redo it. The insertions of later batches must be undone."""
        now = state.identities[self.touched], state.seen[self.touched]
        state.identities[self.touched], state.seen[self.touched] = self.other_ids, self.other_seen
        self.other_ids, self.other_seen = now


def empty_state(slots: int, device: torch.device) -> IdentityState:
    """A state without ids."""
    return IdentityState(
        torch.full((slots,), EMPTY, dtype=torch.int64, device=device),
        torch.full((slots,), -1, dtype=torch.int32, device=device),
    )


def insert(
    state: IdentityState, layout: Layout, eviction: Eviction, ids: Tensor, step: int
) -> tuple[Tensor, Insertion]:
    """Look up ``ids [n]`` int64 and insert those that are missing, as batch of training step ``step``.

    Returns:
        the slot of each id, ``[n]`` int64, and what has changed.
    """
    with _named_ids():
        slots, touched, old_ids, old_seen, hits, fallback = _C.zero_collision_insert(
            state.identities.numpy(),
            state.seen.numpy(),
            ids.contiguous().numpy(),
            layout.numbers(),
            eviction.code,
            eviction.ttl,
            step,
        )
    all_touched, before = torch.from_numpy(touched), torch.from_numpy(old_ids)
    fresh = all_touched[hits:]
    insertion = Insertion(
        touched=all_touched,
        other_ids=before,
        other_seen=torch.from_numpy(old_seen),
        fresh_slots=fresh,
        fresh_ids=state.identities[fresh],
        evicted=int((before[hits:] != EMPTY).sum()),
        fallback=len(fallback),
        shared=len(set(fallback.tolist())),
    )
    return torch.from_numpy(slots), insertion


def look_up(state: IdentityState, layout: Layout, ids: Tensor) -> tuple[Tensor, int]:
    """The slot of each of ``ids [n]`` int64, without any change, and how many have none of their own.

    Ids without a slot share the reserved slots of their bucket.
    """
    with _named_ids():
        slots, missing = _C.zero_collision_find(state.identities.numpy(), ids.contiguous().numpy(), layout.numbers())
    return torch.from_numpy(slots), missing


@contextmanager
def _named_ids() -> Iterator[None]:
    """Turn an error of the C++ core about ids into an :class:`InputError`."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("ids:"):
            raise
        raise InputError(f"zero-collision {error}; ids are integers from 0 to 2^63 - 1") from error
