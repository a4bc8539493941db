"""What to simulate: the cluster, the model, and the variant of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_freescale.balance.cost import CostModel
from lightning_freescale.runtime.errors import ConfigurationError


@dataclass(frozen=True)
class Cluster:
    """Ranks with one full-duplex link each.

    Attributes:
        ranks: number of ranks.
        bandwidth: bytes per second that a rank can send and, at the same time, receive; ``inf`` makes transfers free.
        latency: seconds from the moment at which the last rank joins an exchange to its first byte.
        nccl_slowdown: time of compute during an exchange that uses SMs, over its time without the exchange.
        host_waits: whether the host waits for the collision gradients before it launches the dense optimizer, as on CPU, where
            there are no streams. If not, their exchange overlaps with the optimizer.
        shared: whether all links share one medium, such as the memory of one host. An exchange then takes as long as the mean
            of the bytes of the ranks at ``bandwidth``. If not, each link takes as long as its own bytes.
        reduce_bandwidth: bytes per second of a link in an AllReduce, if it differs from ``bandwidth``.
        reduce_latency: seconds of an AllReduce of no bytes, if ``latency`` does not give them.
        reduce_path: whether an AllReduce of FreeScale has links of its own, for example because the exchanges use the memory of
            the host. In TorchRec it shares a communicator, and so the order, with the exchanges.
    """

    ranks: int
    bandwidth: float
    latency: float = 0.0
    nccl_slowdown: float = 1.0
    host_waits: bool = False
    shared: bool = False
    reduce_bandwidth: float | None = None
    reduce_latency: float | None = None
    reduce_path: bool = False

    def __post_init__(self) -> None:
        _check("ranks", self.ranks, self.ranks >= 1, "at least 1")
        _check("bandwidth", self.bandwidth, self.bandwidth > 0, "positive")
        _check("latency", self.latency, 0 <= self.latency < np.inf, "finite and not negative")
        _check("nccl_slowdown", self.nccl_slowdown, 1 <= self.nccl_slowdown < np.inf, "finite and at least 1")
        for name in ("reduce_bandwidth", "reduce_latency"):
            value = getattr(self, name)
            if value is not None:
                _check(name, value, value > 0, "positive")

    def allreduce(self, size: float) -> tuple[float, float]:
        """Seconds on each link, and seconds of latency, of an AllReduce of ``size`` bytes: ring or tree, the faster one."""
        if self.ranks == 1:
            return 0.0, 0.0
        once = size / (self.reduce_bandwidth or self.bandwidth)
        ring = 2 * (self.ranks - 1) / self.ranks * once, 2 * (self.ranks - 1) * self.latency
        tree = 2 * once, 2 * np.ceil(np.log2(self.ranks)) * self.latency
        seconds, latency = min(ring, tree, key=sum)
        return seconds, latency if self.reduce_latency is None else self.reduce_latency


_AMOUNTS = "row_bytes", "dense_bytes", "noise", "id_bytes", "fixed_bytes"
_SECONDS = "optimizer", "table_seconds", "row_seconds", "id_seconds", "collision_seconds", "overhead"


@dataclass(frozen=True)
class ModelProfile:
    """What a rank computes and exchanges in a step.

    Attributes:
        cost: seconds of forward and backward of a sample, from its history length.
        row_bytes: bytes of an embedding row, and of its gradient. Every event of a history looks up one row.
        collisions: share of the rows of a batch that the previous batch uses too.
        dense_bytes: bytes of the dense gradients.
        optimizer: seconds of the dense optimizer, after backward.
        forward: share of ``cost`` that is forward.
        noise: standard deviation of a rank's compute time, relative to the time that ``cost`` gives.
        id_bytes: bytes of an id that is sent to the owner of its row.
        fixed_bytes: bytes that a rank sends besides rows, before forward and again after backward: pooled features.
        table_seconds: seconds of look-ups, updates and index work of a step that do not depend on its rows. TorchRec does this
            work before forward and after backward, FreeScale beside them.
        row_seconds: further seconds of this work for each row that a rank exchanges.
        id_seconds: seconds of the exchange of ids that do not depend on their number: the ranks tell each other the sizes, and
            the host waits for them. Only ``TrainPipelineBase`` waits for it before forward.
        collision_seconds: seconds in which the owners update the rows that collide and look them up again, after their gradients
            have arrived and before the rows are sent. Only FreeScale waits for it.
        overhead: seconds of a step in which the engine does nothing, for none of the other reasons.
        buckets: number of AllReduces of the dense gradients; None is DDP's default, one for each 25 MiB.
    """

    cost: CostModel
    row_bytes: float
    collisions: float = 0.12
    dense_bytes: float = 0.0
    optimizer: float = 0.0
    forward: float = 1 / 3
    noise: float = 0.0
    id_bytes: float = 8.0
    fixed_bytes: float = 0.0
    table_seconds: float = 0.0
    row_seconds: float = 0.0
    id_seconds: float = 0.0
    collision_seconds: float = 0.0
    overhead: float = 0.0
    buckets: int | None = None

    def __post_init__(self) -> None:
        if self.buckets is not None:
            _check("buckets", self.buckets, self.buckets >= 1, "at least 1")
        for name in (*_AMOUNTS, *_SECONDS):
            value = getattr(self, name)
            _check(name, value, 0 <= value < np.inf, "finite and not negative")
        for name in ("collisions", "forward"):
            value = getattr(self, name)
            _check(name, value, 0 <= value <= 1, "a share, 0 to 1")


@dataclass(frozen=True)
class TrainingVariant:
    """How to train: schedule, balancing and transport.

    Attributes:
        name: for tables.
        schedule: ``"base"`` is TorchRec's ``TrainPipelineBase`` and ``"sparse_dist"`` its ``TrainPipelineSparseDist``. Both
            exchange rows and gradients synchronously; the second prefetches ids. ``"prioritized"`` is FreeScale's schedule.
        balance: ``"off"``, or how samples are assigned to ranks, see :mod:`~lightning_freescale.balance.partition`.
        sm_free: whether rows and gradients travel without SMs. The dense AllReduce always uses NCCL, and so SMs.
    """

    name: str
    schedule: Literal["base", "sparse_dist", "prioritized"]
    balance: str = "off"
    sm_free: bool = False


TORCHREC = TrainingVariant("TorchRec", "base")
SPARSE_DIST = TrainingVariant("TorchRec SparseDist", "sparse_dist")
BALANCED = TrainingVariant("+ balance", "sparse_dist", "fixed")
PRIORITIZED = TrainingVariant("+ prioritize", "prioritized", "fixed")
FREESCALE = TrainingVariant("FreeScale", "prioritized", "fixed", sm_free=True)
VARIANTS = (TORCHREC, SPARSE_DIST, BALANCED, PRIORITIZED, FREESCALE)


def _check(name: str, value: float, valid: bool, wanted: str) -> None:
    if not valid:
        raise ConfigurationError(f"{name}: {value} must be {wanted}")
