"""``RecommendationService``: events of requests to recommendations, with cached states if the model has personal tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from lightning_freescale.data.columns import TICKS_PER_SECOND, RowLocation, ticks
from lightning_freescale.data.samples import SampleArrays, concatenate
from lightning_freescale.inference import Recommender, load_states, save_states
from lightning_freescale.inference.recommender import window
from lightning_freescale.inference.state_file import join_states
from lightning_freescale.runtime.errors import InputError
from lightning_freescale.serving.prometheus import BATCH_BOUNDS, Counter, Gauge, Histogram
from lightning_freescale.serving.state_cache import CachedState, StateCache, digest_of, split_states


class FieldError(InputError):
    """A field of a request is wrong. ``field`` is its place, such as ``events.3.time``."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message


class RawEvent(NamedTuple):
    """An event with raw ids. ``time`` is in the unit of the training data."""

    item: int | str
    time: float | None = None
    features: Mapping[str, Any] = {}


class KnownUser(NamedTuple):
    """A request that has been checked: the events of one user, in time order, with the rows of the model."""

    user: str
    events: SampleArrays
    k: int


class ServedList(NamedTuple):
    """The recommended items of one user with their scores, and whether the state was ``"cached"`` or ``"computed"``."""

    items: list[int | str]
    scores: list[float]
    state: str | None


