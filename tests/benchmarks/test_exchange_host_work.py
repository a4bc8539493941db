"""``benchmarks.exchange_host_work``: work is charged to the innermost part, and calls and operators are counted."""

from __future__ import annotations

import math

import torch

from benchmarks import exchange_host_work as host_work
from benchmarks.exchange_host_work import REST, StepParts, divided_by
from benchmarks.harness.host_counters import PythonCalls, TorchOperators
from lightning_freescale.embedding.schedule import ExchangeSchedule


def test_work_is_charged_to_the_innermost_part() -> None:
    done = {"units": 0.0}
    parts = StepParts(lambda: dict(done))
    done["units"] += 1
    before = parts.enter("outer")
    done["units"] += 10
    within = parts.enter("inner")
    done["units"] += 100
    assert (before, within) == (REST, "outer")
    parts.enter(within)
    done["units"] += 1000
    parts.enter(before)
    assert parts.take() == {("units", REST): 1, ("units", "outer"): 1010, ("units", "inner"): 100}
    assert not any(parts.take().values())


def test_methods_are_divided_and_restored() -> None:
    own = [getattr(owner, name) for owner, name, _ in host_work.METHODS]
    seen: list[str] = []
    parts = StepParts(lambda: {})
    schedule = ExchangeSchedule.__new__(ExchangeSchedule)
    with divided_by(parts):
        schedule.modules = [type("Module", (), {"before_backward": lambda self: seen.append(parts.part)})()]
        schedule.before_backward()
    assert seen == ["exchange: before backward"]
    assert parts.part == REST
    assert [getattr(owner, name) for owner, name, _ in host_work.METHODS] == own


def test_calls_operators_and_collectives_are_counted() -> None:
    with PythonCalls() as calls:
        before = calls.count
        math.sqrt(2.0)
        counted = calls.count - before
    assert counted == 1
    with TorchOperators() as operators:
        torch.ones(2) + 1
    assert operators.read() == {"operators": 2, "collectives": 0}
