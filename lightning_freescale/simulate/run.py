"""``simulate``: the step time of a variant of training, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.simulate.events import BUBBLE_PARTS, SimulatedRanks
from lightning_freescale.simulate.loads import make_loads
from lightning_freescale.simulate.scenario import Cluster, ModelProfile, TrainingVariant
from lightning_freescale.simulate.schedules import StepOperations, prioritized, synchronous

# Steps that are not counted: the pipeline is not full in the first ones, and the last one has no next batch.
FIRST_STEPS = 2
LAST_STEPS = 1


@dataclass(frozen=True)
class SimulationResult:
    """A step in seconds, mean over ranks and steps. ``step == compute + bubble``, and ``parts`` add up to ``bubble``.

    Attributes:
        variant: its name.
        ranks: number of ranks.
        step: wall time.
        compute: forward, backward and dense optimizer, without slowdown by transfers.
        parts: of the bubble, by the names in ``events.BUBBLE_PARTS``.
        qps: samples per second of all ranks.
    """

    variant: str
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
        """Time in which the engine waits for communication, without the wait for stragglers."""
        return self.parts["exposed_embedding"] + self.parts["exposed_dense"]

    def as_row(self) -> dict[str, Any]:
        """A row of a table: milliseconds and percentages."""
        return {
            "ranks": self.ranks,
            "side": self.variant,
            "step ms": 1e3 * self.step,
            "compute ms": 1e3 * self.compute,
            **{f"{name.replace('_', ' ')} ms": 1e3 * seconds for name, seconds in self.parts.items()},
            "bubble %": 100 * self.bubble / self.step,
            "QPS": self.qps,
        }

    def as_json(self) -> dict[str, Any]:
        """The fields and the bubble. The variant has the key ``side``."""
        fields = asdict(self)
        return {"side": fields.pop("variant"), **fields, "bubble": self.bubble}


def simulate(
    variant: TrainingVariant,
    cluster: Cluster,
    model: ModelProfile,
    batches: Sequence[NDArray[np.int64]],
    seed: int = 0,
) -> SimulationResult:
    """Simulate training on ``batches``. The first two steps and the last step are not counted.

    With the same batches, seed and balancing, variants get the same owners of rows and the same noise.

    Args:
        batches: history lengths of the samples of consecutive global batches, at least four batches.
    """
    ignored = FIRST_STEPS + LAST_STEPS
    if len(batches) <= ignored:
        raise ConfigurationError(
            f"batches: {len(batches)} are too few. Give at least {ignored + 1}: {ignored} steps are not counted."
        )
    loads = make_loads(batches, cluster, model, variant.balance, seed)
    ranks = SimulatedRanks(cluster.ranks, cluster.latency if cluster.ranks > 1 else 0.0)  # one rank sends nothing
    operations = StepOperations(ranks, cluster, model, variant, loads)
    if variant.schedule == "prioritized":
        steps = prioritized(operations)
    else:
        steps = synchronous(operations, prefetch_ids=variant.schedule == "sparse_dist")
    totals = [_totals(ranks) for _ in steps]
    counted = totals[-1 - LAST_STEPS] - totals[FIRST_STEPS - 1]
    step, compute, *parts = (counted.mean(axis=1) / (len(batches) - ignored)).tolist()
    named_parts = dict(zip(BUBBLE_PARTS, parts, strict=True))
    return SimulationResult(variant.name, cluster.ranks, step, compute, named_parts, qps=loads.samples / step)


def _totals(ranks: SimulatedRanks) -> NDArray[np.float64]:
    """``[2 + parts, ranks]`` seconds so far: wall time, compute, and the parts of the bubble."""
    return np.stack([ranks.now, ranks.useful, *(ranks.parts[name] for name in BUBBLE_PARTS)])
