"""Synthetic histories have the requested lengths, popularity and rule."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_freescale.data import Histories, Synthetic
from lightning_freescale.data.histories import user_chunks
from lightning_freescale.runtime.errors import ConfigurationError
from tests.data.test_cache import equal


def hit_rates(options: Synthetic, histories: Histories, k: int = 10) -> tuple[float, float]:
    """Return HR@k on the held-out events, of a popularity recommender and of an oracle that knows the rule."""
    rule = options.rule()
    target, previous = (histories.items[histories.offsets[1:] - back] for back in (1, 2))
    popular = np.argsort(-histories.item_counts)[:k]
    cluster = np.arange(options.items) % options.clusters
    oracle = np.empty((options.items, k), dtype=np.int64)
    for item in range(options.items):
        mates = np.flatnonzero(cluster == cluster[item])  # ordered by popularity, like the ids
        oracle[item] = [rule.successor[item], *mates[mates != rule.successor[item]][: k - 1]]
    return float(np.isin(target, popular).mean()), float((oracle[previous] == target[:, None]).any(axis=1).mean())


@pytest.mark.parametrize("seed", [0, 1])
def test_an_oracle_beats_popularity_four_times(seed: int) -> None:
    options = Synthetic(seed=seed)
    popularity, oracle = hit_rates(options, options.generate())
    assert popularity < 0.2
    assert oracle > 4 * popularity


def test_without_the_rule_the_oracle_is_not_better() -> None:
    options = Synthetic(follow=0.0, clusters=1, items=1000)
    popularity, oracle = hit_rates(options, options.generate())
    assert oracle < 1.5 * popularity


def test_events_follow_the_rule_as_often_as_requested() -> None:
    options = Synthetic(users=500, follow=0.6)
    rule, histories = options.rule(), options.generate()
    clusters = np.arange(options.items) % options.clusters
    assert (clusters[rule.successor] == clusters).all()
    assert sorted(rule.successor) == list(range(options.items))
    inner = np.ones(len(histories.items), dtype=bool)
    inner[histories.offsets[:-1]] = False
    followed = histories.items[1:] == rule.successor[histories.items[:-1]]
    # A draw is the successor by chance in a few percent of all cases.
    assert 0.58 < followed[inner[1:]].mean() < 0.66
    owners = np.repeat(np.arange(histories.num_users), histories.lengths)
    for user in range(20):
        assert len(set(clusters[histories.items[owners == user]])) == 1


def test_many_successors_at_once_equal_one_successor_many_times() -> None:
    rule = Synthetic(items=23, clusters=4).rule()
    items = np.arange(23)
    expected = items.copy()
    for steps in range(30):
        assert np.array_equal(rule.follow(items, np.full(23, steps)), expected)
        expected = rule.successor[expected]


def test_draws_have_a_zipf_distribution_within_the_cluster() -> None:
    options = Synthetic(items=40, clusters=4, zipf=1.0)
    rule = options.rule()
    drawn = rule.draw(np.full(200_000, 1), np.random.default_rng(0))
    mates = np.arange(1, 40, 4)
    share = np.bincount(drawn, minlength=40)[mates] / len(drawn)
    expected = (1 / (mates + 1)) / (1 / (mates + 1)).sum()
    assert np.isin(drawn, mates).all()
    assert np.abs(share - expected).max() < 0.005


def test_lengths() -> None:
    histories = Synthetic(users=5_000, mean_length=100, sigma=0.5, min_length=5, max_length=10_000).generate()
    assert histories.lengths.min() >= 5
    assert abs(histories.lengths.mean() - 100) < 2
    assert abs(np.log(histories.lengths).std() - 0.5) < 0.02
    capped = Synthetic(users=100, mean_length=3000, sigma=1.2, max_length=2048).generate()
    assert capped.lengths.max() == 2048


def test_times_of_a_user_do_not_decrease() -> None:
    histories = Synthetic(users=50).generate()
    for start, stop in zip(histories.offsets[:-1], histories.offsets[1:], strict=True):
        assert (np.diff(histories.timestamps[start:stop]) >= 0).all()
    assert histories.timestamps.min() > 0


def test_the_data_depend_on_the_seed() -> None:
    a, b, c = (Synthetic(users=50, seed=seed, feature_sizes={"action": 3}).generate() for seed in (3, 3, 4))
    assert equal(a, b)
    assert not equal(a, c)
    assert set(a.features["action"]) == {0, 1, 2}
    assert a.feature_sizes == {"action": 3}


@pytest.mark.parametrize(
    "options",
    [
        {"users": 0},
        {"clusters": 2000},
        {"follow": 1.5},
        {"min_length": 9, "max_length": 8},
        {"feature_sizes": {"a": 0}},
        {"sigma": -1},
    ],
)
def test_invalid_options_are_refused(options: dict) -> None:
    with pytest.raises(ConfigurationError, match="synthetic: "):
        Synthetic(**options)


def test_user_chunks_cover_all_users_once() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        offsets = np.append(0, np.cumsum(rng.integers(0, 9, rng.integers(1, 30))))
        chunks = user_chunks(offsets, events=int(rng.integers(1, 40)))
        covered = [user for first, last in chunks for user in range(first, last)]
        assert covered == list(range(covered[0] if covered else 0, len(covered)))
        assert sum(offsets[last] - offsets[first] for first, last in chunks) == offsets[-1]
