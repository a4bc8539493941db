"""Zero-collision ids on tensors equal the reference in plain Python, slot for slot, and FBGEMM reads their tables."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.zero_collision import look_up_by_fbgemm
from lightning_freescale.embedding.zero_collision.layout import EMPTY, Eviction, Layout
from lightning_freescale.embedding.zero_collision.reference import ReferenceRemapper
from lightning_freescale.embedding.zero_collision.remap import (
    IdentityState,
    Insertion,
    InsertionCounts,
    empty_state,
    insert,
    look_up,
)
from lightning_freescale.runtime.errors import InputError

CPU = torch.device("cpu")
LAST_ID = 2**63 - 1


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    buckets, size = draw(st.integers(1, 5)), draw(st.integers(2, 12))
    reserved = draw(st.integers(1, size - 1))
    return Layout(buckets, 0, buckets, size, reserved, max_probe=draw(st.integers(1, 16)))


def batches(steps: int = 8) -> st.SearchStrategy[list[list[int]]]:
    numbers = st.one_of(st.integers(0, 60), st.integers(0, LAST_ID))
    return st.lists(st.lists(numbers, max_size=20), min_size=1, max_size=steps)


evictions = st.builds(Eviction, st.sampled_from([None, "ttl", "lru"]), st.integers(1, 3))


def as_tensors(reference: ReferenceRemapper) -> IdentityState:
    state = empty_state(reference.layout.slots, CPU)
    for slot, number in reference.identities.items():
        state.identities[slot], state.seen[slot] = number, reference.seen[slot]
    return state


def same(a: IdentityState, b: IdentityState) -> bool:
    return torch.equal(a.identities, b.identities) and torch.equal(a.seen, b.seen)


def copy(state: IdentityState) -> IdentityState:
    return IdentityState(state.identities.clone(), state.seen.clone())


@settings(max_examples=150, deadline=None)
@given(layout=layouts(), eviction=evictions, steps=batches(), gap=st.integers(1, 3))
def test_equals_the_reference(layout: Layout, eviction: Eviction, steps: list[list[int]], gap: int) -> None:
    reference, state = ReferenceRemapper(layout, eviction), empty_state(layout.slots, CPU)
    for step, ids in enumerate(steps):
        old = dict(reference.identities)
        fresh = reference.insert(ids, step * gap)
        slots, insertion = insert(state, layout, eviction, torch.tensor(ids, dtype=torch.int64), step * gap)
        assert slots.tolist() == reference.look_up(ids)
        assert same(state, as_tensors(reference))
        assert dict(zip(insertion.fresh_slots.tolist(), insertion.fresh_ids.tolist(), strict=True)) == fresh
        without = {number for number in ids if reference.find(number) is None}
        assert insertion.counts == InsertionCounts(
            inserted=len(fresh),
            evicted=len(fresh.keys() & old.keys()),
            fallback=len(without),
            shared=len({reference.reserved(number) for number in without}),
            distinct=len(set(ids)),
        )
        assert (state.identities.view(-1, layout.bucket_size)[:, layout.usable :] == EMPTY).all()
        assert torch.equal(look_up(state, layout, torch.tensor(ids, dtype=torch.int64)), slots)


@settings(max_examples=60, deadline=None)
@given(
    layout=layouts(), eviction=evictions, steps=batches(), data=st.data(), shuffler=st.randoms(use_true_random=False)
)
def test_neither_order_nor_ranks_matter(
    layout: Layout, eviction: Eviction, steps: list[list[int]], data: st.DataObject, shuffler: object
) -> None:
    """Other orders and repeated ids give the same state, and so do buckets that are spread over ranks."""
    cut = data.draw(st.integers(0, layout.buckets))
    parts = [
        dataclasses.replace(layout, first_bucket=first, held=end - first)
        for first, end in ((0, cut), (cut, layout.buckets))
    ]
    whole, shards = empty_state(layout.slots, CPU), [empty_state(part.slots, CPU) for part in parts]
    for step, ids in enumerate(steps):
        insert(whole, layout, eviction, torch.tensor(ids, dtype=torch.int64), step)
        other = ids + ids[:3]
        shuffler.shuffle(other)  # type: ignore[attr-defined]
        for part, shard in zip(parts, shards, strict=True):
            end = part.first_bucket + part.held
            mine = [number for number in other if part.first_bucket <= number % layout.buckets < end]
            insert(shard, part, eviction, torch.tensor(mine, dtype=torch.int64), step)
        together = IdentityState(*(torch.cat(tensors) for tensors in zip(*shards, strict=True)))
        assert same(whole, together)


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), eviction=evictions, steps=batches())
def test_undo_and_redo(layout: Layout, eviction: Eviction, steps: list[list[int]]) -> None:
    state = empty_state(layout.slots, CPU)
    states, done = [copy(state)], list[Insertion]()
    for step, ids in enumerate(steps):
        done.append(insert(state, layout, eviction, torch.tensor(ids, dtype=torch.int64), step)[1])
        states.append(copy(state))
    for insertion, before in zip(reversed(done), reversed(states[:-1]), strict=True):
        insertion.swap(state)
        assert same(state, before)
    for insertion, after in zip(done, states[1:], strict=True):
        insertion.swap(state)
        assert same(state, after)


@pytest.mark.parametrize("policy", [None, "ttl", "lru"])
def test_fbgemm_reads_the_table(policy: str | None) -> None:
    """FBGEMM's read-only operator finds the same slot for every id, also for ids without a slot of their own."""
    layout = Layout(buckets=8, first_bucket=0, held=8, bucket_size=128, reserved=3, max_probe=40)
    state, eviction = empty_state(layout.slots, CPU), Eviction(policy, 2)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    seen = []
    for step in range(20):
        ids = torch.randint(0, LAST_ID, (90,), generator=generator)
        insert(state, layout, eviction, ids, step)
        seen.append(ids)
    ids = torch.cat(seen)
    found = look_up(state, layout, ids)
    expected = look_up_by_fbgemm(state, layout, ids)
    assert torch.equal(found, expected)
    missing = found % layout.bucket_size >= layout.usable
    assert missing.any()
    assert not missing.all()


