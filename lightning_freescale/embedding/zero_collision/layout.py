"""How the slots of a table are arranged, and when a slot is taken back from its id."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Literal

EMPTY = -1  # The identity of a slot without an id. FBGEMM uses the same value.
POLICIES = (None, "ttl", "lru")
Policy = Literal["ttl", "lru"] | None


@dataclass(frozen=True)
class Layout:
    """The slots of a table, or of the part of it that one rank holds. FBGEMM arranges them in the same way.

    The rows of a table form equal buckets. An id belongs to the bucket ``id % buckets``, and it probes the slots of its
    bucket from its home slot ``hash(id) % (bucket_size - reserved)`` on, in a circle.

    Attributes:
        buckets: number of buckets of the whole table.
        first_bucket: the first bucket that is held here.
        held: number of buckets that are held here. Slots are numbered from 0 within these buckets.
        bucket_size: slots of a bucket, the reserved ones included.
        reserved: slots at the end of each bucket that no id owns. Ids that find no slot share them.
        max_probe: number of slots that an id probes at most.
    """

    buckets: int
    first_bucket: int
    held: int
    bucket_size: int
    reserved: int
    max_probe: int

    @property
    def slots(self) -> int:
        """Number of slots that are held here."""
        return self.held * self.bucket_size

    @property
    def usable(self) -> int:
        """Slots of a bucket that ids can own."""
        return self.bucket_size - self.reserved

    def numbers(self) -> tuple[int, ...]:
        """The attributes in their order, for the C++ core."""
        return astuple(self)


@dataclass(frozen=True)
class Eviction:
    """When a slot is taken back from its id.

    The clock counts training steps. A slot is expired at ``step`` if ``seen + ttl < step``, where ``seen`` is the last step
    whose batch had the id. ``ttl`` is at least 1, so an id of the previous batch is never expired.

    Attributes:
        policy: ``None`` takes no slot back. ``"ttl"`` takes the first slot that is empty or expired. ``"lru"`` takes an empty
            slot, or else the expired slot that was seen least recently.
        ttl: time to live, in training steps.
    """

    policy: Policy = None
    ttl: int = 1

    @property
    def code(self) -> int:
        """The number of the policy in the C++ core and in the Triton kernel."""
        return POLICIES.index(self.policy)
