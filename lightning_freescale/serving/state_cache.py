"""``StateCache``: the states of the users that were served last. The oldest are forgotten when there are too many."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from lightning_freescale.data.samples import SampleArrays
from lightning_freescale.inference.state_file import DIGEST_BYTES, StoredStates, join_states
from lightning_freescale.models.personalization import UserStates


class CachedState(NamedTuple):
    """The state of one user.

    Attributes:
        first: events of the user before those that the state stands for.
        length: events that the state stands for.
        digest: a hash of these events.
        state: the state, as ``UserStates`` of one user.
    """

    first: int
    length: int
    digest: bytes
    state: UserStates


def digest_of(sample: SampleArrays, first: int, length: int) -> bytes:
    """A hash of the events ``first`` to ``first + length`` of one user."""
    events = slice(first, first + length)
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for column in (sample.items, sample.timestamps, *sample.features.values()):
        hashed.update(np.ascontiguousarray(column[events]).data)
    return hashed.digest()


class StateCache:
    """Least recently used states by user. It is used by one thread at a time.

    Args:
        max_users: number of states that are kept.
        recent: a state is of use while at least so many events follow it,
        refresh: and fewer than ``recent + refresh``. Then it must be made anew.
    """

    def __init__(self, max_users: int, recent: int, refresh: int):
        self.max_users, self._recent, self._refresh = max_users, recent, refresh
        self._states: OrderedDict[str, CachedState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def find(self, user: str, events: SampleArrays) -> CachedState | None:
        """The state of ``user`` if it still fits all ``events`` of the user; otherwise it is forgotten."""
        found = self._states.get(user)
        if found is None:
            return None
        after = len(events.items) - found.first - found.length
        fits = self._recent <= after < self._recent + self._refresh
        if not fits or digest_of(events, found.first, found.length) != found.digest:
            del self._states[user]
            return None
        self._states.move_to_end(user)
        return found

    def put(self, user: str, state: CachedState) -> None:
        self._states[user] = state
        self._states.move_to_end(user)
        while len(self._states) > self.max_users:
            self._states.popitem(last=False)

    # ---- files -----------------------------------------------------------------------------------------------------
    def stored(self) -> StoredStates | None:
        """All states, the least recently used first; ``None`` if there are none."""
        if not self._states:
            return None
        found = list(self._states.values())
        return StoredStates(
            users=np.array(list(self._states), dtype=str),
            first=np.array([state.first for state in found], dtype=np.int64),
            digests=[state.digest for state in found],
            states=join_states([state.state for state in found]),
        )

    def put_all(self, stored: StoredStates, device: torch.device) -> None:
        """Take over the states of a file."""
        for at, (user, state) in enumerate(
            zip(stored.users.tolist(), split_states(stored.states, device), strict=True)
        ):
            self.put(
                str(user), CachedState(int(stored.first[at]), int(stored.states.lengths[at]), stored.digests[at], state)
            )


def split_states(states: UserStates, device: torch.device) -> Sequence[UserStates]:
    """The state of each user apart, in memory of its own."""
    tensors = {name: tensor.to(device) for name, tensor in states.tensors().items()}
    return [
        UserStates.from_tensors({name: tensor[at : at + 1].clone() for name, tensor in tensors.items()})
        for at in range(len(states.lengths))
    ]
