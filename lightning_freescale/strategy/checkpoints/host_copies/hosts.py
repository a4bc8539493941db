"""Which ranks share a host, and which rank of another host keeps the files of a rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


class Hosts:
    """The hosts of a training, as one rank sees them.

    Args:
        identities: for each rank, a value that only ranks of the same host have.
        rank: this rank.
    """

    def __init__(self, identities: Sequence[Hashable], rank: int):
        found: dict[Hashable, list[int]] = {}
        for other, identity in enumerate(identities):
            found.setdefault(identity, []).append(other)
        self.all = list(found.values())  # The ranks of each host.
        self.own = found[identities[rank]]  # The ranks of this host.
        self.leader = self.own[0]
        self.leads = self.leader == rank  # Whether this rank acts for its host.
        self.place = self.own.index(rank)  # Its place among the ranks of its host.
        self.of_rank = [found[identity] for identity in identities]

    def peers(self) -> dict[int, int]:
        """For each rank, the rank of the next host that keeps its files. It is empty if there is one host."""
        if len(self.all) == 1:
            return {}
        following = [*self.all[1:], self.all[0]]
        return {
            rank: others[place % len(others)]
            for ranks, others in zip(self.all, following, strict=True)
            for place, rank in enumerate(ranks)
        }
