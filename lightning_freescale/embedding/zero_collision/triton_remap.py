"""From ids to slots on CUDA. The results are those of the C++ core, bit for bit, in every run.

Look-ups are independent of each other, and one kernel does all of them at once. Insertions into one bucket depend on each other:
one program inserts the missing ids of a bucket one after the other, in the order of their hashes. Buckets are independent, so
nothing races. Most ids of a batch are known, so few are left for the second kernel. The host waits for nothing.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.embedding.index import true_first
from lightning_freescale.embedding.zero_collision.hashing import hash_ids, unsigned_order, unsigned_remainder
from lightning_freescale.embedding.zero_collision.layout import EMPTY, Eviction, Layout
from lightning_freescale.embedding.zero_collision.remap import IdentityState, Insertion
from lightning_freescale.runtime.streams import Readback

LOOKUPS = 64  # ids of one program of the look-up
REPEATED, FRESH, FALLBACK = 0, 1, 2  # what became of a missing id


@triton.jit
def _look_up(identities_ptr, ids_ptr, base_ptr, home_ptr, slots_ptr, count, usable, limit, LOOKUPS: tl.constexpr):
    """The slot that owns each id, or -1. An empty slot ends the search."""
    at = tl.program_id(0) * LOOKUPS + tl.arange(0, LOOKUPS)
    inside = at < count
    number = tl.load(ids_ptr + at, mask=inside, other=0)
    base = tl.load(base_ptr + at, mask=inside, other=0)
    home = tl.load(home_ptr + at, mask=inside, other=0)
    slot = tl.full((LOOKUPS,), -1, tl.int64)
    searching = inside
    probe = 0
    while (probe < limit) & (tl.max(searching.to(tl.int32), 0) > 0):
        place = home + probe
        place = base + tl.where(place < usable, place, place - usable)
        owner = tl.load(identities_ptr + place, mask=searching, other=-1)
        slot = tl.where(searching & (owner == number), place, slot)
        searching = searching & (owner != number) & (owner != -1)
        probe += 1
    tl.store(slots_ptr + at, slot, mask=inside)


@triton.jit
def _insert(
    identities_ptr, seen_ptr, ids_ptr, home_ptr, reserved_ptr, bounds_ptr, slots_ptr, old_ids_ptr, old_seen_ptr, fate_ptr,
    step, ttl, bucket_size, usable, limit, POLICY: tl.constexpr, PROBES: tl.constexpr,
):  # fmt: skip
    """Insert the missing ids of one bucket, one after the other. Equal ids are neighbours."""
    bucket = tl.program_id(0)
    base = bucket.to(tl.int64) * bucket_size
    probe = tl.arange(0, PROBES)
    first, end = tl.load(bounds_ptr + bucket), tl.load(bounds_ptr + bucket + 1)
    for at in range(first, end):
        number = tl.load(ids_ptr + at)
        previous = tl.load(ids_ptr + at - 1, mask=at > first, other=-1)
        if number == previous:
            tl.store(slots_ptr + at, tl.load(slots_ptr + at - 1))
            tl.store(old_ids_ptr + at, tl.load(old_ids_ptr + at - 1))
            tl.store(old_seen_ptr + at, tl.load(old_seen_ptr + at - 1))
            tl.store(fate_ptr + at, 0)
        else:
            home = tl.load(home_ptr + at)
            place = home + probe
            place = base + tl.where(place < usable, place, place - usable)
            inside = probe < limit
            owner = tl.load(identities_ptr + place, mask=inside, other=0)
            age = tl.load(seen_ptr + place, mask=inside, other=0).to(tl.int64)
            empty = inside & (owner == -1)
            expired = inside & (owner != -1) & (age + ttl < step)
            if POLICY == 0:
                taken = tl.min(tl.where(empty, probe, PROBES), 0)
            elif POLICY == 1:
                taken = tl.min(tl.where(empty | expired, probe, PROBES), 0)
            else:
                taken = tl.min(tl.where(empty, probe, PROBES), 0)
                never = 9223372036854775807
                oldest = tl.min(tl.where(expired, age * PROBES + probe, never), 0)
                taken = tl.where((taken == PROBES) & (oldest != never), (oldest % PROBES).to(tl.int32), taken)
            found = taken < PROBES
            chosen = home + taken
            chosen = base + tl.where(chosen < usable, chosen, chosen - usable)
            slot = tl.where(found, chosen, tl.load(reserved_ptr + at))
            tl.store(slots_ptr + at, slot)
            tl.store(old_ids_ptr + at, tl.load(identities_ptr + slot))
            tl.store(old_seen_ptr + at, tl.load(seen_ptr + slot))
            tl.store(fate_ptr + at, tl.where(found, 1, 2))
            tl.debug_barrier()  # all threads have read the state of before
            tl.store(identities_ptr + slot, number, mask=found)
            tl.store(seen_ptr + slot, step, mask=found)
        tl.debug_barrier()  # the next id sees what this one has written


class _Places:
    """Where ids probe: ``[n]`` int64 tensors, in slots of the part that is held here."""

    def __init__(self, layout: Layout, ids: Tensor):
        self.hash = hash_ids(ids)
        self.bucket = ids % layout.buckets - layout.first_bucket
        self.base = self.bucket * layout.bucket_size
        self.home = unsigned_remainder(self.hash, layout.usable)
        self.reserved = self.base + layout.usable + unsigned_remainder(self.hash, layout.reserved)


def _owned_slots(state: IdentityState, layout: Layout, ids: Tensor, places: _Places) -> Tensor:
    """The slot that each id owns, ``[n]`` int64; -1 for none."""
    slots = torch.empty_like(ids)
    count, limit = ids.numel(), min(layout.max_probe, layout.usable)
    if count:
        grid = (triton.cdiv(count, LOOKUPS),)
        _look_up[grid](
            state.identities, ids, places.base, places.home, slots, count, layout.usable, limit, LOOKUPS=LOOKUPS
        )
    return slots


def look_up(state: IdentityState, layout: Layout, ids: Tensor) -> Tensor:
    """As :func:`remap.look_up`."""
    places = _Places(layout, ids)
    slots = _owned_slots(state, layout, ids, places)
    return torch.where(slots >= 0, slots, places.reserved)


def insert(
    state: IdentityState, layout: Layout, eviction: Eviction, ids: Tensor, step: int
) -> tuple[Tensor, Insertion]:
    """As :func:`remap.insert`."""
    places = _Places(layout, ids)
    owned = _owned_slots(state, layout, ids, places)
    hit = owned >= 0
    slots = torch.where(hit, owned, places.reserved)
    old_ids, old_seen = state.identities[slots], state.seen[slots]
    # Reserved slots are empty, and their age is -1: writing -1 there changes nothing.
    state.seen[slots] = torch.where(hit, step, -1).to(torch.int32)
    order = torch.argsort(ids, stable=True)
    order = order[torch.argsort(unsigned_order(places.hash)[order], stable=True)]
    bucket = torch.where(hit, layout.held, places.bucket)  # the known ids come last
    order = order[torch.argsort(bucket[order], stable=True)]
    bounds = torch.searchsorted(bucket[order], torch.arange(layout.held + 1, device=ids.device))
    sorted_ids, sorted_slots = ids[order], slots[order]
    old_ids, old_seen = old_ids[order], old_seen[order]
    fate = torch.zeros_like(sorted_ids)
    limit = min(layout.max_probe, layout.usable)
    _insert[(layout.held,)](
        state.identities, state.seen, sorted_ids, places.home[order], places.reserved[order], bounds, sorted_slots,
        old_ids, old_seen, fate, step, eviction.ttl, layout.bucket_size, layout.usable, limit,
        POLICY=eviction.code, PROBES=triton.next_power_of_2(limit),
    )  # fmt: skip
    slots[order] = sorted_slots
    fresh = fate == FRESH
    fresh_first = true_first(fresh)
    insertion = Insertion(
        touched=sorted_slots,
        other_ids=old_ids,
        other_seen=old_seen,
        first_slots=sorted_slots[fresh_first],
        first_ids=sorted_ids[fresh_first],
        numbers=Readback(_counts(sorted_ids, sorted_slots, old_ids, fate)),
    )
    return slots, insertion


def _counts(ids: Tensor, slots: Tensor, old_ids: Tensor, fate: Tensor) -> Tensor:
    """The :class:`remap.InsertionCounts` as a tensor. Equal ids are neighbours."""
    shared = torch.where(fate == FALLBACK, slots, -1).sort()[0]
    return torch.stack(
        [
            (fate == FRESH).sum(),
            ((fate == FRESH) & (old_ids != EMPTY)).sum(),
            (fate == FALLBACK).sum(),
            _changes(shared, before=-1),
            _changes(ids, before=-1),
        ]
    )


def _changes(values: Tensor, before: int) -> Tensor:
    """How often a value differs from the one before it; ``before`` comes before the first."""
    return (values != torch.cat([values.new_full((1,), before), values])[:-1]).sum()
