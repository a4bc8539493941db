"""Zero-collision tables train alike in three ways, bit for bit: plain TorchRec fed by the reference, synchronous, prioritized.

After every step, losses, weights, optimizer state, identities and ages are compared, while ids are inserted and evicted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lightning_freescale as fs
from tests.embedding.zero_collision.sabotage import (
    collide_by_id,
    never_undo,
    reset_when_ids_are_inserted,
    write_all_fresh_rows_early,
)
from tests.embedding.zero_collision.training import STEPS, Trained, compare_modes, drifting_batches, to_kjt
from tests.ranks import run_ranks


def compare(rank: int, world: int, cases: list[dict[str, Any]]) -> list[tuple[bool, bool]]:
    """For each case: whether all losses agree with the first mode's, and whether all states do."""
    dist.init_process_group("gloo")
    return [compare_modes(rank, world, **case) for case in cases]


@pytest.mark.parametrize("world", [1, 4])
def test_all_modes_are_equal(world: int) -> None:
    """With 4 ranks the 6 and 5 buckets are spread unevenly."""
    cases = [
        {"optimizer": "sgd", "look_at": "every step", "seed": 0},
        {"optimizer": "adam", "look_at": "some steps", "seed": 1},
        {"optimizer": "rowwise_adagrad", "look_at": "the end", "seed": 2},
    ]
    for result in run_ranks(compare, world, args=(world, cases), timeout=110):
        assert result == [(True, True)] * len(cases)


def test_uneven_batches_an_empty_rank_and_steps_without_ids() -> None:
    shapes = [
        lambda rank, step: 0 if (rank + step) % 3 == 0 else 2 + 3 * rank,
        lambda rank, step: 0 if rank == 1 or step in (0, 3, 7) else 5,
    ]
    cases = [
        {"optimizer": "rowwise_adagrad", "samples": shape, "seed": 10 + i, "look_at": "some steps"}
        for i, shape in enumerate(shapes)
    ]
    for result in run_ranks(compare, 3, args=(3, cases)):
        assert result == [(True, True)] * len(cases)


def test_validation_between_steps() -> None:
    cases = [
        {"optimizer": "adagrad", "modes": ("synchronous", "prioritized"), "validate": True, "look_at": look_at}
        for look_at in ("every step", "some steps")
    ]
    for result in run_ranks(compare, 2, args=(2, cases)):
        assert result == [(True, True)] * len(cases)


def test_unusual_steps() -> None:
    """Look-ups inside a step, steps without a backward or a forward, replaced batches, and changes of the exchange."""
    disturbances = ("look-ups", "no backward", "no forward", "wrong prefetch", "switches")
    cases = [
        {"optimizer": "adagrad", "modes": ("synchronous", "prioritized"), "disturbance": name, "look_at": look_at}
        for name in disturbances
        for look_at in ("some steps", "the end")
    ]
    for result in run_ranks(compare, 2, args=(2, cases)):
        assert dict(zip(disturbances, zip(result[::2], result[1::2], strict=True), strict=True)) == dict.fromkeys(
            disturbances, ((True, True), (True, True))
        )


def test_dedup_in_both_exchanges() -> None:
    cases = [
        {"optimizer": "adagrad", "modes": ("synchronous", "prioritized"), "dedup": dedup, "look_at": "some steps"}
        for dedup in (True, "auto")
    ]
    for result in run_ranks(compare, 2, args=(2, cases)):
        assert result == [(True, True)] * len(cases)


def test_dedup_changes_no_slot() -> None:
    """Ids and ages are equal; the rows differ in rounding, because a rank adds its own gradients of a row first."""
    for plain, distinct in run_ranks(train_with_and_without_dedup, 2):
        assert plain.keys() == distinct.keys()
        for key, value in plain.items():
            if "_hash_zch" in key:
                assert torch.equal(value, distinct[key]), key
            else:
                torch.testing.assert_close(value, distinct[key], rtol=1e-4, atol=1e-5)


def train_with_and_without_dedup(rank: int) -> list[dict[str, Any]]:
    dist.init_process_group("gloo")
    batches = [drifting_batches(peer, STEPS, 4, lambda rank, step: 6) for peer in range(2)]
    kjts = [to_kjt(batch) for batch in batches[rank]]
    states = []
    for dedup in (False, True):
        trained = Trained("synchronous", "sgd", 2, dedup=dedup)
        for step in range(STEPS):
            trained.train_step(rank, batches, step, kjts)
        states.append(trained.state())
    return states


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_tables(data: st.DataObject) -> None:
    """Any options of the tables: the two exchanges agree with the reference."""
    world = data.draw(st.integers(1, 3))
    cases = []
    for _ in range(3):  # starting processes is slow: run several cases in each set of processes
        options = {}
        for table, rows in (("item", 60), ("shop", 40)):
            buckets = data.draw(st.sampled_from([number for number in (3, 4, 5, 6, 10) if rows % number == 0]))
            policy = data.draw(st.sampled_from([None, "ttl", "lru"]))
            options[table] = fs.ZeroCollision(
                buckets=buckets,
                max_probe=data.draw(st.integers(1, 12)),
                evict=policy,
                ttl=data.draw(st.integers(1, 4)) if policy else None,
                insert=["clicks"] if table == "item" else None,
                reserved=data.draw(st.integers(1, rows // buckets - 1)),
            )
        seed = data.draw(st.integers(0, 1000))
        cases.append({"optimizer": "rowwise_adagrad", "options": options, "seed": seed, "look_at": "some steps"})
        cases[-1]["any_counts"] = True
    for result in run_ranks(compare, world, args=(world, cases)):
        assert result == [(True, True)] * len(cases)


# ---- negative controls: the comparison detects each error ------------------------------------------------------------
@pytest.mark.parametrize(
    ("sabotage", "losses_equal"),
    [
        (reset_when_ids_are_inserted, False),
        (write_all_fresh_rows_early, False),
        (collide_by_id, False),
        (never_undo, True),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_comparison_can_fail(sabotage: Any, losses_equal: bool) -> None:
    case = {"optimizer": "adagrad", "modes": ("synchronous", "prioritized"), "sabotage": sabotage, "seed": 3}
    results = run_ranks(compare, 2, args=(2, [case]))
    assert [result[0][1] for result in results] == [False, False]  # the states differ
    assert all(result[0][0] for result in results) == losses_equal
