"""A reference of the preprocessing in plain Python."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from lightning_freescale.data import Histories


class Event(NamedTuple):
    user: Any
    item: Any
    time: int
    feature: Any = None


def reference(events: list[Event], min_events: int = 3) -> dict[Any, list[Event]]:
    """Return the events of each user in time order, ties in file order. Users are sorted; users with few events are left out."""
    by_user = defaultdict(list)
    for event in events:
        by_user[event.user].append(event)
    return {
        user: sorted(by_user[user], key=lambda event: event.time)
        for user in sorted(by_user, key=lambda user: (isinstance(user, str), user))
        if len(by_user[user]) >= min_events
    }


def decoded(histories: Histories, feature: str | None = None) -> dict[Any, list[Event]]:
    """Return the histories with raw values instead of codes."""
    result = {}
    for user, start, stop in zip(
        histories.user_ids.tolist(), histories.offsets[:-1].tolist(), histories.offsets[1:].tolist(), strict=True
    ):
        items = histories.item_ids[histories.items[start:stop]].tolist()
        times = histories.timestamps[start:stop].tolist()
        values = [None] * (stop - start)
        if feature is not None:
            values = histories.feature_values[feature][histories.features[feature][start:stop]].tolist()
        result[user] = [Event(user, *rest) for rest in zip(items, times, values, strict=True)]
    return result


def check(histories: Histories, expected: dict[Any, list[Event]], feature: str | None = None) -> None:
    assert decoded(histories, feature) == expected
    events = [event for own in expected.values() for event in own]
    assert histories.item_ids.tolist() == sorted({event.item for event in events})
    if feature is not None:
        assert histories.feature_values[feature].tolist() == sorted({event.feature for event in events})


def random_events(rng: np.random.Generator, count: int = 300, users: int = 12, items: int = 20) -> list[Event]:
    """Return events in random order, with equal times. Some users have fewer than three events."""
    return [
        Event(int(user), int(item), int(time), float(value) / 2)
        for user, item, time, value in zip(
            rng.zipf(1.5, count) % users,
            rng.integers(1000, 1000 + items, count),
            rng.integers(0, 50, count),
            rng.integers(1, 11, count),
            strict=True,
        )
    ]
