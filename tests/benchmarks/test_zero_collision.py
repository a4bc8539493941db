"""The benchmarks of zero-collision ids: what they count, and that the variants of a table get what they should."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import drifting_catalogue, zero_collision, zero_collision_step
from benchmarks.drifting_catalogue import MODULO, UNLIMITED, ZERO_COLLISION, Evaluated, play, summarize
from benchmarks.harness.time_order import most_live_items, play_sessions, read_sessions
from benchmarks.harness.workload import EqualCostWorkload
from tests.ranks import run_ranks


def test_collisions_by_load() -> None:
    assert zero_collision.collisions(torch.tensor([1, 2, 2, 3])) == 25.0
    found = {row["load"]: row for row in zero_collision.loads(1 << 14)}
    for load, row in found.items():
        expected = 100 * (
            1 - (1 - math.exp(-float(load))) / float(load)
        )  # rows that no id hits are Poisson distributed
        assert abs(float(row["id % rows"]) - expected) < 1.5
    assert found[0.75]["buckets of 1,024"] == 0
    assert float(found[0.95]["buckets of 128"]) > 0


def test_the_catalogue_drifts() -> None:
    steps = play(6, seed=1)
    for before, after in pairwise(steps):
        assert int((before.shelf != after.shelf).sum()) == drifting_catalogue.NEW_ITEMS
        assert torch.equal(after.age == 0, before.shelf != after.shelf)
    ids = steps[3].batch.features.values()
    assert torch.isin(ids, steps[3].shelf).all()


def test_what_the_tables_get() -> None:
    steps = play(3, seed=1)
    ids = steps[2].shelf
    unlimited, zero, modulo = (Evaluated(variant, steps, 0) for variant in (UNLIMITED, ZERO_COLLISION, MODULO))
    assert len(unlimited.rows_of(ids).unique()) == len(ids)
    assert torch.equal(zero.rows_of(ids), ids)
    assert torch.equal(modulo.rows_of(ids), ids % drifting_catalogue.ROWS)
    assert unlimited.num_items > len(ids)


EVENTS = """user,item,time
ann,5,10
bob,7,11
ann,6,12
bob,5,13
ann,9,14
eve,8,15
ann,5,16
"""


def test_a_file_in_time_order(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    path.write_text(EVENTS)
    sessions = read_sessions(path, events=3)
    assert [session.tolist() for session in sessions] == [[7, 5], [5, 6, 9]]  # one event is no session
    assert most_live_items(sessions, window=1) == 3
    (step,) = play_sessions(sessions, batch=1, drawn=4, window=1, seed=0)
    history = step.batch.features["history"].values()
    assert history.tolist() == [5, 6, 9]
    assert set(step.batch.features["negatives"].values().tolist()) <= {5, 7}  # of the sessions before
    assert step.shelf.tolist() == [5, 7]
    assert not len(step.positions)  # the items 6 and 9 are new: nothing can predict them
    assert step.age.tolist() == [1, 1]


def test_targets_of_a_file_are_items_that_came_before() -> None:
    sessions = [np.array([1, 2]), np.array([3, 1, 2, 4]), np.array([4, 3])]
    first, second = play_sessions(sessions, batch=1, drawn=2, window=2, seed=0)
    assert first.positions.tolist() == [0, 1]  # after 3 comes 1, after 1 comes 2; 4 is new
    assert first.shelf[first.targets].tolist() == [1, 2]
    assert second.shelf[second.targets].tolist() == [3]
    assert second.age.tolist() == [2, 2, 1, 1]


def test_raw_ids_of_the_step_benchmark() -> None:
    numbers = torch.arange(100_000)
    ids = zero_collision_step.raw_ids(numbers)
    assert len(ids.unique()) == len(numbers)
    assert int(ids.min()) >= 0
    assert int(ids.max()) > 2**62
    rows = 1 << 16
    assert len(zero_collision_step.live_numbers(rows)) == pytest.approx(0.75 * rows, abs=2)
    batch = EqualCostWorkload(8, 3.0, 0.5, 40, rows, 8).batch(0, 3, 2, 0.1)
    raw = zero_collision_step.with_raw_ids(batch, 0, 3, rows).features.values()
    new = ~torch.isin(raw, zero_collision_step.raw_ids(torch.arange(rows)))
    assert int(new.sum()) == round(0.01 * len(raw))


def test_ratios_are_taken_within_a_round() -> None:
    dense, raw = zero_collision_step.DENSE, "raw ids"
    rounds = [{dense: 10.0, raw: 11.0}, {dense: 20.0, raw: 20.0}]
    row = zero_collision_step.summarize(rounds, {raw: {"insert ms": 1.0, "look-up ms": 0.5}})[1]
    assert row["step / dense"] == pytest.approx(1.05)
    assert (row["lowest"], row["highest"], row["step ms"]) == (1.0, 1.1, 15.5)


def _short_run(rank: int) -> tuple[float, float]:
    return drifting_catalogue.hit_rates(ZERO_COLLISION, play(6, seed=0), seed=0)


def test_a_short_run_evaluates_every_step() -> None:
    everything, young = run_ranks(_short_run, world=1)[0]
    assert 0 <= young <= 100
    assert 0 <= everything <= 100
    row = summarize({"a": [(10.0, 1.0), (20.0, 3.0)]})[0]
    assert (row["HR@10 %"], row["noise"]) == (15.0, 5.0)
