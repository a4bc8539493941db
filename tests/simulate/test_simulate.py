"""Simulated steps of TorchRec and FreeScale: known cases with two ranks, then properties that always hold."""

from __future__ import annotations

import doctest
from dataclasses import replace

import numpy as np
import pytest

from lightning_freescale import simulate as package
from lightning_freescale.balance import CostModel
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.simulate import (
    FREESCALE,
    SPARSE_DIST,
    TORCHREC,
    VARIANTS,
    Cluster,
    ModelProfile,
    SimulationResult,
    TrainingVariant,
    simulate,
)
from lightning_freescale.simulate.events import SimulatedRanks
from lightning_freescale.simulate.loads import RankLoads, make_loads
from lightning_freescale.simulate.schedules import StepOperations, prioritized, synchronous

PRIORITIZED = TrainingVariant("prioritized", "prioritized")
MODEL = ModelProfile(CostModel(linear=1e-6, quadratic=5e-10), row_bytes=2048)
CLUSTER = Cluster(ranks=8, bandwidth=2e9, latency=1e-5)


def histories(ranks: int, steps: int = 8, seed: int = 0) -> list[np.ndarray]:
    drawn = np.random.default_rng(seed).lognormal(7.3, 1.2, (steps, ranks * 32))
    return list(np.minimum(drawn, 21_000).astype(np.int64))


# ---- known cases ------------------------------------------------------------------------------------------------------
def last_step(
    variant: TrainingVariant, cluster: Cluster, model: ModelProfile, compute: float, steps: int = 6
) -> tuple[float, dict]:
    """Seconds and parts of the second to last step. A rank has four rows, one of them a collision. A row takes a second."""
    shape = (steps, cluster.ranks)
    loads = RankLoads(
        np.full(shape, compute), np.full(shape, 4.0), np.full(shape, 1.0), np.full(shape, 3.0), samples=1.0
    )
    ranks = SimulatedRanks(cluster.ranks, cluster.latency)
    operations = StepOperations(ranks, cluster, model, variant, loads)
    if variant.schedule == "prioritized":
        run = prioritized(operations)
    else:
        run = synchronous(operations, prefetch_ids=variant.schedule == "sparse_dist")
    seen = [(ranks.now[0], {name: part[0] for name, part in ranks.parts.items()}) for _ in run]
    (start, before), (end, after) = seen[-3:-1]
    return end - start, {name: after[name] - before[name] for name in after}


TWO = Cluster(ranks=2, bandwidth=1.0)
ROWS = ModelProfile(CostModel(0.0), row_bytes=1.0, optimizer=0.5, id_bytes=0.0)


def test_torchrec_waits_for_rows_and_gradients() -> None:
    step, parts = last_step(TORCHREC, TWO, ROWS, compute=3.0)
    assert step == pytest.approx(4 + 3 + 4 + 0.5)
    assert parts == pytest.approx({"straggler": 0, "exposed_embedding": 8, "exposed_dense": 0, "contention": 0})


def test_ids_are_exposed_without_sparse_dist() -> None:
    ids = replace(ROWS, id_bytes=0.25)  # an id takes a quarter of the time of a row
    assert last_step(TORCHREC, TWO, ids, compute=3.0)[0] == pytest.approx(12.5)
    assert last_step(SPARSE_DIST, TWO, ids, compute=3.0)[0] == pytest.approx(11.5)


def test_every_exchange_has_its_latency() -> None:
    late = replace(TWO, latency=0.125)
    assert last_step(TORCHREC, late, ROWS, compute=3.0)[0] == pytest.approx(11.5 + 3 * 0.125)
    assert last_step(SPARSE_DIST, late, ROWS, compute=3.0)[0] == pytest.approx(11.5 + 2 * 0.125)


def test_prioritized_waits_for_collisions_alone() -> None:
    """Backward ends at 9, the collision gradients at 10, the collision rows at 11. The optimizer runs from 9 to 9.5."""
    step, parts = last_step(PRIORITIZED, TWO, ROWS, compute=9.0)
    assert step == pytest.approx(11)
    assert parts["exposed_embedding"] == pytest.approx(1.5)


