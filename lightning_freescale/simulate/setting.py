"""What is simulated: the cluster, the model, the way to train it, and the load that global batches put on the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.cost import CostModel
from lightning_freescale.balance.partition import loads
from lightning_freescale.balance.planner import Planner
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.simulate.events import Array

Schedule = Literal["base", "sparse_dist", "prioritized"]
BUCKET = 25 * 2**20  # bytes of dense gradients that leave together, as in DDP
MOST_BUCKETS = 8  # more of them change nothing but the time a simulation takes


@dataclass(frozen=True)
class Cluster:
    """Ranks with one link each.

    Attributes:
        ranks: their number.
        bandwidth: bytes a second that a rank sends, and receives meanwhile; infinite for none to wait for.
        latency: seconds from the last rank that joins an exchange to its first byte.
        nccl_slowdown: time of compute beside an exchange that holds SMs over its time alone.
        host_waits: whether the host waits for the collision gradients before it launches the dense optimizer, as it does
            where there are no streams; else they hide behind the optimizer, too.
    """

    ranks: int
    bandwidth: float
    latency: float = 0.0
    nccl_slowdown: float = 1.0
    host_waits: bool = False

    def __post_init__(self) -> None:
        _check("ranks", self.ranks, self.ranks >= 1, "at least 1")
        _check("bandwidth", self.bandwidth, self.bandwidth > 0, "positive")
        _check("latency", self.latency, 0 <= self.latency < np.inf, "finite and not negative")
        _check("nccl_slowdown", self.nccl_slowdown, 1 <= self.nccl_slowdown < np.inf, "finite and at least 1")

    def carry(self, size: float) -> float:
        """Seconds that a link takes for ``size`` bytes."""
        return size / self.bandwidth

    def allreduce(self, size: float) -> tuple[float, float]:
        """Seconds on each link, and of latency, to sum ``size`` bytes over all ranks: by a ring, or by a tree if faster."""
        if self.ranks == 1:
            return 0.0, 0.0
        ring = 2 * (self.ranks - 1) / self.ranks * self.carry(size), 2 * (self.ranks - 1) * self.latency
        tree = 2 * self.carry(size), 2 * np.ceil(np.log2(self.ranks)) * self.latency
        return min(ring, tree, key=sum)


@dataclass(frozen=True)
class Model:
    """What a rank computes and exchanges in a step.

    Attributes:
        cost: seconds of forward and backward, by the lengths of the histories.
        row_bytes: of one embedding row, and of its gradient. Every event of a history looks one up.
        collisions: share of the rows of a batch that the batch before uses, too.
        dense_bytes: of the dense gradients.
        optimizer: seconds of compute after backward.
        forward: share of ``cost`` that is forward.
        noise: standard deviation of a rank's compute over what ``cost`` says of it.
        id_bytes: of one id on its way to the owner of its row.
    """

    cost: CostModel
    row_bytes: float
    collisions: float = 0.12
    dense_bytes: float = 0.0
    optimizer: float = 0.0
    forward: float = 1 / 3
    noise: float = 0.0
    id_bytes: float = 8.0

    def __post_init__(self) -> None:
        for name in ("row_bytes", "dense_bytes", "optimizer", "noise", "id_bytes"):
            value = getattr(self, name)
            _check(name, value, 0 <= value < np.inf, "finite and not negative")
        for name in ("collisions", "forward"):
            value = getattr(self, name)
            _check(name, value, 0 <= value <= 1, "a share, 0 to 1")


@dataclass(frozen=True)
class Side:
    """A way to train.

    Attributes:
        name: for tables.
        schedule: of the exchange: TorchRec's ``TrainPipelineBase`` (``"base"``) or ``TrainPipelineSparseDist``, which have
            rows and gradients in order, the second with ids ahead; or ``"prioritized"``.
        balance: ``"off"``, or how samples are dealt to ranks, see :mod:`~lightning_freescale.balance.partition`.
        sm_free: whether rows and gradients travel without SMs. The dense AllReduce is NCCL's always.
    """

    name: str
    schedule: Schedule
    balance: str = "off"
    sm_free: bool = False


TORCHREC = Side("TorchRec", "base")
SPARSE_DIST = Side("TorchRec SparseDist", "sparse_dist")
BALANCED = Side("+ balance", "sparse_dist", "fixed")
PRIORITIZED = Side("+ prioritize", "prioritized", "fixed")
FREESCALE = Side("FreeScale", "prioritized", "fixed", sm_free=True)
SIDES = (TORCHREC, SPARSE_DIST, BALANCED, PRIORITIZED, FREESCALE)


@dataclass(frozen=True)
class Load:
    """What steps put on the ranks, arrays ``[steps, ranks]``.

    Attributes:
        compute: seconds of forward and backward, alone.
        rows: rows that the link of a rank carries: those it asks others for, or those it is asked for if they are more.
        collision: the same for the rows that collide alone.
        exclusive: the same for the others.
        samples: of a global batch, in the mean.
    """

    compute: Array
    rows: Array
    collision: Array
    exclusive: Array
    samples: float


def make_load(
    batches: Sequence[NDArray[np.int64]], cluster: Cluster, model: Model, balance: str, seed: int = 0
) -> Load:
    """Deal global batches to the ranks, and find who asks whom for rows.

    Args:
        batches: history lengths of the samples of each global batch, in the order of the ranks' own samples.
        balance: see :class:`Side`. The plan knows the cost model, not the noise.
        seed: of the owners of rows, which are uniform over the ranks, and of the noise.
    """
    rng, world = np.random.default_rng(seed), cluster.ranks
    planner = Planner.of(balance if balance == "off" else Planner(balance, model.cost))  # type: ignore[arg-type]
    compute = np.empty((len(batches), world))
    asked = np.empty((len(batches), world), dtype=np.int64)
    for step, lengths in enumerate(batches):
        plan = deal_in_order(len(lengths), world) if planner is None else planner(lengths, world=world)
        compute[step] = loads(model.cost(lengths), plan, world) + model.cost.constant
        asked[step] = loads(lengths, plan, world)
    colliding = np.round(model.collisions * asked).astype(np.int64)
    collision, exclusive = _off_rank(colliding, rng), _off_rank(asked - colliding, rng)
    rows, collision, exclusive = (
        piece.max(axis=0).astype(np.float64) for piece in (collision + exclusive, collision, exclusive)
    )
    compute *= np.maximum(1 + model.noise * rng.standard_normal(compute.shape), 0.0)
    return Load(compute, rows, collision, exclusive, float(np.mean([len(lengths) for lengths in batches])))


def _off_rank(asked: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Rows that come from other ranks and that go to them, ``[2, steps, ranks]``, of those that ranks ask for."""
    world = asked.shape[1]
    others = asked.sum(axis=1, keepdims=True) - asked
    return np.stack([asked - rng.binomial(asked, 1 / world), rng.binomial(others, 1 / world)])


def deal_in_order(samples: int, ranks: int) -> NDArray[np.int64]:
    """``[samples]`` rank of each sample without balancing: each rank keeps its own."""
    return np.arange(samples) * ranks // samples


def _check(name: str, value: float, fine: bool, wanted: str) -> None:
    if not fine:
        raise ConfigurationError(f"{name}: {value} must be {wanted}")
