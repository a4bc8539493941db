"""From ids to slots on CUDA. The results are those of the C++ core, bit for bit, in every run.

Look-ups are independent of each other, and one kernel does all of them at once. Insertions into one bucket depend on each other:
one program inserts the missing ids of a bucket one after the other, in ascending order. Buckets are independent, so nothing
races. Most ids of a batch are known, so few are left for the second kernel. The host waits for nothing.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.embedding.index import true_first
from lightning_freescale.embedding.zero_collision.hashing import signed
from lightning_freescale.embedding.zero_collision.layout import EMPTY, Eviction, Layout
from lightning_freescale.embedding.zero_collision.remap import IdentityState, Insertion
from lightning_freescale.runtime.streams import Readback

IDS = 128  # ids of one program of a look-up
FRESH, FALLBACK = 1, 2  # what became of a missing id; 0 for known and for repeated ids
IDS_UP_TO = 1 << 63


# ---- kernels -------------------------------------------------------------------------------------------------------
@triton.jit
def _finalize(h):
    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCD
    h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53
    return h ^ (h >> 33)


@triton.jit
def _hash(number):
    """``reference.hash_id`` of int64 numbers, as uint64."""
    k = number.to(tl.uint64) * 0x87C37B91114253D5
    k = ((k << 31) | (k >> 33)) * 0x4CF5AD432745937F
    h1 = ((k << 27) | (k >> 37)) * 5 + 0x52DCE729
    h2 = h1 * 5 + 0x38495AB5
    h1 = h1 ^ 16
    h2 = h2 ^ 16
    h1 = h1 + h2
    h2 = h2 + h1
    h1 = _finalize(h1)
    h2 = _finalize(h2)
    h1 = h1 + h2
    return h1 ^ (h2 + h1)


@triton.jit
def _remainder(h, divisor):
    """``h % divisor`` of unsigned ``h``, as int64."""
    return (h % (h * 0 + divisor)).to(tl.int64)  # Triton takes no remainder of numbers with and without a sign


# Kernels are not compiled anew for special values of numbers, such as 1 or multiples of 16: steps and batches have all values.
# Nor are they for addresses that are multiples of 16: ids may be a part of a longer tensor.
@triton.jit(
    do_not_specialize=[
        "ids_ptr", "chosen_ptr", "slots_ptr", "count", "buckets", "first_bucket", "bucket_size", "usable", "reserved",
        "limit", "span",
    ]
)  # fmt: skip
def _look_up(
    identities_ptr, seen_ptr, ids_ptr, chosen_ptr, slots_ptr, key_ptr, old_ids_ptr, old_seen_ptr, count, buckets,
    first_bucket, bucket_size, usable, reserved, limit, span, CHOSEN: tl.constexpr, INSERT: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """The slot of each id: the one that it owns, or else a reserved one. An empty slot ends the search.

    With INSERT also the state of the slot, and by what the missing ids are to be sorted: their bucket, then the id.
    """
    at = tl.program_id(0).to(tl.int64) * IDS + tl.arange(0, IDS)
    inside = at < count
    if CHOSEN:
        inside = inside & (tl.load(chosen_ptr + at, mask=inside, other=0) != 0)
    number = tl.load(ids_ptr + at, mask=inside, other=0)
    inside = inside & (number >= 0)  # others are refused before, and must not reach foreign memory
    number = tl.where(inside, number, first_bucket)
    h = _hash(number)
    bucket = number % buckets - first_bucket
    base = bucket * bucket_size
    home = _remainder(h, usable)
    slot = base + usable + _remainder(h, reserved)
    found = inside & (number < 0)
    searching = inside
    probe = 0
    while (probe < limit) & (tl.max(searching.to(tl.int32), 0) > 0):
        place = home + probe
        place = base + tl.where(place < usable, place, place - usable)
        owner = tl.load(identities_ptr + place, mask=searching, other=-1)
        here = searching & (owner == number)
        slot = tl.where(here, place, slot)
        found = found | here
        searching = searching & (owner != number) & (owner != -1)
        probe += 1
    tl.store(slots_ptr + at, slot, mask=at < count)
    if INSERT:
        key = bucket * span + number // buckets + (-9223372036854775808)
        tl.store(key_ptr + at, tl.where(inside & (found == 0), key, 9223372036854775807), mask=at < count)
        tl.store(old_ids_ptr + at, tl.where(found, number, -1), mask=at < count)
        tl.store(old_seen_ptr + at, tl.load(seen_ptr + slot, mask=found, other=-1), mask=at < count)


@triton.jit(do_not_specialize=["slots_ptr", "count", "step"])
def _mark_seen(seen_ptr, slots_ptr, old_ids_ptr, count, step, IDS: tl.constexpr):
    """The ids that own their slots are seen in this step."""
    at = tl.program_id(0).to(tl.int64) * IDS + tl.arange(0, IDS)
    inside = at < count
    known = inside & (tl.load(old_ids_ptr + at, mask=inside, other=-1) != -1)
    slot = tl.load(slots_ptr + at, mask=known, other=0)
    tl.store(seen_ptr + slot, tl.zeros((IDS,), tl.int32) + step, mask=known)


@triton.jit(do_not_specialize=["ids_ptr", "slots_ptr", "step", "ttl", "bucket_size", "usable", "reserved", "limit"])
def _insert(
    identities_ptr, seen_ptr, ids_ptr, order_ptr, bounds_ptr, slots_ptr, old_ids_ptr, old_seen_ptr, fate_ptr,
    step, ttl, bucket_size, usable, reserved, limit, POLICY: tl.constexpr, PROBES: tl.constexpr,
):  # fmt: skip
    """Insert the missing ids of one bucket, one after the other. Equal ids are neighbours in ``order``."""
    bucket = tl.program_id(0)
    base = bucket.to(tl.int64) * bucket_size
    probe = tl.arange(0, PROBES)
    at, end = tl.load(bounds_ptr + bucket), tl.load(bounds_ptr + bucket + 1)
    previous = tl.full((), -1, tl.int64)
    slot = tl.full((), 0, tl.int64)
    old_id = tl.full((), -1, tl.int64)
    old_age = tl.full((), -1, tl.int32)
    while at < end:
        position = tl.load(order_ptr + at)
        number = tl.load(ids_ptr + position)
        fate = tl.full((), 0, tl.int32)
        if number != previous:
            h = _hash(number)
            home = _remainder(h, usable)
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
            slot = tl.where(found, chosen, base + usable + _remainder(h, reserved))
            old_id = tl.load(identities_ptr + slot)
            old_age = tl.load(seen_ptr + slot)
            fate = tl.where(found, 1, 2).to(tl.int32)
            previous = number
            tl.debug_barrier()  # all threads have read the state of before
            tl.store(identities_ptr + slot, number, mask=found)
            tl.store(seen_ptr + slot, (old_age * 0 + step).to(tl.int32), mask=found)
            tl.debug_barrier()  # the next id sees what this one has written
        tl.store(slots_ptr + position, slot)
        tl.store(old_ids_ptr + position, old_id)
        tl.store(old_seen_ptr + position, old_age)
        tl.store(fate_ptr + position, fate)
        at += 1


# ---- the functions of remap.py -------------------------------------------------------------------------------------
def look_up(state: IdentityState, layout: Layout, ids: Tensor, chosen: Tensor | None = None) -> Tensor:
    """As :func:`remap.look_up`."""
    slots = torch.empty_like(ids)
    _find(state, layout, ids, chosen, slots, None)
    return slots


def _find(
    state: IdentityState, layout: Layout, ids: Tensor, chosen: Tensor | None, slots: Tensor, found: list[Tensor] | None
) -> None:
    """Write ``slots``. For an insertion also write ``found``: sort keys of missing ids, old identities, old ages."""
    if not ids.numel():
        return
    key, old_ids, old_seen = found or (slots, slots, slots)  # without an insertion the kernel does not use them
    _look_up[(triton.cdiv(ids.numel(), IDS),)](
        state.identities, state.seen, ids, ids if chosen is None else chosen, slots, key, old_ids, old_seen,
        ids.numel(), layout.buckets, layout.first_bucket, layout.bucket_size, layout.usable, layout.reserved,
        min(layout.max_probe, layout.usable), _span(layout), CHOSEN=chosen is not None, INSERT=found is not None, IDS=IDS,
    )  # fmt: skip


def _span(layout: Layout) -> int:
    """The distance of the sort keys of two buckets: an upper bound of ``id // buckets``."""
    return signed(-(-IDS_UP_TO // layout.buckets))


def insert(
    state: IdentityState, layout: Layout, eviction: Eviction, ids: Tensor, step: int, chosen: Tensor | None = None
) -> tuple[Tensor, Insertion]:
    """As :func:`remap.insert`."""
    count = ids.numel()
    slots, key, old_ids, old_seen = (
        torch.empty(count, dtype=kind, device=ids.device) for kind in (*[torch.int64] * 3, torch.int32)
    )
    _find(state, layout, ids, chosen, slots, [key, old_ids, old_seen])
    fate = torch.zeros(count, dtype=torch.int32, device=ids.device)
    if count:
        _mark_seen[(triton.cdiv(count, IDS),)](state.seen, slots, old_ids, count, step, IDS=IDS)
        keys, order = key.sort()
        edges = torch.arange(layout.held + 1, device=ids.device) * _span(layout) + signed(IDS_UP_TO)
        bounds = torch.searchsorted(keys, edges)
        limit = min(layout.max_probe, layout.usable)
        probes = max(16, triton.next_power_of_2(limit))
        _insert[(layout.held,)](
            state.identities, state.seen, ids, order, bounds, slots, old_ids, old_seen, fate,
            step, eviction.ttl, layout.bucket_size, layout.usable, layout.reserved, limit,
            POLICY=eviction.code, PROBES=probes, num_warps=1 if probes <= 256 else 4, num_stages=1,
        )  # fmt: skip
    fresh_first = true_first(fate == FRESH)
    insertion = Insertion(
        touched=slots,
        other_ids=old_ids,
        other_seen=old_seen,
        first_slots=slots[fresh_first],
        first_ids=ids[fresh_first],
        numbers=Readback(_counts(layout, slots, old_ids, fate, chosen)),
    )
    return slots, insertion


def _counts(layout: Layout, slots: Tensor, old_ids: Tensor, fate: Tensor, chosen: Tensor | None) -> Tensor:
    """The :class:`remap.InsertionCounts` as a tensor."""
    used = torch.zeros(
        layout.slots + 1, dtype=torch.bool, device=slots.device
    )  # the last one for ids that are left out
    used.index_fill_(0, slots if chosen is None else torch.where(chosen, slots, layout.slots), True)
    by_bucket = used[: layout.slots].view(layout.held, layout.bucket_size)
    fresh, fallback = fate == FRESH, (fate == FALLBACK).sum()
    return torch.stack(
        [
            fresh.sum(),
            (fresh & (old_ids != EMPTY)).sum(),
            fallback,
            by_bucket[:, layout.usable :].sum(),
            by_bucket[:, : layout.usable].sum() + fallback,
        ]
    )
