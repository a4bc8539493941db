"""The workload of the exchange benchmark: collision rate, lengths, repeatability, even load of the owners."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness.workload import EqualCostWorkload, collision_rate

SMALL = EqualCostWorkload(histories=64, log_mean=3.6, log_std=0.8, longest=400, rows=60_000, dim=128)
LARGE = EqualCostWorkload(histories=128, log_mean=5.8, log_std=1.2, longest=8192, rows=8_000_000, dim=128)


def global_batch(workload: EqualCostWorkload, step: int, ranks: int, rate: float) -> list[torch.Tensor]:
    return [workload.ids(rank, step, ranks, rate) for rank in range(ranks)]


@pytest.mark.parametrize("workload", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("rate", [0.0, 0.06, 0.12, 0.25, 0.4, 0.6])
def test_the_collision_rate_is_as_requested(workload: EqualCostWorkload, rate: float) -> None:
    for ranks in (2, 4):
        batches = [global_batch(workload, step, ranks, rate) for step in range(3)]
        for first, second in ((0, 1), (1, 2), (1, 0)):  # rows: with the previous batch; gradients: with the next
            assert abs(collision_rate(batches[first], batches[second]) - rate) < 0.01


def test_collision_rate_of_known_batches() -> None:
    first, second = [torch.tensor([1, 2]), torch.tensor([3])], [torch.tensor([3, 3, 4]), torch.tensor([1])]
    assert collision_rate(first, second) == 0.75
    assert collision_rate(second, first) == pytest.approx(2 / 3)
    assert collision_rate(first, [torch.tensor([7, 8])]) == 0.0


def test_lengths_vary_widely_and_are_the_same_on_all_ranks_and_steps() -> None:
    drawn = LARGE.lengths(0, 0)
    assert drawn.shape == (128,)
    assert 1 <= drawn.min() < drawn.max() <= 8192
    assert drawn.max() > 5 * drawn.median()
    for rank, step in ((0, 1), (3, 0), (2, 7)):
        other = LARGE.lengths(rank, step)
        assert not torch.equal(other, drawn)
        assert torch.equal(other.sort().values, drawn.sort().values)


def test_ids_are_repeatable_and_differ_by_rank_step_and_seed() -> None:
    ids = SMALL.ids(1, 4, 2, 0.12)
    assert torch.equal(ids, SMALL.ids(1, 4, 2, 0.12))
    reseeded = EqualCostWorkload(64, 3.6, 0.8, 400, 60_000, 128, seed=1)
    for other in (SMALL.ids(0, 4, 2, 0.12), SMALL.ids(1, 6, 2, 0.12), reseeded.ids(1, 4, 2, 0.12)):
        assert not torch.equal(ids[: len(other)], other[: len(ids)])


@pytest.mark.parametrize("rate", [0.0, 0.12, 0.6])
def test_all_owners_serve_the_same_number_of_ids(rate: float) -> None:
    ranks = 4
    owner = torch.cat(global_batch(LARGE, 0, ranks, rate)) // (LARGE.rows // ranks)
    asked = torch.bincount(owner, minlength=ranks).float()
    assert asked.numel() == ranks
    assert (asked / asked.mean() - 1).abs().max() < 0.02


def test_batch_holds_ids_and_lengths() -> None:
    batch = SMALL.batch(0, 0, 2, 0.12)
    assert torch.equal(batch.features.values(), SMALL.ids(0, 0, 2, 0.12))
    assert torch.equal(batch.features.lengths().long(), SMALL.lengths(0, 0))
    assert int(batch.features.lengths().sum()) == SMALL.ids_per_rank == SMALL.row_bytes // (128 * 4)


def test_a_table_too_small_for_the_hot_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="rows=30: too few"):
        EqualCostWorkload(64, 3.6, 0.8, 400, rows=30, dim=8).ids(0, 0, 4, 0.6)