def test_a_long_optimizer_hides_collisions() -> None:
    long = replace(ROWS, optimizer=1.5)
    assert last_step(PRIORITIZED, TWO, long, compute=9.0)[0] == pytest.approx(11)
    # If the host waits for the gradients (until 10), only the rows overlap with the optimizer (1.5).
    assert last_step(PRIORITIZED, replace(TWO, host_waits=True), long, compute=9.0)[0] == pytest.approx(11.5)
    assert last_step(PRIORITIZED, TWO, replace(ROWS, optimizer=3.0), compute=9.0)[0] == pytest.approx(12)


def test_a_step_takes_at_least_as_long_as_its_transfers() -> None:
    """Rows and gradients take 8 seconds, compute takes 3.5 seconds."""
    assert last_step(PRIORITIZED, TWO, ROWS, compute=3.0)[0] == pytest.approx(8)


def test_the_allreduce_of_two_ranks() -> None:
    """An AllReduce of 2 bytes takes 2 seconds on each link. It comes after backward, before the gradients of the rows."""
    dense = replace(ROWS, dense_bytes=2.0)
    step, parts = last_step(TORCHREC, TWO, dense, compute=3.0)
    assert step == pytest.approx(11.5 + 2)
    assert parts["exposed_embedding"] + parts["exposed_dense"] == pytest.approx(10)


def test_ring_and_tree() -> None:
    assert replace(TWO, ranks=4).allreduce(8.0) == pytest.approx((2 * 3 / 4 * 8, 0))
    assert replace(TWO, ranks=1).allreduce(8.0) == (0, 0)
    seconds, latency = Cluster(ranks=1024, bandwidth=1e9, latency=1e-3).allreduce(
        1e3
    )  # a tree, because the latency dominates
    assert latency == pytest.approx(2 * 10 * 1e-3)
    assert seconds == pytest.approx(2e-6)


def test_an_exchange_that_uses_sms_slows_down_compute() -> None:
    """Exclusive rows and gradients travel during six of the nine seconds of forward and backward."""
    nccl = replace(TWO, nccl_slowdown=1.5)
    step, parts = last_step(PRIORITIZED, nccl, ROWS, compute=9.0)
    assert parts["contention"] == pytest.approx(6 - 6 / 1.5)
    assert step == pytest.approx(11 + 2)
    assert last_step(replace(PRIORITIZED, sm_free=True), nccl, ROWS, compute=9.0)[0] == pytest.approx(11)


def test_work_on_tables_is_in_series_in_torchrec_and_beside_compute_in_freescale() -> None:
    """A step takes 0.4 seconds, and 0.1 for each of its four rows: 0.8 in all. FreeScale's transfers overlap with it."""
    work = replace(ROWS, table_seconds=0.4, row_seconds=0.1)
    step, parts = last_step(TORCHREC, TWO, work, compute=9.0)
    assert step == pytest.approx(4 + 9 + 4 + 0.5 + 0.8)
    assert parts["exposed_embedding"] == pytest.approx(8.8)
    step, parts = last_step(PRIORITIZED, TWO, work, compute=9.0)
    assert step == pytest.approx(11 + 0.8)
    assert parts["contention"] == pytest.approx(0.8)
    # Transfers that take longer than compute hide the work: rows and gradients take 8 seconds.
    assert last_step(PRIORITIZED, TWO, work, compute=3.0)[0] == pytest.approx(8)


def test_collisions_are_updated_before_their_rows_are_sent() -> None:
    slow = replace(ROWS, collision_seconds=0.25)
    step, parts = last_step(PRIORITIZED, TWO, slow, compute=9.0)
    assert step == pytest.approx(11 + 0.25)
    assert parts["straggler"] == pytest.approx(0)
    assert last_step(TORCHREC, TWO, slow, compute=9.0)[0] == last_step(TORCHREC, TWO, ROWS, compute=9.0)[0]


