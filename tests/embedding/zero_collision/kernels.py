"""Compares the Triton kernels with the C++ core. Needs Triton: a GPU, or its interpreter."""

from __future__ import annotations

from typing import Any

import torch

from lightning_freescale.embedding.zero_collision import remap, triton_remap
from lightning_freescale.embedding.zero_collision.layout import Eviction, Layout
from lightning_freescale.embedding.zero_collision.remap import IdentityState


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
