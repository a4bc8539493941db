"""A file of events, played in time order: sessions of users become batches in the order of their last events."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch
from lightning_freescale.data.raw_ids import raw_item_ids
from lightning_freescale.data.sources import open_source


class Step(NamedTuple):
    """One training step: its batch, what is predicted in it, and the items among which the targets are ranked."""

    batch: SeqBatch
    positions: Tensor  # [q] int64, events of the histories whose output is evaluated
    targets: Tensor  # [q] int64, which item of the shelf comes next
    shelf: Tensor  # [n] int64 ids
    age: Tensor  # [n] int64, steps since each of them came


def read_sessions(path: Path, events: int) -> list[NDArray[np.int64]]:
    """The item ids of each session. The events of a user, in time order, are cut into sessions of ``events`` events.

    A shorter rest counts as a session if it has two events or more. The sessions are in the order of their last events.
    """
    chunks = list(open_source(path).events())
    users, items = (
        np.concatenate([np.asarray(getattr(chunk, name).to_pylist()).astype(str) for chunk in chunks])
        for name in ("users", "items")
    )
    order = np.argsort(np.concatenate([chunk.ticks for chunk in chunks]), kind="stable")
    names, number = np.unique(items[order], return_inverse=True)
    whole = np.char.isdigit(names).all()
    ids = raw_item_ids(names.astype(np.int64) if whole else names)[number]
    open_sessions: dict[str, list[int]] = {}
    found: list[tuple[int, NDArray[np.int64]]] = []  # the time of the last event, and the ids

    def close(session: list[int]) -> None:
        if len(session) > 1:
            found.append((session[-1], ids[session]))

    for at, user in enumerate(users[order]):
        session = open_sessions.setdefault(user, [])
        session.append(at)
        if len(session) == events:
            close(open_sessions.pop(user))
    for session in open_sessions.values():
        close(session)
    return [session for _, session in sorted(found, key=lambda pair: pair[0])]


def most_live_items(sessions: list[NDArray[np.int64]], window: int) -> int:
    """The largest number of distinct items among any ``window`` consecutive sessions.

    >>> most_live_items([np.array([1, 2]), np.array([2, 3]), np.array([3, 3])], window=2)
    3
    """
    starts = range(max(1, len(sessions) - window + 1))
    return max(len(np.unique(np.concatenate(sessions[start : start + window]))) for start in starts)


def play_sessions(sessions: list[NDArray[np.int64]], batch: int, drawn: int, window: int, seed: int) -> list[Step]:
    """The steps, in time order, from the second batch on.

    An event is a target if its item came in an earlier batch, and it is ranked among all items of earlier batches.

    Args:
        batch: sessions of a step.
        drawn: sampled negatives of each session, uniformly from the items of the last ``window`` sessions.
    """
    chance = np.random.default_rng(seed)
    steps: list[Step] = []
    items = np.unique(np.concatenate(sessions))
    came = np.full(len(items), -1)  # the step in which each item came first; -1 before that
    came[np.searchsorted(items, np.concatenate(sessions[:batch]))] = 0
    for number, start in enumerate(range(batch, len(sessions) - batch + 1, batch), 1):
        histories = sessions[start : start + batch]
        shelf, age = items[came >= 0], number - came[came >= 0]
        live = np.unique(np.concatenate(sessions[max(0, start - window) : start]))
        negatives = chance.choice(live, (batch, drawn))
        events = np.concatenate(histories)
        lengths = torch.tensor([len(history) for history in histories] + [drawn] * batch)
        last = lengths[:batch].cumsum(0) - 1
        predicts = torch.ones(len(events), dtype=torch.bool).index_fill_(0, last, False)
        following = torch.from_numpy(events).roll(-1)
        known = torch.from_numpy(np.isin(following.numpy(), shelf)) & predicts
        positions = known.nonzero().flatten()
        ids = torch.from_numpy(shelf)
        values = torch.from_numpy(np.concatenate([events, negatives.ravel()]))
        features = KeyedJaggedTensor([HISTORY, NEGATIVES], values, lengths=lengths, stride=batch)
        times = torch.cat([torch.arange(len(history)) for history in histories])
        targets = torch.searchsorted(ids, following[positions])
        steps.append(Step(SeqBatch(features, times, None), positions, targets, ids, torch.from_numpy(age)))
        first = np.searchsorted(items, events)
        came[first] = np.where(came[first] < 0, number, came[first])
    return steps
