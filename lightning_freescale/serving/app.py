"""The HTTP endpoints: ``/recommend``, ``/health``, ``/metrics``, and the page at ``/`` with what it needs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from lightning_freescale.runtime.log import logger
from lightning_freescale.serving.batching import Batcher, Overloaded
from lightning_freescale.serving.known_histories import KnownHistories
from lightning_freescale.serving.prometheus import LATENCY_BOUNDS, Counter, Gauge, Histogram, exposition
from lightning_freescale.serving.request import RecommendRequest
from lightning_freescale.serving.service import FieldError, KnownUser, RecommendationService, ServedList

MAX_BODY_BYTES = 32 << 20
USUAL_K = 10  # items of an answer, unless the request says otherwise
LISTED_USERS = 50  # users that the page suggests


@dataclass(frozen=True)
class ServeOptions:
    """How requests are collected, and where the states are kept.

    Attributes:
        max_batch: requests that are computed together.
        max_wait_ms: how long a request waits for others.
        max_waiting: more waiting requests are refused.
        timeout_s: a request without an answer after so long is refused.
        states: the Parquet file to which the states of users are written at the end.
    """

    max_batch: int = 32
    max_wait_ms: float = 5.0
    max_waiting: int = 1000
    timeout_s: float = 30.0
    states: Path | None = None


def create_app(
    service: RecommendationService, options: ServeOptions | None = None, known: KnownHistories | None = None
) -> FastAPI:
    """The application that serves ``service``. ``known`` has the events of users whose requests bring none."""
    options = options or ServeOptions()
    endpoints = Endpoints(service, options, known)
    # The interactive documentation of FastAPI loads scripts from other hosts.
    app = FastAPI(title="FreeScale recommendations", docs_url=None, redoc_url=None, lifespan=endpoints.lifespan)
    app.middleware("http")(endpoints.measure)
    app.add_exception_handler(RequestValidationError, _refuse_fields)
    app.add_exception_handler(FieldError, _refuse_field)
    app.add_exception_handler(Overloaded, _refuse_for_now)
    app.get("/", response_class=HTMLResponse)(endpoints.page)
    app.post("/recommend")(endpoints.recommend)
    app.get("/health")(endpoints.health)
    app.get("/metrics", response_class=PlainTextResponse)(endpoints.metrics)
    app.get("/info")(endpoints.info)
    app.get("/history")(endpoints.history)
    return app


class Endpoints:
    """What the endpoints share. The arguments are those of :func:`create_app`."""

    def __init__(self, service: RecommendationService, options: ServeOptions, known: KnownHistories | None):
        self._service, self._options, self._known = service, options, known
        self._batcher: Batcher[KnownUser, ServedList] | None = None
        self._requests = Counter(
            "freescale_requests_total", "Requests to /recommend, by HTTP status.", "code", ("200",)
        )
        self._latency = Histogram("freescale_request_seconds", "Time from request to answer.", LATENCY_BOUNDS)
        self._unknown = Counter("freescale_unknown_events_total", "Events that the model does not know.")
        self._waiting = Gauge("freescale_waiting_requests", "Requests that wait for a batch.", self._count_waiting)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Start to collect requests. At the end, answer those that wait, and write the states."""
        options, path = self._options, self._options.states
        self._batcher = Batcher(
            self._service.answer,
            max_batch=options.max_batch,
            max_wait_ms=options.max_wait_ms,
            max_waiting=options.max_waiting,
            timeout_s=options.timeout_s,
        )
        yield
        await self._batcher.close()
        if path is not None and (count := self._service.save_states(path)):
            logger.info(f"{path}: wrote the states of {count:,} users")

    async def measure(self, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        """Count and time the requests to ``/recommend``, and refuse bodies that are too large."""
        if request.url.path != "/recommend" or request.method != "POST":
            return await call_next(request)
        start = time.perf_counter()
        size = request.headers.get("content-length", "")
        if not size.isdigit():
            response: Response = _errors(411, [("body", "its size is not known; send a Content-Length")])
        elif int(size) > MAX_BODY_BYTES:
            response = _errors(413, [("body", f"{size} bytes; at most {MAX_BODY_BYTES} are read")])
        else:
            response = await call_next(request)
        self._requests.add(value=str(response.status_code))
        self._latency.observe(time.perf_counter() - start)
        return response

    async def recommend(self, body: RecommendRequest) -> dict[str, Any]:
        """The best items of one user."""
        assert self._batcher is not None
        items = self._service.recommender.num_items
        k = min(USUAL_K, items) if body.k is None else body.k
        if k > items:
            raise FieldError("k", f"must be at most {items}, the number of items, not {k}")
        if body.events is not None:
            # In a thread, because a long history takes milliseconds in which no other request could arrive.
            events, unknown = await asyncio.to_thread(self._service.encode, [event.raw() for event in body.events])
        elif self._known is None:
            raise FieldError("events", "the server has no events of its own, so the request must bring all of the user")
        else:
            events, unknown = self._known.events(body.user), 0
        self._unknown.add(unknown)
        found = await self._batcher.submit(KnownUser(str(body.user), events, k))
        ranked = [{"item": item, "score": score} for item, score in zip(found.items, found.scores, strict=True)]
        return {
            "user": body.user,
            "recommendations": ranked,
            "known_events": len(events.items),
            "unknown_events": unknown,
            "state": found.state,
        }

    async def health(self) -> Response:
        """Status 200 while requests are answered, 503 before and after."""
        ready = self._batcher is not None and not self._batcher.closing
        recommender = self._service.recommender
        content = {"status": "ok" if ready else "stopping", "model": recommender.fingerprint}
        return JSONResponse(content, 200 if ready else 503)

    async def metrics(self) -> str:
        """Counters and histograms for Prometheus."""
        return exposition([self._requests, self._latency, self._waiting, self._unknown, *self._service.metrics])

    def _count_waiting(self) -> int:
        return 0 if self._batcher is None else self._batcher.waiting

    async def info(self) -> dict[str, Any]:
        """What the page needs to know about the model."""
        recommender = self._service.recommender
        return {
            "items": recommender.num_items,
            "max_history": recommender.max_history,
            "model": recommender.fingerprint,
            "times": self._service.needs_times,
            "time_unit": recommender.reading["time_unit"],
            "features": {name: values[:100].tolist() for name, values in recommender.catalogue.feature_values.items()},
            "states": recommender.has_states,
            "users": None if self._known is None else self._known.some_users(LISTED_USERS),
        }

    async def history(self, user: str) -> dict[str, Any]:
        """The events of a user of the server's file."""
        if self._known is None:
            raise FieldError("user", "the server has no file of events; start it with --data")
        return {"user": user, "events": self._known.described(user)}

    async def page(self) -> HTMLResponse:
        """A page that shows a history and the recommendations. It loads nothing from other hosts."""
        text = resources.files("lightning_freescale.serving").joinpath("page.html").read_text()
        policy = "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})


# ---- errors ----------------------------------------------------------------------------------------------------------
def _errors(status: int, problems: list[tuple[str, str]], **headers: str) -> JSONResponse:
    content = {"errors": [{"field": field, "message": message} for field, message in problems]}
    return JSONResponse(content, status, headers)


async def _refuse_fields(request: Request, error: Exception) -> Response:
    """Status 422 with the place of every wrong field in the body, for example ``events.0.item``."""
    assert isinstance(error, RequestValidationError)
    found = []
    for problem in error.errors():
        place = ".".join(str(part) for part in problem["loc"] if part not in ("body", "query"))
        no_field = problem["type"] == "json_invalid" or not place
        found.append(("body" if no_field else place, problem["msg"].removeprefix("Value error, ")))
    return _errors(422, found)


async def _refuse_field(request: Request, error: Exception) -> Response:
    assert isinstance(error, FieldError)
    return _errors(404 if error.field == "user" else 422, [(error.field, error.message)])


async def _refuse_for_now(request: Request, error: Exception) -> Response:
    return _errors(503, [("", str(error))], **{"Retry-After": "1"})
