"""Samplers without a planner: every sample once, the same global batches on all ranks, resumable."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from torch.utils.data import DistributedSampler, SequentialSampler

from lightning_freescale.balance.sampler import GlobalBatchSampler, SequentialBatchSampler
from lightning_freescale.runtime.errors import ConfigurationError, InputError


def samplers(samples: int, batch_size: int, world: int, **options: object) -> list[GlobalBatchSampler]:
    return [
        GlobalBatchSampler(range(samples), batch_size, num_replicas=world, rank=rank, **options)  # type: ignore[arg-type]
        for rank in range(world)
    ]


shapes = {"samples": st.integers(1, 60), "batch_size": st.integers(1, 9), "world": st.integers(1, 5)}


@settings(max_examples=100, deadline=None)
@given(**shapes, epoch=st.integers(0, 3), shuffle=st.booleans())
def test_every_index_comes_once(samples: int, batch_size: int, world: int, epoch: int, shuffle: bool) -> None:
    if samples < world:
        return
    ranks = samplers(samples, batch_size, world, shuffle=shuffle)
    for sampler in ranks:
        sampler.set_epoch(epoch)
    batches = [list(sampler) for sampler in ranks]
    assert {len(own) for own in batches} == {len(ranks[0])}
    indices = [index for own in batches for batch in own for index in batch]
    tail = samples % (batch_size * world)
    repeated = world - tail if 0 < tail < world else 0
    assert sorted(set(indices)) == list(range(samples))
    assert len(indices) == samples + repeated
    for step in zip(*batches, strict=True):
        sizes = [len(batch) for batch in step]
        assert min(sizes) >= 1
        assert max(sizes) <= batch_size
        assert max(sizes) - min(sizes) <= 1
        assert len({index for batch in step for index in batch}) == sum(sizes)  # no repeat within a global batch


@settings(max_examples=50, deadline=None)
@given(**shapes)
def test_drop_last(samples: int, batch_size: int, world: int) -> None:
    if samples < batch_size * world:
        with pytest.raises(InputError):
            samplers(samples, batch_size, world, drop_last=True)
        return
    batches = [list(sampler) for sampler in samplers(samples, batch_size, world, drop_last=True)]
    assert {len(batch) for own in batches for batch in own} == {batch_size}
    indices = [index for own in batches for batch in own for index in batch]
    assert len(indices) == len(set(indices)) == samples // (batch_size * world) * batch_size * world


def test_global_batches_do_not_depend_on_the_number_of_ranks() -> None:
    def global_batches(world: int) -> list[set[int]]:
        steps = zip(*samplers(48, 12 // world, world), strict=True)
        return [{index for batch in step for index in batch} for step in steps]

    assert global_batches(1) == global_batches(2) == global_batches(4)


def test_batches_depend_only_on_seed_and_epoch() -> None:
    def batches(seed: int, epoch: int) -> list[list[int]]:
        (sampler,) = samplers(50, 8, 1, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert batches(1, 2) == batches(1, 2)
    different = [batches(seed, epoch) for seed, epoch in itertools.product((1, 2), (0, 1, 2))]
    assert all(a != b for a, b in itertools.combinations(different, 2))


@pytest.mark.parametrize("skip", [0, 1, 4, 7])
def test_resume_yields_the_remaining_batches_once(skip: int) -> None:
    for sampler in samplers(100, 5, 3):
        sampler.set_epoch(2)
        whole = list(sampler)
        sampler.resume(skip)
        assert list(sampler) == whole[skip:]
        assert list(sampler) == whole


def test_an_epoch_that_is_set_after_iter_is_used() -> None:
    (sampler,) = samplers(50, 8, 1)
    late = iter(sampler)
    sampler.set_epoch(3)
    assert [batch.epoch for batch in late] == [3] * len(sampler)


def test_the_types_for_which_lightning_keeps_a_sampler() -> None:
    assert isinstance(samplers(4, 1, 1)[0], DistributedSampler)
    sequential = SequentialBatchSampler(range(7), 2, num_replicas=2, rank=1)
    assert isinstance(sequential, SequentialSampler)
    assert isinstance(sequential, DistributedSampler)
    assert list(sequential) == [[1, 3], [5]]
    assert len(sequential) == 2


def test_too_few_samples() -> None:
    with pytest.raises(InputError, match="3 samples for 4 ranks, but every rank needs at least one"):
        samplers(3, 1, 4)
    with pytest.raises(InputError, match="7 samples do not fill one global batch of 2 x 4 ranks"):
        samplers(7, 2, 4, drop_last=True)
    with pytest.raises(ConfigurationError, match="batch_size: must be at least 1, not 0"):
        samplers(3, 0, 1)
