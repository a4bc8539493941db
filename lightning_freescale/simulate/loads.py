"""The work of every rank in every step: seconds of compute, and rows to exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.partition import loads
from lightning_freescale.balance.planner import Planner
from lightning_freescale.simulate.events import Array
from lightning_freescale.simulate.scenario import Cluster, ModelProfile


@dataclass(frozen=True)
class RankLoads:
    """The work of the ranks, in arrays ``[steps, ranks]``.

    The link of a rank is full-duplex, so it takes as long as the larger of two numbers: the rows that the rank requests from
    other ranks, and the rows that other ranks request from it. If the links share a medium, it is the mean of all ranks.

    Attributes:
        compute: seconds of forward and backward, without slowdown by transfers.
        rows: that number for all rows.
        collision: that number for the rows that collide.
        exclusive: that number for the exclusive rows.
        samples: mean size of the global batches.
    """

    compute: Array
    rows: Array
    collision: Array
    exclusive: Array
    samples: float


def make_loads(
    batches: Sequence[NDArray[np.int64]], cluster: Cluster, model: ModelProfile, balance: str, seed: int = 0
) -> RankLoads:
    """Assign the samples of global batches to ranks, and draw the owners of their rows.

    Args:
        batches: history lengths of the samples of each global batch. Without balancing, the first samples are rank 0's.
        cluster: the ranks.
        model: its cost model is known to the balancing, its noise is not.
        balance: see :class:`TrainingVariant`.
        seed: of the owners of the rows, which are uniform over the ranks, and of the noise.
    """
    rng, world = np.random.default_rng(seed), cluster.ranks
    planner = Planner.of(balance if balance == "off" else Planner(balance, model.cost))  # type: ignore[arg-type]
    compute = np.empty((len(batches), world))
    requested = np.empty((len(batches), world), dtype=np.int64)
    for step, lengths in enumerate(batches):
        partition = assign_in_order(len(lengths), world) if planner is None else planner(lengths, world=world)
        compute[step] = loads(model.cost(lengths), partition, world) + model.cost.constant
        requested[step] = loads(lengths, partition, world)
    colliding = np.round(model.collisions * requested).astype(np.int64)
    pieces = _off_rank(colliding, rng), _off_rank(requested - colliding, rng)
    rows, collision, exclusive = (_on_link(piece, cluster.shared) for piece in (pieces[0] + pieces[1], *pieces))
    compute *= np.maximum(1 + model.noise * rng.standard_normal(compute.shape), 0.0)
    samples = float(np.mean([len(lengths) for lengths in batches]))
    return RankLoads(compute, rows, collision, exclusive, samples)


def assign_in_order(samples: int, ranks: int) -> NDArray[np.int64]:
    """``[samples]`` rank of each sample without balancing: equal, consecutive shares."""
    return np.arange(samples) * ranks // samples


def _on_link(rows: NDArray[np.int64], shared: bool) -> Array:
    """``[steps, ranks]`` rows that determine the time of a link, from the result of ``_off_rank``."""
    if shared:
        return np.broadcast_to(rows[0].mean(axis=1, keepdims=True), rows.shape[1:])
    return rows.max(axis=0).astype(np.float64)


def _off_rank(requested: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """``[2, steps, ranks]``: rows that each rank receives from other ranks, and rows that it sends to them.

    Args:
        requested: ``[steps, ranks]`` rows that each rank requests, its own rows included.
    """
    world = requested.shape[1]
    of_others = requested.sum(axis=1, keepdims=True) - requested
    return np.stack([requested - rng.binomial(requested, 1 / world), rng.binomial(of_others, 1 / world)])