class RecommendationService:
    """Answers batches of requests. :meth:`answer` must be called by one thread at a time.

    Args:
        recommender: the model.
        filter_seen: leave the items of the user's events out.
        cache_users: number of users whose states are kept. Only models with personal tokens have states.
    """

    def __init__(self, recommender: Recommender, *, filter_seen: bool = True, cache_users: int = 10_000):
        self.recommender, self._filter_seen = recommender, filter_seen
        self.cache: StateCache | None = None
        if recommender.model.personalization is not None:
            cut = recommender.model.personalization.cut
            self.cache = StateCache(cache_users, cut.recent, cut.refresh)
        self._batch_sizes = Histogram(
            "freescale_batch_size", "Requests that the model computed together.", BATCH_BOUNDS
        )
        self._lookups = Counter(
            "freescale_state_lookups_total", "Lookups of the state of a user.", "result", ("hit", "miss")
        )
        cached = Gauge("freescale_cached_users", "Users whose state is cached.", lambda: len(self.cache or ()))
        self.metrics: list[Counter | Gauge | Histogram] = [self._batch_sizes, self._lookups, cached]

    # ---- requests --------------------------------------------------------------------------------------------------
    def encode(self, events: Sequence[RawEvent]) -> tuple[SampleArrays, int]:
        """Events with the rows of the model, in time order, and how many are dropped because the model does not know them.

        An event is unknown if its item, or the value of one of its features, was not in the training data. Raises
        :class:`FieldError` if an event is not complete, or if none is known.
        """
        catalogue = self.recommender.catalogue
        items = catalogue.rows([event.item for event in events])
        known = items >= 0
        features = {}
        for name in catalogue.feature_values:
            features[name] = catalogue.rows(_feature(events, name), name)
            known &= features[name] >= 0
        for at, event in enumerate(events):
            if strange := event.features.keys() - features.keys():
                name = min(strange)
                raise FieldError(f"events.{at}.features.{name}", "the model does not have this feature; leave it out")
        times = self._ticks(events)
        if not known.any():
            raise FieldError("events", f"none of the {len(events)} events has an item that the model knows")
        order = np.argsort(times, kind="stable")
        order = order[known[order]]
        samples = SampleArrays(
            users=np.zeros(1, dtype=np.int64),
            lengths=np.array([len(order)]),
            items=items[order],
            timestamps=times[order] // TICKS_PER_SECOND,
            features={name: rows[order] for name, rows in features.items()},
            targets=None,
        )
        return samples, int((~known).sum())

    @property
    def needs_times(self) -> bool:
        """Whether events need times. A model that was trained on events in time order knows no times."""
        reading = self.recommender.reading
        return bool(reading.get("times", reading["columns"].get("time", "") is not None))

    def _ticks(self, events: Sequence[RawEvent]) -> Any:
        """The time of each event in microseconds; its position in seconds if the model knows no times."""
        for at, event in enumerate(events):
            if self.needs_times and event.time is None:
                raise FieldError(f"events.{at}.time", "the model was trained with times, so every event needs one")
            if not self.needs_times and event.time is not None:
                raise FieldError(
                    f"events.{at}.time",
                    "the model was trained without times; leave it out, and keep events in time order",
                )
        if not self.needs_times:
            return np.arange(len(events)) * TICKS_PER_SECOND
        try:
            values = pa.array([event.time for event in events])
            return ticks(values, "time", RowLocation(Path("events")), self.recommender.reading["time_unit"])
        except (InputError, pa.ArrowException, OverflowError) as error:
            raise FieldError("events.time", str(error)) from error

    # ---- answers ---------------------------------------------------------------------------------------------------
    def answer(self, batch: Sequence[KnownUser]) -> list[ServedList]:
        """The recommendations of each user of a batch."""
        self._batch_sizes.observe(len(batch))
        k = max(request.k for request in batch)
        if self.cache is None:
            longest = self.recommender.max_history
            samples = concatenate([window(request.events, max(0, _count(request) - longest)) for request in batch])
            found, kinds = self.recommender.recommend(samples, k, filter_seen=self._filter_seen), [None] * len(batch)
        else:
            samples, states, kinds = self._with_states(batch, self.cache)
            found = self.recommender.recommend(samples, k, filter_seen=self._filter_seen, states=join_states(states))
        answers = []
        for request, items, scores, kind in zip(batch, found.items, found.scores, kinds, strict=True):
            kept = np.isfinite(scores[: request.k])
            answers.append(ServedList(items[: request.k][kept].tolist(), scores[: request.k][kept].tolist(), kind))
        return answers

    def _with_states(self, batch: Sequence[KnownUser], cache: StateCache) -> tuple[SampleArrays, list[Any], list[Any]]:
        """The events of each user from the start of the state on, the states, and where each state comes from."""
        longest = self.recommender.max_history
        states: list[Any] = [None] * len(batch)
        kinds: list[str | None] = [None] * len(batch)
        firsts = [max(0, _count(request) - longest) for request in batch]
        lengths = self.recommender.history_lengths(np.array([min(_count(request), longest) for request in batch]))
        for at, request in enumerate(batch):
            if not lengths[at]:  # all users with so few events have the same state
                continue
            found = cache.find(request.user, request.events)
            kinds[at] = "computed" if found is None else "cached"
            self._lookups.add(value="miss" if found is None else "hit")
            if found is not None:
                states[at], firsts[at] = found.state, found.first
        samples = [window(request.events, first) for request, first in zip(batch, firsts, strict=True)]
        missing = [at for at, state in enumerate(states) if state is None]
        if missing:
            made = self.recommender.compress(concatenate([samples[at] for at in missing]))
            for at, state in zip(missing, split_states(made, self.recommender.device), strict=True):
                states[at] = state
                if length := int(lengths[at]):
                    digest = digest_of(batch[at].events, firsts[at], length)
                    cache.put(batch[at].user, CachedState(firsts[at], length, digest, state))
        return concatenate(samples), states, kinds

    # ---- files -----------------------------------------------------------------------------------------------------
    def load_states(self, path: str | PathLike[str]) -> int:
        """Take over the states of a file; returns their number. States of another model are refused."""
        if self.cache is None:
            raise InputError(f"{path}: the model has no personal tokens, so its users have no states")
        stored = load_states(path, self.recommender.fingerprint)
        self.cache.put_all(stored, self.recommender.device)
        return len(stored.users)

    def save_states(self, path: str | PathLike[str]) -> int:
        """Write the cached states to a file; returns their number. Nothing is written if there are none."""
        stored = None if self.cache is None else self.cache.stored()
        if stored is None:
            return 0
        save_states(path, stored, self.recommender.fingerprint)
        return len(stored.users)


def _count(request: KnownUser) -> int:
    return len(request.events.items)


def _feature(events: Sequence[RawEvent], name: str) -> list[Any]:
    for at, event in enumerate(events):
        if name not in event.features:
            raise FieldError(f"events.{at}.features.{name}", "the model needs this feature of every event")
    return [event.features[name] for event in events]
