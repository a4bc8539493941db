"""The estimate of collisions against their exact number."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torchrec import KeyedJaggedTensor

from lightning_freescale.bubbles.collision_estimate import CollisionEstimate, _mix
from lightning_freescale.bubbles.timeline import Timeline

# Features a and b share the first table. Feature c uses the second table.
TABLES = [SimpleNamespace(feature_names=["a", "b"]), SimpleNamespace(feature_names=["c"])]
LOOKUP = SimpleNamespace(grouped_configs=[SimpleNamespace(embedding_tables=TABLES)])
TABLE_OF = {"a": 0, "b": 0, "c": 1}


def batch(samples: int, rows: int, seed: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 9, (3 * samples,), generator=generator)
    values = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(["a", "b", "c"], values, lengths=lengths)


def rows_of(features: KeyedJaggedTensor) -> torch.Tensor:
    """A number for the table and row of each id."""
    return torch.cat([features[key].values() + (TABLE_OF[key] << 40) for key in features.keys()])  # noqa: SIM118


def exact(first: KeyedJaggedTensor, second: KeyedJaggedTensor) -> tuple[int, int]:
    """The number of ids of ``second`` whose row is in ``first``, and the number of its ids."""
    requested = rows_of(second)
    return int(torch.isin(requested, rows_of(first)).sum()), len(requested)


def estimate(*batches: KeyedJaggedTensor, skip: int | None = None) -> dict[str, float]:
    collisions, timeline = CollisionEstimate(), Timeline()
    for index, features in enumerate(batches):
        timeline.begin_step(index)
        collisions.follow(count=True, remember=index != skip)
        if collisions.watching:
            collisions.see("lookup", LOOKUP, features, timeline)
        timeline.end_step()
    return timeline.take()[-1].counts


def test_a_small_batch_is_counted_exactly() -> None:
    first, second = batch(60, 400, 1), batch(60, 400, 2)
    found = estimate(first, second)
    assert (found["collisions"], found["rows"]) == exact(first, second)
    assert 0 < found["collisions"] < found["rows"]


def test_a_large_batch_is_sampled() -> None:
    first, second = batch(20_000, 500_000, 1), batch(20_000, 500_000, 2)
    collisions, rows = exact(first, second)
    found = estimate(first, second)
    assert found["rows"] == pytest.approx(rows, rel=0.05)
    assert found["collisions"] / found["rows"] == pytest.approx(collisions / rows, abs=0.03)


def test_equal_ids_of_different_tables_do_not_collide() -> None:
    lengths = torch.tensor([1, 0, 0])
    only_a = KeyedJaggedTensor(["a", "b", "c"], torch.tensor([7]), lengths=lengths)
    only_b = KeyedJaggedTensor(["a", "b", "c"], torch.tensor([7]), lengths=lengths.roll(1))
    only_c = KeyedJaggedTensor(["a", "b", "c"], torch.tensor([7]), lengths=lengths.roll(2))
    assert estimate(only_a, only_b)["collisions"] == 1
    assert estimate(only_a, only_c)["collisions"] == 0


def test_only_consecutive_batches_are_compared() -> None:
    features = batch(5, 50, 1)
    assert "rows" not in estimate(features)
    assert "rows" not in estimate(features, features, features, skip=1)
    assert estimate(features, features)["collisions"] == estimate(features, features)["rows"] > 0


def test_the_hash_is_uniform_and_has_no_collisions() -> None:
    mixed = _mix(torch.cat([torch.arange(100_000), torch.arange(100_000) + (1 << 48)]))
    assert mixed.unique().numel() == 200_000
    assert (mixed >= 0).all()
    counts = torch.bincount(mixed % 97, minlength=97)
    assert counts.max() < 1.1 * counts.float().mean()
