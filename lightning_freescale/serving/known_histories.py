"""``KnownHistories``: the events of users of a file, for requests that bring no events of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_freescale.data.columns import units_per_second
from lightning_freescale.data.histories import Histories
from lightning_freescale.data.samples import SampleArrays, events_before
from lightning_freescale.serving.service import FieldError, RecommendationService


class KnownHistories:
    """Events of users, with the rows of the model of ``service``."""

    def __init__(self, histories: Histories, service: RecommendationService):
        self._histories, self._service = histories, service
        self._numbers = {str(user): number for number, user in enumerate(histories.user_ids.tolist())}

    def some_users(self, count: int) -> list[int | str]:
        """The first users of the file."""
        return self._histories.user_ids[:count].tolist()

    def events(self, user: int | str) -> SampleArrays:
        """All events of one user."""
        number = self._numbers.get(str(user))
        if number is None:
            raise FieldError("user", f"{user!r} is not in the server's file of events; send the events of the user")
        found, users = self._histories, np.array([number])
        columns = (found.items, found.timestamps, found.features, found.offsets)
        return events_before(found.offsets[users + 1], *columns, users, max_history=len(found.items))

    def described(self, user: str) -> list[dict[str, Any]]:
        """The events as a request has them, in time order."""
        events, recommender = self.events(user), self._service.recommender
        catalogue, factor = recommender.catalogue, units_per_second(recommender.reading["time_unit"])
        described: list[dict[str, Any]] = [{"item": item} for item in catalogue.item_ids[events.items].tolist()]
        if self._service.needs_times:
            for event, seconds in zip(described, events.timestamps.tolist(), strict=True):
                event["time"] = seconds * factor
        for name, rows in events.features.items():
            for event, value in zip(described, catalogue.feature_values[name][rows].tolist(), strict=True):
                event.setdefault("features", {})[name] = value
        return described
