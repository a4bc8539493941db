"""Samplers with a planner: the same global batches, assigned to ranks by cost, and resumed on any number of ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given, settings
from numpy.typing import NDArray

from lightning_freescale.balance import CostModel, Planner, loads, lower_bound
from lightning_freescale.balance.partition import Mode
from lightning_freescale.balance.sampler import GlobalBatchSampler
from lightning_freescale.runtime.errors import ConfigurationError, FreeScaleError
from tests.balance.batches import LengthDataset
from tests.ranks import run_ranks

MODES: tuple[Mode, ...] = ("fixed", "zigzag", "variable")


def samplers(data: LengthDataset, batch_size: int, world: int, mode: Mode | None, **options: object) -> list:
    planner = None if mode is None else Planner(mode)
    return [
        GlobalBatchSampler(data, batch_size, num_replicas=world, rank=rank, planner=planner, **options)  # type: ignore[arg-type]
        for rank in range(world)
    ]


def steps(ranks: list[GlobalBatchSampler]) -> list[list[list[int]]]:
    """Return for each step the local batches of all ranks."""
    return [list(step) for step in zip(*ranks, strict=True)]


def flat(step: list[list[int]]) -> list[int]:
    return [index for batch in step for index in batch]


shapes = {"samples": st.integers(1, 80), "batch_size": st.integers(1, 9), "world": st.integers(1, 5)}


@settings(max_examples=100, deadline=None)
@given(**shapes, mode=st.sampled_from(MODES), epoch=st.integers(0, 2), drop_last=st.booleans())
def test_balancing_does_not_change_the_global_batches(
    samples: int, batch_size: int, world: int, mode: Mode, epoch: int, drop_last: bool
) -> None:
    assume(samples >= (batch_size * world if drop_last else world))
    data = LengthDataset(samples)
    plain, balanced = (samplers(data, batch_size, world, kind, drop_last=drop_last) for kind in (None, mode))
    for sampler in plain + balanced:
        sampler.set_epoch(epoch)
    for before, after in zip(steps(plain), steps(balanced), strict=True):
        assert sorted(flat(before)) == sorted(flat(after))
        assert all(after)
        if mode != "variable":
            counts = [len(batch) for batch in after]
            assert max(counts) - min(counts) <= 1
    seen = flat([batch for step in steps(balanced) for batch in step])
    assert drop_last or set(seen) == set(range(samples))


@pytest.mark.parametrize("mode", MODES)
def test_the_heaviest_rank_is_near_the_bound_of_the_mode(mode: Mode) -> None:
    data = LengthDataset(4 * 32 * 10)
    costs = Planner().cost_model(data.lengths)

    def above_bound(kind: Mode | None) -> float:
        """Return how far the heaviest rank is above the lower bound, as a mean over the steps."""
        return np.mean([
            max(costs[batch].sum() for batch in step) / lower_bound(costs[flat(step)], 4, kind or mode) - 1
            for step in steps(samplers(data, 32, 4, kind))
        ])  # fmt: skip

    assert above_bound(None) > 0.3
    assert above_bound(mode) < {"fixed": 1e-4, "variable": 1e-4, "zigzag": 0.25}[mode]


def test_a_new_planner_is_used_from_the_step_at_which_it_is_set() -> None:
    data = LengthDataset(4 * 8 * 6)
    by_length, by_square = Planner("fixed", CostModel(1.0)), Planner("fixed", CostModel(0.0, 1.0))

    def run(switch: int) -> list[list[list[int]]]:
        ranks = samplers(data, 8, 4, "fixed")
        iterators = [iter(sampler) for sampler in ranks]
        taken = []
        for number in range(6):
            for sampler in ranks:
                sampler.planner = by_length if number < switch else by_square
            taken.append([next(iterator) for iterator in iterators])
        return taken

    assert run(3) == run(6)[:3] + run(0)[3:]
    assert run(0) != run(6)


def test_ranks_that_plan_ahead_differently_switch_planners_at_the_same_batch() -> None:
    data = LengthDataset(4 * 8 * 9)
    planners = [Planner("fixed", CostModel(1.0)), Planner("fixed", CostModel(0.0, 1.0)), Planner("zigzag")]

    def run(switches: list[tuple[int, int, Planner]]) -> list[list[list[int]]]:
        """Each switch: the batch in training when the rank gets the planner, the first batch to plan with it, the planner."""
        ranks = samplers(data, 8, 4, "fixed")
        iterators = [iter(sampler) for sampler in ranks]
        taken: list[list[list[int]]] = [[] for _ in ranks]
        for number in range(9):
            for rank, iterator in enumerate(iterators):  # rank r plans r + 1 batches ahead
                taken[rank] += list(islice(iterator, rank + 1 if number == 0 else 1))
            for heard, first, planner in switches:
                if heard == number:
                    for sampler in ranks:
                        sampler.use(planner, first)
        return [list(step) for step in zip(*taken, strict=True)]

    whole = [run([(0, 4, planner)])[4:] for planner in planners]
    # The ranks get the second planner before all of them use the first one.
    mixed = run([(0, 4, planners[0]), (1, 6, planners[1]), (2, 8, planners[2])])
    assert mixed[4:6] == whole[0][:2]
    assert mixed[6:8] == whole[1][2:4]
    assert mixed[8:] == whole[2][4:]
    assert len({str(steps) for steps in whole}) == 3
    with pytest.raises(
        FreeScaleError, match=r"rank 3: a new planner cannot start at batch 3 of epoch 0, because batch 3 is"
    ):
        run([(0, 3, planners[0])])


def test_a_planner_that_comes_too_late_for_this_epoch_is_used_in_the_next() -> None:
    data = LengthDataset(4 * 8 * 3)
    ranks, straight = samplers(data, 8, 4, "fixed"), samplers(data, 8, 4, "zigzag")
    before = steps(ranks)
    for sampler in ranks:
        sampler.use(Planner("zigzag"), math.inf)
    assert steps(ranks) == steps(straight) != before


def test_candidates_are_part_of_the_cost() -> None:
    data = LengthDataset(64)
    few = steps(samplers(data, 16, 4, "fixed"))
    data.candidates = data.lengths[::-1] * 50  # type: ignore[attr-defined]
    model = CostModel(1.0, candidate=1.0)
    ranks = samplers(data, 16, 4, "fixed")
    for sampler in ranks:
        sampler.planner = replace(sampler.planner, cost_model=model)
    (step,) = steps(ranks)
    assert [step] != few
    rank_of = {index: rank for rank, batch in enumerate(step) for index in batch}
    costs = model(data.lengths, data.candidates)  # type: ignore[attr-defined]
    load = loads(costs, [rank_of[index] for index in range(64)], 4)
    assert load.max() / load.mean() < 1.02


# ---- resume ----


@settings(max_examples=100, deadline=None)
@given(
    samples=st.integers(8, 120),
    before=st.tuples(st.integers(1, 6), st.integers(1, 5)),
    after=st.tuples(st.integers(1, 6), st.integers(1, 5)),
    mode=st.sampled_from((None, *MODES)),
    data=st.data(),
)
def test_another_world_size_continues_without_repeating_or_losing_a_sample(
    samples: int, before: tuple[int, int], after: tuple[int, int], mode: Mode | None, data: st.DataObject
) -> None:
    dataset = LengthDataset(samples)
    first = samplers(dataset, *before, mode, seed=3)
    stop = data.draw(st.integers(0, samples // (before[0] * before[1])))
    seen = [index for step in steps(first)[:stop] for index in flat(step)]
    position = first[0].position(stop)
    assert position == len(seen)
    second = samplers(dataset, *after, mode, seed=3)
    done = {sampler.resume(stop, position) for sampler in second}
    rest = steps(second)
    assert done == {len(second[0]) - len(rest)}
    then = [index for step in rest for index in flat(step)]
    tail = (samples - position) % (after[0] * after[1])
    repeated = after[1] - tail if 0 < tail < after[1] else 0  # the last global batch has fewer samples than ranks
    assert set(seen) | set(then) == set(range(samples))
    assert len(seen) + len(then) == samples + repeated
    # Resume a third time, with the first shape again: positions add up over several resumes.
    at = data.draw(st.integers(0, len(rest)))
    if (position := second[0].position(len(second[0]) - len(rest) + at)) <= samples:
        third = samplers(dataset, *before, mode, seed=3)
        for sampler in third:
            sampler.resume(0, position)
        taken = [index for step in rest[:at] for index in flat(step)]
        last = [index for step in steps(third) for index in flat(step)]
        assert set(seen) | set(taken) | set(last) == set(range(samples))


def test_resume_without_a_position_yields_the_remaining_batches_once() -> None:
    for sampler in samplers(LengthDataset(100), 5, 3, "fixed"):
        sampler.set_epoch(2)
        whole = list(sampler)
        assert sampler.resume(3) == 3
        assert list(sampler) == whole[3:]
        assert sampler.position(5) == 5 * 15
        assert list(sampler) == whole


# ---- real ranks and settings ----


def _batches(rank: int, world: int) -> list[list[int]]:
    return list(samplers(LengthDataset(200), 8, world, "variable")[rank])


def test_real_ranks_agree_without_communication() -> None:
    by_rank = run_ranks(_batches, world=3, args=(3,))
    assert sorted(index for own in by_rank for batch in own for index in batch) == list(range(200))


@pytest.mark.parametrize(("lengths", "what"), [(None, "missing"), (np.ones(3), r"shape \(3,\)")])
def test_a_dataset_without_lengths_is_refused(lengths: NDArray | None, what: str) -> None:
    data = LengthDataset(10)
    data.lengths = lengths
    data.__class__ = type("Ten", (LengthDataset,), {"__len__": lambda self: 10})
    with pytest.raises(
        ConfigurationError, match=f"dataset.lengths: {what}; balancing by cost needs one number for each"
    ):
        samplers(data, 2, 2, "fixed")
