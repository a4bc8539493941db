"""Zero-collision ids in plain Python, with dictionaries: the definition that the fast versions are compared with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_freescale.embedding.zero_collision.layout import Eviction, Layout

_BITS = (1 << 64) - 1


def hash_id(number: int) -> int:
    """MurmurHash3 of the two 64-bit words ``(number, 0)``, as FBGEMM computes it: an unsigned 64-bit integer.

    >>> hash_id(42)
    5430222864781560104
    """

    def rotate(value: int, bits: int) -> int:
        return ((value << bits) | (value >> (64 - bits))) & _BITS

    def finalize(h: int) -> int:
        h = ((h ^ (h >> 33)) * 0xFF51AFD7ED558CCD) & _BITS
        h = ((h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53) & _BITS
        return h ^ (h >> 33)

    k = rotate(number * 0x87C37B91114253D5 & _BITS, 31) * 0x4CF5AD432745937F & _BITS
    h1 = rotate(k, 27) * 5 + 0x52DCE729 & _BITS
    h2 = h1 * 5 + 0x38495AB5 & _BITS
    h1, h2 = h1 ^ 16, h2 ^ 16
    h1 = (h1 + h2) & _BITS
    h2 = (h2 + h1) & _BITS
    h1, h2 = finalize(h1), finalize(h2)
    h1 = (h1 + h2) & _BITS
    h2 = (h2 + h1) & _BITS
    return h1 ^ h2


@dataclass
class ReferenceRemapper:
    """The state of one table, or of the part of it that one rank holds.

    Attributes:
        identities: the id that owns each slot. Empty slots have no entry.
        seen: the last step whose batch had the id of the slot.
    """

    layout: Layout
    eviction: Eviction
    identities: dict[int, int] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)

    def probed(self, number: int) -> list[int]:
        """The slots that an id may own, in the order in which it probes them."""
        layout = self.layout
        base = (number % layout.buckets - layout.first_bucket) * layout.bucket_size
        home = hash_id(number) % layout.usable
        return [base + (home + step) % layout.usable for step in range(min(layout.max_probe, layout.usable))]

    def find(self, number: int) -> int | None:
        """The slot that the id owns."""
        return next((slot for slot in self.probed(number) if self.identities.get(slot) == number), None)

    def reserved(self, number: int) -> int:
        """The slot that an id shares with others if it owns none."""
        layout = self.layout
        base = (number % layout.buckets - layout.first_bucket) * layout.bucket_size
        return base + layout.usable + hash_id(number) % layout.reserved

    def look_up(self, ids: Iterable[int]) -> list[int]:
        """The slot of each id, without any change."""
        found = ((number, self.find(number)) for number in ids)
        return [self.reserved(number) if slot is None else slot for number, slot in found]

    def insert(self, ids: Iterable[int], step: int) -> dict[int, int]:
        """Insert the ids of the batch of training step ``step`` that own no slot, if there is one for them.

        Returns:
            the fresh slots: those that have a new owner, and who owns them.
        """
        missing = []
        for number in sorted(set(ids)):
            slot = self.find(number)
            if slot is None:
                missing.append(number)
            else:
                self.seen[slot] = step
        fresh = {}
        for number in missing:
            slot = self._free_slot(number, step)
            if slot is not None:
                self.identities[slot], self.seen[slot] = number, step
                fresh[slot] = number
        return fresh

    def _free_slot(self, number: int, step: int) -> int | None:
        probed = self.probed(number)
        empty = [slot for slot in probed if slot not in self.identities]
        expired = [slot for slot in probed if slot in self.identities and self.seen[slot] + self.eviction.ttl < step]
        if self.eviction.policy is None:
            candidates = empty
        elif self.eviction.policy == "ttl":
            candidates = [slot for slot in probed if slot in empty or slot in expired]
        else:
            candidates = empty or sorted(expired, key=lambda slot: self.seen[slot])
        return candidates[0] if candidates else None