def test_no_collision_at_a_load_of_three_quarters() -> None:
    """Buckets of 1,024 slots: every id has a row of its own, while a modulo lets a quarter of the ids share rows."""
    layout = Layout(buckets=64, first_bucket=0, held=64, bucket_size=1024, reserved=8, max_probe=256)
    ids = torch.randint(0, LAST_ID, (layout.slots * 3 // 4,), generator=torch.Generator().manual_seed(1))
    slots, insertion = insert(empty_state(layout.slots, CPU), layout, Eviction(), ids, 0)
    assert insertion.counts.fallback == 0
    assert len(slots.unique()) == len(ids.unique())
    assert len((ids % layout.slots).unique()) < 0.75 * len(ids)


def test_small_buckets_do_collide() -> None:
    """The test above can fail: buckets of 128 slots are too small."""
    layout = Layout(buckets=512, first_bucket=0, held=512, bucket_size=128, reserved=1, max_probe=256)
    ids = torch.randint(0, LAST_ID, (layout.slots * 9 // 10,), generator=torch.Generator().manual_seed(1))
    slots, insertion = insert(empty_state(layout.slots, CPU), layout, Eviction(), ids, 0)
    assert insertion.counts.fallback > 0
    assert len(slots.unique()) < len(ids.unique())


def test_bad_ids_change_nothing() -> None:
    layout = Layout(buckets=4, first_bucket=0, held=2, bucket_size=4, reserved=1, max_probe=4)
    state = empty_state(layout.slots, CPU)
    before = copy(state)
    with pytest.raises(InputError, match=r"-7 is negative.*0 to 2\^63 - 1"):
        insert(state, layout, Eviction(), torch.tensor([1, -7]), 0)
    with pytest.raises(InputError, match="-7 is negative"):
        look_up(state, layout, torch.tensor([1, -7]))
    with pytest.raises(InputError, match="3 belongs to bucket 3, which is not held here"):
        insert(state, layout, Eviction(), torch.tensor([1, 3]), 0)
    assert same(state, before)
