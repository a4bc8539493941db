"""Compares the Triton kernels with the C++ core and with the reference. Needs Triton: a GPU, or its interpreter."""

from __future__ import annotations

import random
from typing import Any

import torch

from lightning_freescale.embedding.zero_collision import remap, triton_remap
from lightning_freescale.embedding.zero_collision.layout import Eviction, Layout
from lightning_freescale.embedding.zero_collision.reference import ReferenceRemapper
from lightning_freescale.embedding.zero_collision.remap import IdentityState, InsertionCounts


def compare_with_core(policy: Any, device: torch.device, steps: int, batch: int, layout: Layout | None = None) -> int:
    """Insert the same ids with both, step for step, and compare everything. Returns the number of ids without a slot."""
    layout = layout or Layout(buckets=7, first_bucket=2, held=4, bucket_size=16, reserved=3, max_probe=6)
    eviction, cpu = Eviction(policy, 2), torch.device("cpu")
    expected, state = remap.empty_state(layout.slots, cpu), remap.empty_state(layout.slots, device)
    generator = torch.Generator().manual_seed(4)
    fallback = 0
    for step in range(steps):
        known = torch.randint(0, 20 + 12 * step, (batch,), generator=generator) * 2_654_435_761
        ids = torch.cat([known, torch.randint(0, 2**63 - 1, (batch // 4,), generator=generator)])
        here = (ids % layout.buckets >= layout.first_bucket) & (
            ids % layout.buckets < layout.first_bucket + layout.held
        )
        ids = ids[here] if step != 2 else ids[:0]  # one batch without ids
        slots, insertion = remap.insert(expected, layout, eviction, ids, step)
        got, other = triton_remap.insert(state, layout, eviction, ids.to(device), step)
        assert torch.equal(got.cpu(), slots)
        assert same(state, expected)
        assert other.counts == insertion.counts, (other.counts, insertion.counts)
        fresh = dict(zip(insertion.fresh_slots.tolist(), insertion.fresh_ids.tolist(), strict=True))
        assert dict(zip(other.fresh_slots.tolist(), other.fresh_ids.tolist(), strict=True)) == fresh
        for _ in range(2):  # undo and redo
            other.swap(state)
            insertion.swap(expected)
            assert same(state, expected)
        probe = torch.cat([ids, ids + layout.buckets])
        looked_up = triton_remap.look_up(state, layout, probe.to(device))
        assert torch.equal(looked_up.cpu(), remap.look_up(expected, layout, probe))
        fallback += insertion.counts.fallback
    return fallback


def same(state: IdentityState, expected: IdentityState) -> bool:
    return torch.equal(state.identities.cpu(), expected.identities) and torch.equal(state.seen.cpu(), expected.seen)


def compare_with_reference(
    layout: Layout, eviction: Eviction, steps: list[list[int]], left_out: int, device: torch.device
) -> None:
    """Insert ids step by step with the kernels and with the reference, and compare everything.

    Args:
        left_out: ids that this number divides are left out by a mask; 0 for no mask.
    """
    reference, state = ReferenceRemapper(layout, eviction), remap.empty_state(layout.slots, device)
    for step, numbers in enumerate(steps):
        ids = torch.tensor(numbers, dtype=torch.int64, device=device)
        chosen = ids % left_out != 0 if left_out else None
        wanted = [number for number in numbers if not left_out or number % left_out]
        before = {slot: (number, reference.seen[slot]) for slot, number in reference.identities.items()}
        fresh = reference.insert(wanted, step)
        slots, insertion = triton_remap.insert(state, layout, eviction, ids, step, chosen)
        found = slots if chosen is None else slots[chosen]
        assert found.tolist() == reference.look_up(wanted)
        assert dict(zip(insertion.fresh_slots.tolist(), insertion.fresh_ids.tolist(), strict=True)) == fresh
        without = {number for number in wanted if reference.find(number) is None}
        assert insertion.counts == InsertionCounts(
            inserted=len(fresh),
            evicted=len(fresh.keys() & before.keys()),
            fallback=len(without),
            shared=len({reference.reserved(number) for number in without}),
            distinct=len(set(wanted)),
        )
        now = {slot: (number, reference.seen[slot]) for slot, number in reference.identities.items()}
        assert owners(state) == now
        insertion.swap(state)
        assert owners(state) == before
        insertion.swap(state)
        assert owners(state) == now
        looked_up = triton_remap.look_up(state, layout, ids, chosen)
        assert (looked_up if chosen is None else looked_up[chosen]).tolist() == reference.look_up(wanted)


def owners(state: IdentityState) -> dict[int, tuple[int, int]]:
    """The id and the age of every slot that is not empty. The age of an empty slot is -1."""
    rows = enumerate(zip(state.identities.tolist(), state.seen.tolist(), strict=True))
    return {slot: pair for slot, pair in rows if pair != (-1, -1)}


def random_case(seed: int) -> dict[str, Any]:
    """Arguments of :func:`compare_with_reference`: a small table, and batches of ids that come back, go and are new."""
    chance = random.Random(seed)
    buckets, size = chance.randint(1, 5), chance.randint(2, 40)
    layout = Layout(buckets, 0, buckets, size, chance.randint(1, max(1, size // 4)), max_probe=chance.randint(1, 48))
    steps = []
    for step in range(6):
        known = [chance.randrange(20 * step, 20 * step + 80) for _ in range(chance.randrange(60))]
        steps.append(known + [chance.randrange(2**63) for _ in range(chance.randrange(8))])
    eviction = Eviction(chance.choice([None, "ttl", "lru"]), chance.randint(1, 3))  # type: ignore[arg-type]
    return {"layout": layout, "eviction": eviction, "steps": steps, "left_out": chance.choice([0, 3])}