def test_overhead_and_pooled_features() -> None:
    more = replace(
        ROWS, overhead=0.25, fixed_bytes=0.5
    )  # the bytes take half a second before forward and after backward
    assert last_step(TORCHREC, TWO, more, compute=9.0)[0] == pytest.approx(17.5 + 0.25 + 1)
    assert last_step(PRIORITIZED, TWO, more, compute=9.0)[0] == pytest.approx(11 + 1)  # overlaps with the overhead


def test_the_base_pipeline_alone_waits_for_the_exchange_of_ids() -> None:
    for ranks, seconds in ((CLUSTER.ranks, 0.25), (1, 0.0)):
        for variant, waits in ((TORCHREC, seconds), (SPARSE_DIST, 0.0), (FREESCALE, 0.0)):
            plain, slow = (
                simulate(
                    variant, replace(CLUSTER, ranks=ranks), replace(MODEL, id_seconds=latency), histories(ranks)
                ).step
                for latency in (0.0, 0.25)
            )
            assert slow - plain == pytest.approx(waits)


def test_ranks_that_share_a_medium_take_the_mean_of_their_bytes() -> None:
    batches = histories(8)
    alone, shared = (make_loads(batches, replace(CLUSTER, shared=shared), MODEL, "off") for shared in (False, True))
    assert (shared.rows == shared.rows[:, :1]).all()
    sent = sum(int(batch.sum()) for batch in batches) * 7 / 8
    assert shared.rows.sum() == pytest.approx(sent, rel=0.01)
    assert alone.rows.sum() > 1.05 * sent


def test_an_allreduce_has_its_own_rate_and_latency() -> None:
    cluster = replace(TWO, reduce_bandwidth=4.0, reduce_latency=0.125)
    assert cluster.allreduce(8.0) == pytest.approx((2, 0.125))
    dense = replace(ROWS, dense_bytes=2.0)
    assert last_step(TORCHREC, cluster, dense, compute=3.0)[0] == pytest.approx(11.5 + 0.5 + 0.125)
    # FreeScale exchanges collisions beside it. In two buckets, only the second one is waited for.
    two = replace(cluster, reduce_bandwidth=0.25, reduce_path=True)
    one_bucket, two_buckets = (
        last_step(PRIORITIZED, two, replace(dense, buckets=buckets), compute=20.0)[0] for buckets in (1, 2)
    )
    assert one_bucket == pytest.approx(20 + 8 + 0.125 + 0.5)
    assert two_buckets == pytest.approx(20 + 4 + 0.125 + 0.5)
    # Over the same links the collisions travel after it.
    same_links = last_step(PRIORITIZED, replace(two, reduce_path=False), replace(dense, buckets=1), compute=20.0)[0]
    assert same_links == pytest.approx(one_bucket + 1.5)


# ---- properties -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_the_parts_add_up(variant: TrainingVariant) -> None:
    cluster = replace(CLUSTER, nccl_slowdown=1.1)
    result = simulate(variant, cluster, replace(MODEL, dense_bytes=2e8, optimizer=1e-3, noise=0.05), histories(8))
    assert result.bubble == pytest.approx(result.step - result.compute)
    assert result.qps == pytest.approx(8 * 32 / result.step)
    assert min(result.parts.values()) >= 0


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_with_infinite_bandwidth_the_slowest_rank_sets_the_step_time(variant: TrainingVariant) -> None:
    cluster, batches = Cluster(ranks=8, bandwidth=np.inf), histories(8)
    slowest = make_loads(batches, cluster, MODEL, variant.balance).compute.max(axis=1)[2:-1]
    result = simulate(variant, cluster, MODEL, batches)
    assert result.step == pytest.approx(slowest.mean())
    assert result.exposed == pytest.approx(0)


