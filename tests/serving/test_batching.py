"""``Batcher``: which requests are computed together, failures, overload, and the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.serving.batching import Batcher, Overloaded
from lightning_freescale.serving.prometheus import Counter, Gauge, Histogram, exposition


class Model:
    """Doubles numbers, and records the batches. The first batch waits until ``release`` is set."""

    def __init__(self, blocked: bool = False):
        self.batches: list[list[int]] = []
        self.started, self.release = threading.Event(), threading.Event()
        if not blocked:
            self.release.set()

    def __call__(self, batch: Sequence[int]) -> list[int]:
        self.batches.append(list(batch))
        self.started.set()
        assert self.release.wait(30)
        if 13 in batch:
            raise RuntimeError("thirteen")
        return [2 * number for number in batch]


def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario(), 60))  # type: ignore[arg-type]


def test_requests_that_wait_are_computed_together() -> None:
    """A full batch starts without waiting, although the longest wait is a minute."""
    model = Model()

    async def scenario() -> list[int]:
        batcher = Batcher(model, max_batch=3, max_wait_ms=60_000)
        answers = await asyncio.gather(*(batcher.submit(number) for number in range(6)))
        await batcher.close()
        return answers

    assert run(scenario) == [0, 2, 4, 6, 8, 10]
    assert model.batches == [[0, 1, 2], [3, 4, 5]]


def test_a_lone_request_is_not_kept_waiting_for_others() -> None:
    model = Model()

    async def scenario() -> list[int]:
        batcher = Batcher(model, max_batch=3, max_wait_ms=1)
        answers = [await batcher.submit(5), await batcher.submit(6)]
        await batcher.close()
        return answers

    assert run(scenario) == [10, 12]
    assert model.batches == [[5], [6]]


def test_requests_collect_while_a_batch_is_computed() -> None:
    model = Model(blocked=True)

    async def scenario() -> list[int]:
        batcher = Batcher(model, max_batch=8, max_wait_ms=0)
        first = asyncio.create_task(batcher.submit(1))
        await asyncio.to_thread(model.started.wait, 30)
        others = [asyncio.create_task(batcher.submit(number)) for number in (2, 3, 4)]
        await asyncio.sleep(0)  # they are waiting now
        model.release.set()
        answers = await asyncio.gather(first, *others)
        await batcher.close()
        return answers

    assert run(scenario) == [2, 4, 6, 8]
    assert model.batches == [[1], [2, 3, 4]]


def test_a_failure_reaches_its_batch_only() -> None:
    async def scenario() -> list[Any]:
        batcher = Batcher(Model(), max_batch=2, max_wait_ms=60_000)
        answers = await asyncio.gather(*(batcher.submit(n) for n in (1, 13, 3, 4)), return_exceptions=True)
        await batcher.close()
        return answers

    first, second, *others = run(scenario)
    assert str(first) == str(second) == "thirteen"
    assert others == [6, 8]


def test_too_many_requests_are_refused_and_those_that_wait_are_answered_at_the_end() -> None:
    model = Model(blocked=True)

    async def scenario() -> list[Any]:
        batcher = Batcher(model, max_batch=1, max_wait_ms=0, max_waiting=2)
        first = asyncio.create_task(batcher.submit(1))
        await asyncio.to_thread(model.started.wait, 30)
        waiting = [asyncio.create_task(batcher.submit(number)) for number in (2, 3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 requests are waiting already"):
            await batcher.submit(4)
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="the server is stopping"):
            await batcher.submit(5)
        model.release.set()
        await closing
        return await asyncio.gather(first, *waiting)

    assert run(scenario) == [2, 4, 6]


def test_a_request_without_an_answer_is_given_up_and_not_computed() -> None:
    model = Model(blocked=True)

    async def scenario() -> None:
        batcher = Batcher(model, max_batch=1, max_wait_ms=0, timeout_s=0.05)
        with pytest.raises(Overloaded, match=r"no answer after 0\.05 s"):
            await asyncio.gather(batcher.submit(1), batcher.submit(2))
        await asyncio.sleep(0.2)
        model.release.set()
        await batcher.close()

    run(scenario)
    assert model.batches == [[1]]


def test_bad_options_are_named() -> None:
    async def scenario() -> None:
        Batcher(Model(), max_batch=0)

    with pytest.raises(ConfigurationError, match="max_batch: must be at least 1, not 0"):
        run(scenario)


def test_the_text_for_prometheus() -> None:
    counter = Counter("a_total", "Counts.", "code", ("200",))
    counter.add(2, "404")
    histogram = Histogram("b", "Sizes.", (1, 4))
    for value in (1, 2, 4, 9):
        histogram.observe(value)
    assert exposition([counter, histogram, Gauge("c", "Now.", lambda: 0.5)]).splitlines() == [
        "# HELP a_total Counts.",
        "# TYPE a_total counter",
        'a_total{code="200"} 0',
        'a_total{code="404"} 2',
        "# HELP b Sizes.",
        "# TYPE b histogram",
        'b_bucket{le="1"} 1',
        'b_bucket{le="4"} 3',
        'b_bucket{le="+Inf"} 4',
        "b_sum 16",
        "b_count 4",
        "# HELP c Now.",
        "# TYPE c gauge",
        "c 0.5",
    ]
