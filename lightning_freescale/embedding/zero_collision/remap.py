"""From ids to slots: look-ups, insertions, and how to undo them. On CPU the C++ core does it, on CUDA a Triton kernel.

``insert`` is a function of the state, the *set* of ids and the step: their order, their number and the distribution of the
buckets over ranks do not matter. ``reference.py`` defines the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_freescale import _C
from lightning_freescale.embedding.zero_collision.layout import EMPTY, Eviction, Layout
from lightning_freescale.runtime.errors import InputError
from lightning_freescale.runtime.streams import Readback


class IdentityState(NamedTuple):
    """Who owns the slots. The functions of this file change the two tensors in place."""

    identities: Tensor  # [slots] int64, EMPTY for an empty slot
    seen: Tensor  # [slots] int32, the last training step whose batch had the id; -1 for an empty slot


class InsertionCounts(NamedTuple):
    """What the insertion of a batch has done, in numbers.

    Attributes:
        inserted: ids that got a slot.
        evicted: slots that were taken from other ids for them.
        fallback: distinct ids that found no slot.
        shared: reserved slots that these ids share.
        distinct: distinct ids of the batch.
    """

    inserted: int
    evicted: int
    fallback: int
    shared: int
    distinct: int


@dataclass
class Insertion:
    """What the insertion of a batch has changed.

    Attributes:
        touched: ``[k]`` int64, slots that the insertion may have changed; equal entries for equal slots.
        other_ids, other_seen: ``[k]`` their identities and ages before the insertion; while it is undone, those after it.
        first_slots: ``[k]`` int64, begins with the slots that have a new owner.
        first_ids: ``[k]`` int64, begins with the new owners.
        numbers: the :class:`InsertionCounts`, on their way to the host.
        rows: ``[f, D]`` the first rows of the new owners, once they have been drawn.
    """

    touched: Tensor
    other_ids: Tensor
    other_seen: Tensor
    first_slots: Tensor
    first_ids: Tensor
    numbers: Readback
    rows: Tensor | None = None

    @property
    def counts(self) -> InsertionCounts:
        """Waits for the device if it has not come so far."""
        return InsertionCounts(*self.numbers.wait().tolist())

    @property
    def fresh_slots(self) -> Tensor:
        """``[f]`` int64, slots that have a new owner. Their rows must be drawn anew."""
        return self.first_slots[: self.counts.inserted]

    @property
    def fresh_ids(self) -> Tensor:
        """``[f]`` int64, the new owners."""
        return self.first_ids[: self.counts.inserted]

    def tensors(self) -> list[Tensor]:
        """All tensors, which several streams use."""
        return [self.touched, self.other_ids, self.other_seen, self.first_slots, self.first_ids]

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
    state: IdentityState, layout: Layout, eviction: Eviction, ids: Tensor, step: int, chosen: Tensor | None = None
) -> tuple[Tensor, Insertion]:
    """Look up ``ids [n]`` int64 and insert those that are missing, as batch of training step ``step``.

    Args:
        chosen: ``[n]`` booleans: leave the other ids out. Their slots mean nothing.

    Returns:
        the slot of each id, ``[n]`` int64, and what has changed.
    """
    if ids.device.type == "cuda":
        return _triton().insert(state, layout, eviction, ids, step, chosen)
    wanted = ids if chosen is None else ids[chosen]
    with _named_ids():
        slots, touched, old_ids, old_seen, hits, fallback = _C.zero_collision_insert(
            state.identities.numpy(),
            state.seen.numpy(),
            wanted.contiguous().numpy(),
            layout.numbers(),
            eviction.code,
            eviction.ttl,
            step,
        )
    all_touched, before = torch.from_numpy(touched), torch.from_numpy(old_ids)
    fresh = all_touched[hits:]
    counts = InsertionCounts(
        inserted=len(fresh),
        evicted=int((before[hits:] != EMPTY).sum()),
        fallback=len(fallback),
        shared=len(set(fallback.tolist())),
        distinct=len(touched) + len(fallback),
    )
    insertion = Insertion(
        touched=all_touched,
        other_ids=before,
        other_seen=torch.from_numpy(old_seen),
        first_slots=fresh,
        first_ids=state.identities[fresh],
        numbers=Readback(torch.tensor(counts)),
    )
    return _at(torch.from_numpy(slots), chosen), insertion


def look_up(state: IdentityState, layout: Layout, ids: Tensor, chosen: Tensor | None = None) -> Tensor:
    """The slot of each of ``ids [n]`` int64, without any change. Ids without a slot share reserved slots of their bucket.

    Args:
        chosen: ``[n]`` booleans: leave the other ids out. Their slots mean nothing.
    """
    if ids.device.type == "cuda":
        return _triton().look_up(state, layout, ids, chosen)
    wanted = ids if chosen is None else ids[chosen]
    with _named_ids():
        slots = _C.zero_collision_find(state.identities.numpy(), wanted.contiguous().numpy(), layout.numbers())[0]
    return _at(torch.from_numpy(slots), chosen)


def _at(slots: Tensor, chosen: Tensor | None) -> Tensor:
    """The slots of the chosen ids, at their places among all ids."""
    if chosen is None:
        return slots
    return torch.zeros(chosen.shape, dtype=torch.int64).masked_scatter_(chosen, slots)


def _triton() -> Any:
    """The kernels for CUDA. Triton is installed with the CUDA build of torch only."""
    from lightning_freescale.embedding.zero_collision import triton_remap

    return triton_remap


@contextmanager
def _named_ids() -> Iterator[None]:
    """Turn an error of the C++ core about ids into an :class:`InputError`."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("ids:"):
            raise
        raise InputError(f"zero-collision {error}; ids are integers from 0 to 2^63 - 1") from error