def test_no_collisions_and_long_compute_expose_nothing() -> None:
    model = ModelProfile(CostModel(linear=1e-5), row_bytes=2048, collisions=0.0)
    assert simulate(PRIORITIZED, replace(CLUSTER, latency=0.0), model, histories(8)).exposed == pytest.approx(0)
    # The check can fail: TorchRec does expose communication here.
    assert simulate(TORCHREC, replace(CLUSTER, latency=0.0), model, histories(8)).exposed > 0.01


def test_collisions_expose_more() -> None:
    exposed = [
        simulate(FREESCALE, CLUSTER, replace(MODEL, collisions=rate), histories(8)).bubble
        for rate in np.linspace(0, 1, 6)
    ]
    assert all(np.diff(exposed) > 0)
    synchronous_ = simulate(TrainingVariant("", "sparse_dist", "fixed"), CLUSTER, MODEL, histories(8)).bubble
    assert exposed[-1] == pytest.approx(synchronous_, rel=0.02)  # if all rows collide, nothing can be hidden


@pytest.mark.parametrize("schedule", ["base", "sparse_dist", "prioritized"])
def test_balance_helps(schedule: str) -> None:
    def run(balance: str) -> SimulationResult:
        return simulate(TrainingVariant(balance, schedule, balance), CLUSTER, MODEL, histories(8))  # type: ignore[arg-type]

    off, zigzag, fixed, variable = map(run, ("off", "zigzag", "fixed", "variable"))
    assert fixed.step < zigzag.step < off.step
    assert fixed.parts["straggler"] < 0.1 * off.parts["straggler"]
    assert variable.compute == pytest.approx(off.compute)  # the same samples


def test_one_rank_has_no_bubble() -> None:
    for variant in VARIANTS:
        result = simulate(variant, replace(CLUSTER, ranks=1), replace(MODEL, dense_bytes=1e9), histories(1))
        assert result.bubble == pytest.approx(0)


def test_the_same_seed_gives_the_same_result() -> None:
    noisy = replace(MODEL, noise=0.1)
    assert simulate(FREESCALE, CLUSTER, noisy, histories(8)) == simulate(FREESCALE, CLUSTER, noisy, histories(8))
    assert simulate(FREESCALE, CLUSTER, noisy, histories(8), seed=1) != simulate(
        FREESCALE, CLUSTER, noisy, histories(8)
    )


def test_a_thousand_ranks() -> None:
    """The straggler wait grows with the number of ranks, unless samples are balanced."""
    few, many = (
        [
            simulate(variant, replace(CLUSTER, ranks=ranks), MODEL, histories(ranks, steps=5))
            for variant in (TORCHREC, FREESCALE)
        ]
        for ranks in (64, 1024)
    )
    assert many[0].parts["straggler"] > few[0].parts["straggler"]
    assert many[1].parts["straggler"] < 0.1 * many[0].parts["straggler"]
    assert many[1].qps > 10 * few[1].qps


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="bandwidth: 0 must be positive"):
        Cluster(ranks=8, bandwidth=0)
    with pytest.raises(ConfigurationError, match=r"collisions: 1\.2 must be a share"):
        replace(MODEL, collisions=1.2)
    with pytest.raises(ConfigurationError, match="reduce_bandwidth: 0 must be positive"):
        Cluster(ranks=8, bandwidth=1.0, reduce_bandwidth=0)
    with pytest.raises(ConfigurationError, match="buckets: 0 must be at least 1"):
        replace(MODEL, buckets=0)
    with pytest.raises(ConfigurationError, match="table_seconds: -1 must be finite and not negative"):
        replace(MODEL, table_seconds=-1)
    with pytest.raises(ConfigurationError, match="batches: 3 are too few"):
        simulate(TORCHREC, CLUSTER, MODEL, histories(8, steps=3))
    with pytest.raises(ConfigurationError, match="balance: 'best' is unknown"):
        simulate(TrainingVariant("", "base", "best"), CLUSTER, MODEL, histories(8))


def test_the_example() -> None:
    found = doctest.testmod(package)
    assert found.attempted
    assert not found.failed
