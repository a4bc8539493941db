"""The fields of ``POST /recommend``. Pydantic checks them and names the field that is wrong."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, WithJsonSchema

from lightning_freescale.serving.service import RawEvent

MAX_EVENTS = 100_000


def _check_id(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"must be an integer or a string, not {value!r}")
    return value


def _check_time(value: Any) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and math.isfinite(value) and value >= 0):
        raise ValueError(f"must be a number of at least 0, not {value!r}")
    return value


def _check_category(value: Any) -> Any:
    if not isinstance(value, (bool, int, float, str)):
        raise ValueError(f"must be a number, a string or a boolean, not {value!r}")
    return value


# A check of our own, because the errors of a union name a field twice.
Id = Annotated[Any, AfterValidator(_check_id), WithJsonSchema({"type": ["integer", "string"]})]
Time = Annotated[Any, AfterValidator(_check_time), WithJsonSchema({"type": ["number", "null"], "minimum": 0})]
Category = Annotated[Any, AfterValidator(_check_category), WithJsonSchema({"type": ["boolean", "number", "string"]})]


class RequestEvent(BaseModel):
    """An event: the id of the item, its time in the unit of the training data, and the values of its features."""

    model_config = ConfigDict(extra="forbid")

    item: Id
    time: Time = None
    features: dict[str, Category] = {}

    def raw(self) -> RawEvent:
        return RawEvent(self.item, self.time, self.features)


def _as_event(value: Any) -> Any:
    """An id alone is an event without a time."""
    return {"item": value} if isinstance(value, (int, str)) and not isinstance(value, bool) else value


class RecommendRequest(BaseModel):
    """The body of ``POST /recommend``.

    ``events`` are all events of the user so far. They may be left out if the server has a file with the events of the user.
    Without ``k``, ten items are recommended, or all if there are fewer.
    """

    model_config = ConfigDict(extra="forbid")

    user: Id
    events: Annotated[
        list[Annotated[RequestEvent, BeforeValidator(_as_event)]] | None, Field(min_length=1, max_length=MAX_EVENTS)
    ] = None
    k: Annotated[StrictInt | None, Field(ge=1)] = None
