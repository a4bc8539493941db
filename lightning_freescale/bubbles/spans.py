"""The data that a rank records of a training step: spans of time, each with a kind, and the step that holds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from numpy.typing import NDArray

ENGINE = "compute"  # the track of the compute engine: the main thread on CPU, the compute stream on CUDA


class Role(Enum):
    """How the time of a span counts in the bubble."""

    COMPUTE = "compute"  # useful work
    # With other ranks. On the engine's track, the engine waits for it. On other tracks, it runs in the background.
    COMMUNICATION = "communication"
    WAITING = "waiting"  # for the input, not for another rank
    OVERHEAD = "overhead"  # neither useful work nor a wait


class Kind(StrEnum):
    """What a span is spent on.

    Spans nest. The innermost span counts: an exchange inside ``dense_forward`` is not counted as forward.
    """

    INPUT_WAIT = "input_wait"
    H2D = "h2d"
    ID_EXCHANGE = "id_exchange"
    ROW_EXCHANGE = "row_exchange"  # synchronous: collision and exclusive rows together
    ROW_EXCHANGE_COLLISION = "row_exchange_collision"
    ROW_EXCHANGE_EXCLUSIVE = "row_exchange_exclusive"
    GRADIENT_EXCHANGE = "gradient_exchange"
    EXPERT_EXCHANGE = "expert_exchange"  # events to the ranks of their experts, and back
    ALLREDUCE = "allreduce"
    LOOKUP = "lookup"  # reading and updating table rows outside of forward and backward
    DENSE_FORWARD = "dense_forward"
    DENSE_BACKWARD = "dense_backward"
    OPTIMIZER = "optimizer"
    METRICS = "metrics"

    @property
    def role(self) -> Role:
        return _ROLES[self]


EMBEDDING_EXCHANGES = (
    Kind.ID_EXCHANGE,
    Kind.ROW_EXCHANGE,
    Kind.ROW_EXCHANGE_COLLISION,
    Kind.ROW_EXCHANGE_EXCLUSIVE,
    Kind.GRADIENT_EXCHANGE,
)
EXCHANGES = (*EMBEDDING_EXCHANGES, Kind.EXPERT_EXCHANGE, Kind.ALLREDUCE)
_ROLES = {
    Kind.INPUT_WAIT: Role.WAITING,
    Kind.H2D: Role.WAITING,
    **dict.fromkeys(EXCHANGES, Role.COMMUNICATION),
    Kind.LOOKUP: Role.COMPUTE,
    Kind.DENSE_FORWARD: Role.COMPUTE,
    Kind.DENSE_BACKWARD: Role.COMPUTE,
    Kind.OPTIMIZER: Role.COMPUTE,
    Kind.METRICS: Role.OVERHEAD,
}


class Span(NamedTuple):
    """An interval on one track. Times are in seconds on this rank's clock.

    ``joined`` is the time at which the rank joined the collective, ``nan`` if it is not known.
    """

    kind: Kind
    track: str
    start: float
    end: float
    joined: float


@dataclass(frozen=True)
class Step:
    """One training step of one rank. It starts where the previous step ends, and contains all of its spans."""

    index: int
    start: float
    end: float
    spans: tuple[Span, ...]
    counts: dict[str, float] = field(default_factory=dict)  # bytes, rows, collisions, ...
    arrays: dict[str, NDArray] = field(default_factory=dict)  # history lengths, candidates

    @property
    def wall(self) -> float:
        """Duration in seconds."""
        return self.end - self.start
