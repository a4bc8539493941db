"""The benchmarks of zero-collision ids: what they count, and that the variants of a table get what they should."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from benchmarks import drifting_catalogue, zero_collision
from benchmarks.drifting_catalogue import MODULO, UNLIMITED, ZERO_COLLISION, Evaluated, play, summarize
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


def _short_run(rank: int) -> tuple[float, float]:
    return drifting_catalogue.hit_rates(ZERO_COLLISION, play(6, seed=0), seed=0)


def test_a_short_run_evaluates_every_step() -> None:
    everything, young = run_ranks(_short_run, world=1)[0]
    assert 0 <= young <= 100
    assert 0 <= everything <= 100
    row = summarize({"a": [(10.0, 1.0), (20.0, 3.0)]})[0]
    assert (row["HR@10 %"], row["noise"]) == (15.0, 5.0)
