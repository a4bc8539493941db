"""``Batcher``: collects requests that arrive at about the same time, so that the model computes them together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning_freescale.runtime.errors import ConfigurationError, FreeScaleError

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class Overloaded(FreeScaleError):
    """More requests are waiting than allowed, the wait was too long, or the server is stopping."""


@dataclass
class _Waiting(Generic[Request, Answer]):
    request: Request
    arrived: float
    answer: asyncio.Future[Answer]


class Batcher(Generic[Request, Answer]):
    """Runs a function on batches of requests, one batch at a time, in a thread of its own.

    A batch starts when ``max_batch`` requests are waiting, or when the oldest has waited ``max_wait_ms``. While a batch is
    computed the next requests collect, so a busy server has large batches without further waiting.

    Create it inside a running event loop, and close it there.

    Args:
        run: requests in, one answer for each out, in the same order.
        max_batch: requests of a batch.
        max_wait_ms: how long a request waits for others.
        max_waiting: more requests than these are refused with :class:`Overloaded`.
        timeout_s: a request that has no answer after so long is refused with :class:`Overloaded`.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Request]], Sequence[Answer]],
        *,
        max_batch: int = 32,
        max_wait_ms: float = 5.0,
        max_waiting: int = 1000,
        timeout_s: float = 30.0,
    ):
        least = {"max_batch": (max_batch, 1), "max_waiting": (max_waiting, 1), "max_wait_ms": (max_wait_ms, 0)}
        for name, (value, low) in least.items():
            if value < low:
                raise ConfigurationError(f"{name}: must be at least {low}, not {value}")
        self._run, self._max_batch, self._max_wait = run, max_batch, max_wait_ms / 1000
        self._max_waiting, self._timeout = max_waiting, timeout_s
        self._waiting: deque[_Waiting[Request, Answer]] = deque()
        self._arrived, self._full = asyncio.Event(), asyncio.Event()
        self._closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="freescale-model")
        self._worker = asyncio.create_task(self._work())

    @property
    def closing(self) -> bool:
        return self._closing

    @property
    def waiting(self) -> int:
        """Number of requests that no batch has taken yet."""
        return len(self._waiting)

    async def submit(self, request: Request) -> Answer:
        """The answer to ``request``, from the next batch that has room for it."""
        if self._closing:
            raise Overloaded("the server is stopping")
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(f"{len(self._waiting)} requests are waiting already; try again later")
        loop = asyncio.get_running_loop()
        entry = _Waiting[Request, Answer](request, loop.time(), loop.create_future())
        self._waiting.append(entry)
        self._arrived.set()
        if len(self._waiting) >= self._max_batch:
            self._full.set()
        try:
            return await asyncio.wait_for(entry.answer, self._timeout)
        except TimeoutError as error:
            raise Overloaded(f"no answer after {self._timeout:g} s; try again later") from error

    async def close(self) -> None:
        """Answer the requests that are waiting, then stop."""
        self._closing = True
        self._arrived.set()
        self._full.set()
        await self._worker
        self._thread.shutdown()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            if not self._waiting:
                if self._closing:
                    return
                self._arrived.clear()
                continue
            rest = self._waiting[0].arrived + self._max_wait - loop.time()
            if rest > 0 and not self._full.is_set():
                await _wait_at_most(self._full, rest)
            size = min(self._max_batch, len(self._waiting))
            batch = [self._waiting.popleft() for _ in range(size)]
            if len(self._waiting) < self._max_batch and not self._closing:
                self._full.clear()
            await self._answer([entry for entry in batch if not entry.answer.done()])

    async def _answer(self, batch: list[_Waiting[Request, Answer]]) -> None:
        if not batch:  # all clients have gone
            return
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self._thread, self._run, [entry.request for entry in batch])
        except Exception as error:  # it belongs to the requests; the next batch may succeed
            for entry in batch:
                if not entry.answer.done():
                    entry.answer.set_exception(error)
            return
        for entry, answer in zip(batch, answers, strict=True):
            if not entry.answer.done():
                entry.answer.set_result(answer)


async def _wait_at_most(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
