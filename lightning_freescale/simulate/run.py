"""Simulate a way to train, and say where the time of its steps goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.simulate.events import PARTS, Ranks
from lightning_freescale.simulate.schedules import Program, prioritized, synchronous
from lightning_freescale.simulate.setting import Cluster, Model, Side, make_load

WARM = 2  # steps at the start, and at the end, that are not like those in between
COOL = 1


@dataclass(frozen=True)
class Result:
    """A step, seconds, means over ranks and steps. ``step == compute + bubble``, and ``parts`` add up to ``bubble``.

    Attributes:
        side: its name.
        ranks: their number.
        step: wall time.
        compute: forward, backward and dense optimizer, by their time alone.
        parts: of the bubble, by the names in ``events.PARTS``.
        qps: samples a second, of all ranks.
    """

    side: str
    ranks: int
    step: float
    compute: float
    parts: dict[str, float]
    qps: float

    @property
    def bubble(self) -> float:
        return sum(self.parts.values())

    @property
    def exposed(self) -> float:
        """Communication that is waited for, the wait for stragglers not included."""
        return self.parts["exposed_embedding"] + self.parts["exposed_dense"]

    def as_row(self) -> dict[str, Any]:
        """For tables: milliseconds and shares."""
        return {
            "ranks": self.ranks,
            "side": self.side,
            "step ms": 1e3 * self.step,
            "compute ms": 1e3 * self.compute,
            **{f"{name.replace('_', ' ')} ms": 1e3 * seconds for name, seconds in self.parts.items()},
            "bubble %": 100 * self.bubble / self.step,
            "QPS": self.qps,
        }


def simulate(side: Side, cluster: Cluster, model: Model, batches: Sequence[NDArray[np.int64]], seed: int = 0) -> Result:
    """Train on ``batches``, the history lengths of consecutive global batches; the first two and the last are not counted.

    Sides see the same batches and, with the same balancing, the same owners of rows and the same noise.
    """
    if len(batches) <= WARM + COOL:
        raise ConfigurationError(f"batches: {len(batches)} are too few: {WARM + COOL} of them are not counted")
    load = make_load(batches, cluster, model, side.balance, seed)
    ranks = Ranks(cluster.ranks, cluster.latency if cluster.ranks > 1 else 0.0)  # nothing leaves a rank that is alone
    program = Program(ranks, cluster, model, side, load)
    steps = prioritized(program) if side.schedule == "prioritized" else synchronous(program, side.schedule != "base")
    seen = [_look(ranks) for _ in steps]
    counted = seen[-1 - COOL] - seen[WARM - 1]  # [1 + 1 + parts, ranks]
    step, compute, *parts = (counted.mean(axis=1) / (len(batches) - WARM - COOL)).tolist()
    return Result(
        side.name, cluster.ranks, step, compute, dict(zip(PARTS, parts, strict=True)), qps=load.samples / step
    )


def _look(ranks: Ranks) -> NDArray[np.float64]:
    return np.stack([ranks.now, ranks.useful, *(ranks.parts[name] for name in PARTS)])
