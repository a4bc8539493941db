"""``RecommendationService``: answers are those of the recommender, also when the state of a user is cached."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.data.samples import SampleArrays
from lightning_freescale.inference import Recommender
from lightning_freescale.inference.recommender import first_events, window
from lightning_freescale.runtime.errors import InputError
from lightning_freescale.serving import state_cache
from lightning_freescale.serving.service import FieldError, KnownUser, RawEvent, RecommendationService, ServedList
from tests.inference.trained import CUT, MAX_HISTORY, Trained, train

K = 5


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("service"), tokens=True)


@pytest.fixture(scope="module")
def recommender(trained: Trained) -> Recommender:
    return Recommender.load(trained.exported)


@pytest.fixture(scope="module")
def events(recommender: Recommender) -> SampleArrays:
    """60 events of one user, more than the longest history."""
    raw = [RawEvent(f"film-{at * at % 37}é", 1000 + 97 * at, {"genre": "drama"}) for at in range(60)]
    samples, unknown = RecommendationService(recommender).encode(raw)
    assert unknown == 0
    return samples


def up_to(events: SampleArrays, count: int) -> SampleArrays:
    return first_events(events, np.array([count]))


def ask(service: RecommendationService, events: SampleArrays, user: str = "ann") -> ServedList:
    (answer,) = service.answer([KnownUser(user, events, K)])
    return answer


def expected(recommender: Recommender, events: SampleArrays) -> ServedList:
    """From whole histories, without states."""
    found = recommender.recommend(events, K)
    return ServedList(found.items[0].tolist(), found.scores[0].tolist(), None)


def agree(found: ServedList, wanted: ServedList) -> bool:
    return found.items == wanted.items and np.allclose(found.scores, wanted.scores, rtol=0, atol=1e-6)


def test_a_growing_history_is_served_from_states(recommender: Recommender, events: SampleArrays) -> None:
    """A state serves ``refresh`` requests. Answers are those of the whole history, as long as it is not cut off."""
    service = RecommendationService(recommender)
    kinds = []
    for count in range(1, MAX_HISTORY + 1):
        history = up_to(events, count)
        answer = ask(service, history)
        assert agree(answer, expected(recommender, history)), count
        kinds.append(answer.state)
    lengths = CUT.history_lengths(np.arange(1, MAX_HISTORY + 1))
    fresh = np.diff(lengths, prepend=0) > 0
    assert kinds == [
        None if not length else "computed" if new else "cached" for length, new in zip(lengths, fresh, strict=True)
    ]
    assert kinds.count("cached") > kinds.count("computed") > 1


def test_a_long_history_is_cut_where_the_state_starts(recommender: Recommender, events: SampleArrays) -> None:
    """A new state starts ``max_history`` events ago. A cached one keeps its start, at most ``refresh`` - 1 events earlier."""
    service = RecommendationService(recommender)
    start = None
    for count in range(40, 60):
        history = up_to(events, count)
        answer = ask(service, history)
        if answer.state == "computed":
            start = count - MAX_HISTORY
        assert start is not None
        assert 0 <= count - MAX_HISTORY - start < CUT.refresh
        assert agree(answer, expected(recommender, window(history, start)))


def test_another_history_of_the_same_user_is_computed(
    recommender: Recommender, events: SampleArrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = RecommendationService(recommender)
    history, other = up_to(events, 12), window(up_to(events, 32), 20)
    assert ask(service, history).state == "computed"
    assert ask(service, history).state == "cached"
    answer = ask(service, other)
    assert answer.state == "computed"
    assert agree(answer, expected(recommender, other))
    # Negative control: without the comparison of the events, the state of the other history would be used.
    monkeypatch.setattr(state_cache, "digest_of", lambda *_: service.cache._states["ann"].digest)  # type: ignore[union-attr]
    assert not agree(ask(service, history), expected(recommender, history))


def test_the_least_recently_used_state_is_forgotten(recommender: Recommender, events: SampleArrays) -> None:
    service = RecommendationService(recommender, cache_users=2)
    history = up_to(events, 12)
    users = ["ann", "bob", "ann", "carl", "ann", "bob"]
    assert [ask(service, history, user).state for user in users] == [
        "computed",
        "computed",
        "cached",
        "computed",
        "cached",
        "computed",
    ]
    assert service.cache is not None
    assert len(service.cache) == 2


def test_a_batch_has_the_answers_of_its_requests(recommender: Recommender, events: SampleArrays) -> None:
    """Short, cached and new histories and different numbers of items in one batch."""
    service = RecommendationService(recommender)
    ask(service, up_to(events, 11), "known")
    batch = [
        KnownUser("short", up_to(events, 2), 3),
        KnownUser("known", up_to(events, 12), 5),
        KnownUser("new", up_to(events, 16), 1),
    ]
    answers = service.answer(batch)
    assert [answer.state for answer in answers] == [None, "cached", "computed"]
    for request, answer in zip(batch, answers, strict=True):
        wanted = expected(recommender, request.events)
        assert agree(answer, ServedList(wanted.items[: request.k], wanted.scores[: request.k], None))


asked = st.tuples(st.sampled_from(["ann", "bob", "carl"]), st.integers(0, 2), st.integers(1, MAX_HISTORY))


@settings(max_examples=8, deadline=None)
@given(requests=st.lists(st.lists(asked, min_size=1, max_size=4), min_size=1, max_size=6))
def test_no_order_of_requests_changes_an_answer(
    recommender: Recommender, events: SampleArrays, requests: list[list[tuple[str, int, int]]]
) -> None:
    """Batches of users whose histories grow, shrink and are replaced, with room for the states of two users."""
    service = RecommendationService(recommender, cache_users=2)
    for batch in requests:
        histories = [window(up_to(events, 20 * start + count), 20 * start) for _, start, count in batch]
        known = [KnownUser(user, history, K) for (user, _, _), history in zip(batch, histories, strict=True)]
        for history, answer in zip(histories, service.answer(known), strict=True):
            assert agree(answer, expected(recommender, history))


def test_states_outlive_the_server(recommender: Recommender, events: SampleArrays, tmp_path: Path) -> None:
    service, history = RecommendationService(recommender), up_to(events, 12)
    assert service.save_states(tmp_path / "states.parquet") == 0
    before = ask(service, history)
    assert service.save_states(tmp_path / "states.parquet") == 1
    again = RecommendationService(recommender)
    assert again.load_states(tmp_path / "states.parquet") == 1
    after = ask(again, history)
    assert (before.state, after.state) == ("computed", "cached")
    assert (after.items, after.scores) == (before.items, before.scores)
    other = Recommender.load(train(tmp_path, tokens=True, seed=2).exported)
    with pytest.raises(InputError, match="is of another model than"):
        RecommendationService(other).load_states(tmp_path / "states.parquet")


# ---- requests --------------------------------------------------------------------------------------------------------
def test_events_are_sorted_by_time_and_unknown_ones_are_counted(recommender: Recommender) -> None:
    drama = {"genre": "drama"}
    raw = [
        RawEvent("film-3é", 20, drama),
        RawEvent("film-1é", 10.5, drama),
        RawEvent("no such film", 15, drama),
        RawEvent("film-2é", 12, {"genre": "no such genre"}),
    ]
    samples, unknown = RecommendationService(recommender).encode(raw)
    assert unknown == 2
    assert recommender.catalogue.item_ids[samples.items].tolist() == ["film-1é", "film-3é"]
    assert samples.timestamps.tolist() == [10, 20]


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (RawEvent("film-1é", None, {"genre": "drama"}), "events.1.time"),
        (RawEvent("film-1é", 10**30, {"genre": "drama"}), "events.time"),
        (RawEvent("film-1é", 10, {}), "events.1.features.genre"),
        (RawEvent("film-1é", 10, {"genre": "drama", "mood": 1}), "events.1.features.mood"),
    ],
)
def test_bad_events_are_named(recommender: Recommender, event: RawEvent, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        RecommendationService(recommender).encode([RawEvent("film-3é", 20, {"genre": "drama"}), event])
    assert caught.value.field == field


def test_a_model_without_times_and_without_states(tmp_path: Path) -> None:
    trained = train(tmp_path, tokens=False, text_ids=False, times=False)
    service = RecommendationService(Recommender.load(trained.exported))
    samples, unknown = service.encode([RawEvent(item, None, {"genre": "drama"}) for item in ("30", 20, 10, 7)])
    assert unknown == 1
    assert samples.timestamps.tolist() == [0, 1, 2]
    assert agree(ask(service, samples), expected(service.recommender, samples))
    with pytest.raises(FieldError, match=r"events\.0\.time: the model was trained without times"):
        service.encode([RawEvent(10, 5, {"genre": "drama"})])
    with pytest.raises(FieldError, match="events: none of the 1 events has an item that the model knows"):
        service.encode([RawEvent(7, None, {"genre": "drama"})])
    with pytest.raises(InputError, match=r"x\.parquet: the model has no personal tokens"):
        service.load_states("x.parquet")
    assert service.save_states("x.parquet") == 0
